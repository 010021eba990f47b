"""Edge attribution patching: estimate the effect of every edge u → v between parts of the model, and patch the largest
edges exactly. The effect of an edge is the change in the metric if v read u's output from the clean run.

Each receiver reads the stream through its own norm. To first order, the effect of an edge u → v is the difference
(clean − corrupt) of u's output, times the gradient with respect to the stream as read by v. An exact patch replaces u's
output by its clean value in the corrupt stream, but only as v reads it, and applies v's norm. This is a single edit at
`attn_in`, `mlp_in` or the final stream.

Source: Syed et al. 2023 (arXiv:2310.10348), equation 3; with `steps`, Hanna et al. 2024 (arXiv:2403.17806), equation 3.

T positions · D model width · R receivers · S senders
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from patchclamp.errors import UnsupportedSite
from patchclamp.language import Replace, Site, Vector, every
from patchclamp.language.structs import PublicStruct
from patchclamp.lm import LM
from patchclamp.plots import GridPanel
from patchclamp.run import Run
from patchclamp.studies.between import Candidates, GradientStudy, Proposal
from patchclamp.studies.readout import Norm, proved_norm

if TYPE_CHECKING:
    import pandas
    import torch


class Edge(PublicStruct, frozen=True):
    """An edge: one part of the model reads another part's output."""

    sender: str
    receiver: str
    estimate: float
    exact: float | None

    @property
    def ends(self) -> tuple[str, str]:
        """The edge's sender and its receiver."""
        return self.sender, self.receiver


class EdgeAttributionResult(Proposal[Edge], frozen=True, eq=False, kw_only=True):
    """Effects of edges, [R, S], summed over positions; NaN unless the sender comes before the receiver.

    senders: "resid_pre[0]" (the embedding), "attn_out[0]", "mlp_out[0]", … · receivers: "attn_in[0]", "mlp_in[0]", …,
    "resid_post[L-1]" (the input of the logits)
    """

    senders: tuple[str, ...]
    receivers: tuple[str, ...]

    kind: ClassVar[str] = "Edge attribution patching"
    heads: ClassVar[tuple[str, str]] = ("sender", "receiver")
    effect: ClassVar[str] = "the receiver read what the sender wrote in"

    def at(self, number: int) -> Edge:
        r, s = divmod(number, len(self.senders))
        exact = float(self.exact[r, s])
        return Edge(self.senders[s], self.receivers[r], float(self.estimates[r, s]), None if np.isnan(exact) else exact)

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per edge: sender, receiver, estimate and exact effect."""
        import pandas

        numbers = np.flatnonzero(np.isfinite(self.estimates)).tolist()
        return pandas.DataFrame([msgspec.structs.asdict(self.at(number)) for number in numbers])

    def panels(self) -> Iterator[GridPanel]:
        """Yield one panel: senders on the horizontal axis, receivers on the vertical."""
        yield GridPanel(
            name="effect of the edge", row_name="receiver", column_name="sender", rows=self.receivers,
            columns=self.senders, values=self.estimates, centre=0.0, **self.marks(self.exact),
        )  # fmt: skip

    def __repr__(self) -> str:
        edge = self.proposals(1)[0]
        edges = int(np.isfinite(self.estimates).sum())
        return (f"<EdgeAttributionResult {edges} edges, largest {edge.estimate:+.3f} from "
                f"{edge.sender} to {edge.receiver}; r {self.pearson():.2f}>")  # fmt: skip


class EdgeEnd(msgspec.Struct, frozen=True):
    """A sender, or a receiver's input. A sender reaches every receiver with a higher `order`.

    stream: the stream before the receiver's norm; None without a norm
    """

    site: Site
    order: int
    stream: Site | None = None


class _EdgeCandidates(Candidates):
    """Candidates whose cells are (receiver, sender) pairs."""

    result = EdgeAttributionResult
    sources = 2

    def __init__(self, lm: LM, study: GradientStudy) -> None:
        super().__init__(lm, study)
        self._senders, self._receivers = _parts(lm)
        parts = (*self._senders, *self._receivers)
        read = {site for part in parts for site in (part.site, part.stream) if site is not None}
        self._point = {site: lm.sites.resolve(site)[0].point for site in read}
        self.fields = {"senders": tuple(str(part.site) for part in self._senders),
                       "receivers": tuple(str(part.site) for part in self._receivers)}  # fmt: skip
        self.read(list(self._point.values()))
        rows = {site: self.corrupt.rows[at] for site, at in self._point.items()}
        self._norms = [_norm(lm, part, rows) for part in self._receivers]

    def estimates(self, steps: int) -> np.ndarray:
        written_STD = np.stack([self.difference(self._point[part.site]) for part in self._senders])
        slopes = np.zeros((len(self._receivers), *written_STD.shape[1:]))
        for run in self.along(steps):
            for r, (part, norm) in enumerate(zip(self._receivers, self._norms, strict=True)):
                slope_TD = run.gradients[self._point[part.site]]
                if norm is not None and part.stream is not None:
                    slope_TD = _before(norm, slope_TD, run.rows[self._point[part.stream]])
                slopes[r] += slope_TD[self.corrupt_at] / max(steps, 1)
        estimates = np.einsum("rtd,std->rs", slopes, written_STD, optimize=True)
        sent, read = ([part.order for part in parts] for parts in (self._senders, self._receivers))
        reached = np.array(sent)[None, :] < np.array(read)[:, None]
        return np.where(reached, estimates, np.nan)

    def sites(self, number: int) -> list[Site]:
        r, s = divmod(number, len(self._senders))
        return [self._receivers[r].stream or self._receivers[r].site, self._senders[s].site]

    def edit(self, number: int, runs: list[Run]) -> Replace:
        """Return an edit that replaces the sender's output by its clean value in the receiver's input."""
        import torch

        r, s = divmod(number, len(self._senders))
        receiver, sender, norm = self._receivers[r], self._senders[s], self._norms[r]
        at = self.corrupt_at
        clean_TD, corrupt_TD = (_rows(run, sender.site) for run in runs)
        changed_TD = _rows(runs[1], receiver.stream or receiver.site).clone()
        changed_TD[at] += clean_TD[self.clean_at] - corrupt_TD[at]
        with torch.no_grad():
            written_TD = changed_TD if norm is None else norm(changed_TD)
        return Replace(Vector.of(written_TD[at]), at=receiver.site, tokens=every[tuple(at.tolist())])


def _parts(lm: LM) -> tuple[list[EdgeEnd], list[EdgeEnd]]:
    """Return senders and receivers in computation order. Raises `UnsupportedSite` for a model that modifies the stream
    after each layer."""
    family = lm.sites.family
    if family.afterwards:
        raise UnsupportedSite(
            f"edges are not defined for {family.name} models: each layer ends with {family.afterwards}, so later "
            "layers do not read the sum of earlier outputs"
        )
    mid = not family.parallel  # otherwise attention and MLP read the same stream
    senders, receivers = [EdgeEnd(Site("resid_pre", 0), 0)], []
    for layer in range(lm.model.layers):
        pre, after = Site("resid_pre", layer), 2 * layer + 1
        receivers += [
            EdgeEnd(Site("attn_in", layer), after, pre),
            EdgeEnd(Site("mlp_in", layer), after + 1 if mid else after, Site("resid_mid", layer) if mid else pre),
        ]
        senders += [EdgeEnd(Site("attn_out", layer), after), EdgeEnd(Site("mlp_out", layer), after + 1)]
    receivers.append(EdgeEnd(Site("resid_post", lm.model.layers - 1), 2 * lm.model.layers + 1))
    return senders, receivers


def _norm(lm: LM, part: EdgeEnd, rows: dict[Site, np.ndarray]) -> Norm | None:
    """Return the norm that a receiver applies to the stream; None if it has none."""
    import torch

    if part.stream is None:
        return None
    before, after = (torch.from_numpy(rows[site]) for site in (part.stream, part.site))
    assert isinstance(part.site.layers, int)
    names = ["ln1"] if part.site.name == "attn_in" else ["ln2", "ln1"]  # attention and MLP may share a norm
    return proved_norm(lm, names, part.site.layers, before, after)


def _before(norm: Norm, slope_TD: np.ndarray, rows_TD: np.ndarray) -> np.ndarray:
    """Backpropagate a gradient from a norm's output to its input."""
    import torch

    with torch.enable_grad():
        rows = torch.from_numpy(rows_TD).clone().requires_grad_()
        value = (norm(rows) * torch.from_numpy(np.ascontiguousarray(slope_TD))).sum()
        return torch.autograd.grad(value, rows)[0].numpy()


def _rows(run: Run, site: Site) -> torch.Tensor:
    import torch

    return torch.as_tensor(run[site]).float()


class EdgeAttribution(GradientStudy):
    """Estimate the effect of every edge between parts of the model from gradients, and patch the largest ones exactly.

    Parts are the embedding, attentions, MLPs and the logits. `run(lm, on=...)` patches on another `LM`.

    Raises: `EngineError` for an engine without gradients, `ModelError` if a norm cannot be reproduced from its weights,
    `UnsupportedSite` for models without a separate norm before attention or MLP, and the error of any run.
    """

    command = "edges"
    candidates = _EdgeCandidates


edge_attribution: Callable[..., EdgeAttributionResult] = EdgeAttribution.short_form("edge_attribution")
