"""Fit translators for `pc.Lens` and `logit_lens`: affine maps from each layer's rows to the last layer's.

A tuned lens is trained: A and b minimise the KL divergence of the layer's prediction from the model's own. A Jacobian
lens is computed: A is the average Jacobian of the final stream with respect to the layer's, and b is 0.

Source: Belrose et al. 2023 (arXiv:2303.08112), equations 2 and 3; Gurnee et al. 2026, "Verbalizable representations
form a global workspace in language models" (transformer-circuits.pub/2026/workspace), and its package jacobian-lens.

L layers · N rows · D model width · V vocabulary
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from patchclamp.engines.tokenizer import prompt_of
from patchclamp.errors import ProgramError, TokensError
from patchclamp.language import Capture, Site
from patchclamp.language.ops import Translator
from patchclamp.language.tokens import prompt, read_tokens
from patchclamp.language.values import as_file
from patchclamp.lm import LM
from patchclamp.plots import Chart, Curve, Curves
from patchclamp.plots.style import percent
from patchclamp.studies import inputs
from patchclamp.studies.logit_lens import checked_site
from patchclamp.studies.readout import LAST, MAX_FLOATS, FromWeights, Unembedding
from patchclamp.studies.study import Arg, Study, StudyResult, progress, provenance
from patchclamp.studies.teacher_forcing import parts

if TYPE_CHECKING:
    import pandas
    import torch

Kind = Literal["tuned", "jacobian"]


class FitLensResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """Translators for a `site` at `layers`, and the divergence of their predictions from the model's.

    matrix [L, D, D], bias [L, D]: the row h is read as A h + b
    kl, plain_kl [L]: mean KL divergence of the lens from the model, in nats, with and without translators, over the
        rows of held-out prompts
    agreement, plain_agreement [L]: the fraction of these rows whose likeliest token matches the model's
    rows: the number of held-out rows
    """

    kind: Kind
    site: str
    layers: tuple[int, ...]
    matrix: np.ndarray
    bias: np.ndarray
    kl: np.ndarray
    plain_kl: np.ndarray
    agreement: np.ndarray
    plain_agreement: np.ndarray
    rows: int

    @property
    def translators(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """(A, b) by layer, as accepted by `pc.Lens` and `logit_lens`; both also accept this result or its file."""
        return {layer: (self.matrix[i], self.bias[i]) for i, layer in enumerate(self.layers)}

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per layer: KL and top-1 agreement, with and without translators."""
        import pandas

        names = ("kl", "plain_kl", "agreement", "plain_agreement")
        return pandas.DataFrame({"layer": self.layers, **{name: getattr(self, name) for name in names}})

    def picture(self) -> Curves:
        """Return plot data: KL and agreement by layer, with and without translators."""
        layers = np.array(self.layers, np.float64)
        charts = (
            Chart("KL divergence from the model", "nats", (Curve(f"{self.kind} lens", layers, self.kl),
                  Curve("logit lens", layers, self.plain_kl))),
            Chart("Same likeliest token", "share of rows", (Curve(f"{self.kind} lens", layers, self.agreement),
                  Curve("logit lens", layers, self.plain_agreement)), y_range=(-0.02, 1.02)),
        )  # fmt: skip
        return Curves(
            title=f"{self.kind.capitalize()} lens at {self.site}", x_label="layer", charts=charts,
            provenance=self.provenance.where,
            notes=(f"Means over layers, of {self.rows} held-out rows: {self._summary}.",),
        )  # fmt: skip

    @property
    def _summary(self) -> str:
        return (f"KL {self.kl.mean():.2f} nats, {self.plain_kl.mean():.2f} without translators; same likeliest token "
                f"{percent(self.agreement.mean())}, {percent(self.plain_agreement.mean())} without")  # fmt: skip

    def __repr__(self) -> str:
        return f"<FitLensResult {self.kind}, {len(self.layers)} layers of {self.site}: {self._summary}>"


def _steps(steps: Any, path: str) -> int:
    return inputs.check_whole(steps, path, 1, 1 << 20)


def _share(share: Any, path: str) -> float:
    if not 0 < (number := inputs.as_float(share, path)) < 1:
        raise ProgramError(f"expected a fraction between 0 and 1, got {share!r}", path)
    return number


class FitLens(Study):
    """Fit a tuned lens or a Jacobian lens on prompts, and measure it on held-out prompts.

    A tuned lens needs only rows, which any engine provides; each step captures a batch of prompts. A Jacobian lens
    needs `engine="transformers"`, and D backward passes for each prompt, in batches. It differentiates the final
    stream, summed over tokens, with respect to one token's row, and averages over tokens and then prompts, so effects
    on later tokens count. The last layer of resid_post is not translated.

    Raises: `EngineError` for a Jacobian lens on another engine, `ModelError` if the model's norm and unembedding do not
    reproduce its logits, and the error of any run.
    """

    command = "fit-lens"
    not_served = "it fits many rows on the host; run it in the client with pc.LM(url)"

    dataset: inputs.PromptFile
    """Prompts: texts or token ids, or with `chat` texts or lists of messages."""
    kind: Kind = "tuned"
    """tuned (trained by KL divergence) or jacobian (averaged Jacobians)."""
    site: inputs.SiteField = "resid_post"
    """Site as wide as the stream, such as resid_post or resid_mid."""
    layers: inputs.Layers = None
    """Layers for sites given without an index: a number, a list, or a range such as "0:12"; all by default."""
    tokens: inputs.Selected = prompt
    """Tokens of each prompt to fit on; the Jacobian lens paper leaves out the first 16 and the last."""
    chat: inputs.Flag = False
    """Send each prompt as the user turn of a chat."""
    held_out: Annotated[float, Arg(_share, float)] = 0.2
    """Fraction of the prompts held out to measure the lens; at least one prompt."""
    steps: Annotated[int, Arg(_steps, int)] = 250
    """Training steps of a tuned lens (Adam; the learning rate falls to 0)."""
    step_prompts: inputs.Positive = 16
    """Number of prompts per training step."""
    learning_rate: Annotated[float, Arg(inputs.as_positive, float)] = 1e-3
    """Learning rate of a tuned lens at the first step."""
    seed: inputs.Whole = 0
    """Seed of the held-out split and of the order of the other prompts."""

    def _run(self, lm: LM, *, show_progress: inputs.Progress = None) -> FitLensResult:
        site = checked_site(lm, self.site).name
        layers = inputs.layers_of(lm, site, self.layers)
        encoded, tokens = inputs.ask(lm, self.dataset, self.chat, "dataset"), read_tokens(self.tokens, "tokens")
        for i, one in enumerate(encoded):
            if not len(prompt_of(lm.tokenizer, one.ids, one.text, None).select(tokens, len(one.ids), one.ids)):
                raise TokensError(f"{tokens} selects no token in this prompt", f"dataset[{i}]")
        asked = list({one.ids: one for one in encoded}.values())
        if len(asked) < 2:
            raise ProgramError(f"expected at least two distinct prompts, got {len(asked)}", "dataset")
        draws = np.random.default_rng(self.seed)
        order = [asked[i] for i in draws.permutation(len(asked))]
        test = min(max(round(self.held_out * len(asked)), 1), len(asked) - 1)
        fit = _Fit(lm, self, site, layers, order[test:])
        runs = self.steps if self.kind == "tuned" else len(fit.prompts)
        with progress("fitting", runs, show_progress, "steps" if self.kind == "tuned" else "prompts") as advance:
            matrix_LDD, bias_LD = fit.tuned(draws, advance) if self.kind == "tuned" else fit.jacobian(advance)
        measured, rows = fit.measured(order[:test], matrix_LDD, bias_LD)
        return FitLensResult(
            provenance=provenance(lm, (self.seed,)), kind=self.kind, site=site, layers=tuple(layers),
            matrix=matrix_LDD.cpu().numpy(), bias=bias_LD.cpu().numpy(), rows=rows,
            **dict(zip(MEASURED, measured, strict=True)),
        )  # fmt: skip


fit_lens: Callable[..., FitLensResult] = FitLens.short_form("fit_lens")


class _Fit:
    """Fits lenses for a `site` at `layers` to prompts."""

    def __init__(
        self, lm: LM, study: FitLens, site: str, layers: list[int], prompts: list[inputs.EncodedPrompt]
    ) -> None:
        self._lm, self._study, self.prompts = lm, study, prompts
        self._tokens, self._sites = read_tokens(study.tokens, "tokens"), [Site(site, layer) for layer in layers]
        self._device = getattr(lm.engine, "device", "cpu")  # a Transformers model in this process has one
        self._unembedding: Unembedding = _moved(FromWeights(lm, list(prompts[0].ids)).unembedding, self._device)

    def tuned(self, draws: np.random.Generator, advance: Callable[[int], None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Train and return A [L, D, D] and b [L, D], initialised to the identity and to 0."""
        import torch

        width, steps, end = self._lm.model.d_model, self._study.steps, self._points([LAST])
        trained = [i for i, point in enumerate(self._points(self._sites)) if point not in end]
        change_LDD = torch.zeros(len(self._sites), width, width, device=self._device, requires_grad=True)
        bias_LD = torch.zeros(len(self._sites), width, device=self._device, requires_grad=True)
        adam, batches = torch.optim.Adam([change_LDD, bias_LD]), self._batches(draws)
        for step in range(steps):
            adam.param_groups[0]["lr"] = self._study.learning_rate * (1 - step / steps)
            for logprobs_NV, rows_LND, share in self._read(next(batches)):
                for i in trained:
                    moved_ND = rows_LND[i] + rows_LND[i] @ change_LDD[i].T + bias_LD[i]
                    (kl(logprobs_NV, self._logprobs(moved_ND)).mean() * share).backward()
            adam.step()
            adam.zero_grad()
            advance(1)
        return torch.eye(width, device=self._device) + change_LDD.detach(), bias_LD.detach()

    def jacobian(self, advance: Callable[[int], None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the averaged Jacobians [L, D, D], and zero biases [L, D]."""
        import torch

        points, width = self._points(self._sites), self._lm.model.d_model
        mean_LDD = torch.zeros(len(points), width, width)
        for one in self.prompts:
            run = self._lm.run(one.prompt, max_tokens=1, capture=Capture(LAST, self._tokens))
            positions = run.positions(LAST)
            run.close()
            found = self._lm.engine.jacobians(list(one.ids), points, positions)
            for i, point in enumerate(points):
                mean_LDD[i] += torch.from_numpy(found[point]) / len(self.prompts)
            advance(1)
        return mean_LDD.to(self._device), torch.zeros(len(points), width, device=self._device)

    def measured(
        self, test: list[inputs.EncodedPrompt], matrix_LDD: torch.Tensor, bias_LD: torch.Tensor
    ) -> tuple[np.ndarray, int]:
        """Measure the lens on held-out prompts; return the `MEASURED` quantities [4, L] and the number of rows."""
        import torch

        sums, count = np.zeros((len(MEASURED), len(self._sites))), 0
        with torch.no_grad():
            for part in parts(test, self._study.step_prompts):
                for logprobs_NV, rows_LND, _ in self._read(part):
                    count += len(logprobs_NV)
                    for i, rows_ND in enumerate(rows_LND):
                        for k, moved_ND in enumerate((rows_ND @ matrix_LDD[i].T + bias_LD[i], rows_ND)):
                            lens_NV = self._logprobs(moved_ND)
                            sums[k, i] += float(kl(logprobs_NV, lens_NV).sum())
                            sums[k + 2, i] += int((logprobs_NV.argmax(-1) == lens_NV.argmax(-1)).sum())
        return sums / count, count

    def _read(self, part: Sequence[inputs.EncodedPrompt]) -> Iterator[tuple[torch.Tensor, list[torch.Tensor], float]]:
        """Yield the model's log-probabilities [n, V] and each site's rows [n, D] for a chunk of tokens, and the chunk's
        fraction of all tokens."""
        import torch

        sites = [*self._sites, Site(LAST.name, self._lm.model.layers - 1)]
        runs = self._lm.run([one.prompt for one in part], max_tokens=1,
                            capture=[Capture(site, self._tokens) for site in sites])  # fmt: skip
        fetched = self._lm.fetch(runs)
        for run in runs:
            run.close()
        *rows_LND, last_ND = (
            torch.cat([torch.as_tensor(of_run[str(site)]).float() for of_run in fetched]).to(self._device)
            for site in sites
        )
        for n in torch.arange(len(last_ND)).split(max(MAX_FLOATS // self._lm.model.d_vocab, 1)):
            with torch.no_grad():
                logprobs_NV = self._logprobs(last_ND[n])
            yield logprobs_NV, [rows_ND[n] for rows_ND in rows_LND], len(n) / len(last_ND)

    def _logprobs(self, rows_ND: torch.Tensor) -> torch.Tensor:
        return self._unembedding(rows_ND).log_softmax(-1)

    def _batches(self, draws: np.random.Generator) -> Iterator[list[inputs.EncodedPrompt]]:
        """Yield the prompts of each training step, from repeated passes over all prompts in random order."""
        while True:
            yield from parts([self.prompts[i] for i in draws.permutation(len(self.prompts))], self._study.step_prompts)

    def _points(self, sites: Sequence[Site]) -> list[int]:
        return [self._lm.sites.resolve(site)[0].point for site in sites]


MEASURED = ("kl", "plain_kl", "agreement", "plain_agreement")


def kl(model_NV: torch.Tensor, lens_NV: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence [N] of a lens from the model, in nats, given log-probabilities."""
    return (model_NV.exp() * (model_NV - lens_NV)).sum(-1)


def _moved(of: Any, device: Any) -> Any:
    """Return a struct with its tensors moved to a device."""
    if isinstance(of, msgspec.Struct):
        return type(of)(*(_moved(getattr(of, name), device) for name in of.__struct_fields__))
    return of.to(device) if hasattr(of, "to") else of


class LensFile(NamedTuple):
    """Translators for a `site` from another package's file, for `pc.Lens` and `logit_lens`."""

    site: str
    translators: tuple[Translator, ...]


@inputs.checked
def read_lens(path: str | os.PathLike[str], site: Literal["resid_post", "resid_pre"] = "resid_post") -> LensFile:
    """Read translators for `pc.Lens` and `logit_lens` from another package's file or its folder: `params.pt` of
    tuned-lens, `lens.pt` of jacobian-lens. Results of `fit_lens` need no conversion: pass their path.

    site: "resid_post" or "resid_pre", the site that layer indices refer to; resid_pre[l + 1] is resid_post[l].
        tuned-lens starts at resid_pre[0] (the embedding) and lacks the last resid_post

    Files are read by `torch.load(weights_only=True)`, which runs no code. Raises `ProgramError` for other files.
    """
    import torch

    file = Path(as_file(path, "path"))
    if file.is_dir():
        file = file / ("params.pt" if (file / "params.pt").exists() else "lens.pt")
    try:
        data = torch.load(file, map_location="cpu", weights_only=True)
        if "J" in data:
            written, maps = "resid_post", {int(layer): (matrix, None) for layer, matrix in data["J"].items()}
        else:  # the stored matrix is A − 1
            layers = sorted({int(name.partition(".")[0]) for name in data})
            parts = {layer: (data[f"{layer}.weight"].float(), data.get(f"{layer}.bias")) for layer in layers}
            written, maps = "resid_pre", {l: (torch.eye(len(A)) + A, b) for l, (A, b) in parts.items()}  # noqa: E741
        moved = (written == "resid_post") - (site == "resid_post")
        if not (kept := {layer + moved: parts for layer, parts in maps.items() if layer + moved >= 0}):
            raise ProgramError(f"no layers at {site}")
        return LensFile(site, tuple(Translator.of(layer, parts) for layer, parts in kept.items()))
    except Exception as error:  # a damaged file may raise anything
        raise ProgramError(f"{file.name!r} is not a valid tuned-lens or jacobian-lens file: {error}", "path") from None
