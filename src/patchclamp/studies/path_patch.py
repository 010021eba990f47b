"""Path patching: which heads does a head speak to, and does it speak to the answer itself?

Activation patching shows the effect of a head by all ways.  Path patching takes one: the sender (a head, or any part
of a row) gets its value of the other prompt, everything between it and the receivers is held at the unpatched run, and
what the receivers (inputs of later heads, or the logits) read in that run is put into the unpatched run.  What then
changes came from the sender straight to the receiver.

    run 1  unpatched; all between is captured
    run 2  sender patched, all between frozen to run 1; what the receivers read is captured
    run 3  unpatched, the receivers' inputs from run 2; graded

Where the receiver is the end of the model (`final_norm` or `logits`), run 2 is graded and there is no run 3.

Source: Goldowsky-Dill et al. 2023 (arXiv:2304.05969); Wang et al. 2022 (arXiv:2211.00593), section 3.1 and appendix B,
where MLPs count as part of the way: freeze=("z",).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, UnsupportedSite, unknown
from patchclamp.language import From, Op, Replace, Site
from patchclamp.language.registry import SITES, unmoved
from patchclamp.language.site import parse_site
from patchclamp.language.tokens import Positions, every
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.studies.cells import Cells, Round, Trial, planned
from patchclamp.studies.columns import Column, listed, words_of
from patchclamp.studies.grid import Filled, Finished, Listener, carrying, graded_values, teller, with_values
from patchclamp.studies.journal import json_of
from patchclamp.studies.pairs import Asked, pair_of, pairs_of, question_of
from patchclamp.studies.result import provenance
from patchclamp.studies.rows import Row, rows_of
from patchclamp.studies.sources import captured_runs
from patchclamp.studies.sweep_result import PathPatch, Side

ENDS = ("final_norm", "logits")  # receivers that are the end of the model
FREEZABLE = ("z", "attn_out", "mlp_out")
ATTENTION, MLP = ("z", "attn_out"), ("neurons", "mlp_out")  # senders
SENDERS_AT_ONCE = 64  # runs whose receivers' inputs are kept together


class Receiver(NamedTuple):
    """Sites whose inputs are patched together; none: the end of the model."""

    label: str
    sites: tuple[Site, ...]


def path_patch(
    lm: LM,
    *,
    clean: Any,
    corrupt: Any,
    answer: Any,
    foil: Any = None,
    senders: Any = ("z",),
    receivers: Any = ("logits",),
    layers: Any = None,
    group: int | None = 1,
    positions: Any = None,
    freeze: Sequence[str] = ("z", "mlp_out"),
    metric: str = "logit_diff",
    direction: str = "denoising",
    batch: int = 512,
    show_progress: bool | None = None,
    listener: Listener | None = None,
    resume: str | Path | None = None,
) -> PathPatch:
    """Patches the way from every sender to every receiver; rows of the grid are senders, columns receivers.

    clean, corrupt: one pair of prompts, of one length
    senders: z, attn_out, neurons or mlp_out; by default the heads of all `layers`; `group` heads or neurons
        are one sender
    receivers: inputs of one layer, such as "q[9, 6]", "v[9, 1]", "mlp_in[8]", or "logits"; a list among them is one
        receiver, its sites patched together. Of grouped-query attention `k` and `v` count key/value heads
    positions: one selection of the patched prompt at which senders are patched; its whole length if not given.
        Receivers are patched at every position
    freeze: what is held between sender and receiver, of "z", "attn_out" and "mlp_out"
    direction: "denoising" patches the corrupt run with senders of the clean one, "noising" the other way round

    All else is as in `patch_sweep`. A receiver that does not lie behind a sender has NaN there.

    Raises: `UnsupportedSite` for sites that cannot be such, `ProgramError` for a wrong argument, and the error of any
        run.
    """
    if direction not in ("denoising", "noising"):
        raise unknown("direction", direction, ("denoising", "noising"), "direction")
    written: Side = "corrupt" if direction == "denoising" else "clean"
    if listed(clean) or listed(corrupt) or not _alike_long(lm, clean, corrupt):
        raise ProgramError("paths are patched in one pair of prompts of one length", "corrupt")
    pairs = pairs_of(lm, clean, corrupt, answer, foil, metric, _at(positions), written)
    rows = _senders(lm, senders, layers, group)
    paths = _Paths(lm, pairs[0], rows, _receivers(lm, receivers), _frozen(freeze), written)
    counts = [paths.count]
    with carrying(lm, "patching paths", planned(counts), paths.question(), batch, show_progress, resume) as cells:
        return _patched(paths, cells, listener)


class _Paths:
    """What is patched. `places` are (sender, receiver) by number, those whose receiver lies behind the sender."""

    def __init__(
        self, lm: LM, pair: Asked, rows: list[Row], receivers: list[Receiver], frozen: tuple[str, ...], written: Side
    ) -> None:
        self.lm, self.pair, self.rows, self.receivers, self.frozen, self.written = (
            lm,
            pair,
            rows,
            receivers,
            frozen,
            written,
        )
        self.read: Side = "clean" if written == "corrupt" else "corrupt"
        self.column = pair.columns[0]
        self.ids = pair.side(written).ids
        behind = [[i for i, of in enumerate(receivers) if _behind(row, of)] for row in rows]
        self.receivers_of = behind
        self.count = sum(map(len, behind))
        if not self.count:
            raise ProgramError("no receiver lies behind any sender", "receivers")

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(r, p) for r, of in enumerate(self.receivers_of) for p in of]

    def question(self) -> dict[str, Any]:
        return {
            "study": "path_patch", "pairs": question_of([self.pair]), "rows": msgspec.to_builtins(self.rows),
            "receivers": [list(map(str, of.sites)) for of in self.receivers], "frozen": self.frozen,
            "written": self.written,
        }  # fmt: skip

    def sending(self, row: Row, source: Run, base: Run) -> list[Op]:
        """The edits of run 2: the sender's value of the other prompt, and all behind it as in the unpatched run.

        Of the sender's own layer the MLP lies behind attention.
        """
        column, layer = self.column, row.layer
        assert layer is not None
        read, write = (column.clean, column.corrupt) if self.written == "corrupt" else (column.corrupt, column.clean)
        edits: list[Op] = [Replace(From(source, at, every[read]), at=at, tokens=every[write]) for at in row.sites]
        for name in self.frozen:
            first = layer if (row.site in ATTENTION and name == "mlp_out") else layer + 1
            having = [
                ref.layer for ref in self.lm.sites.resolve(Site(name)) if ref.layer is not None and ref.layer >= first
            ]
            whole = every[: len(self.ids)]
            edits += [
                Replace(From(base, at, whole), at=at, tokens=whole) for at in [Site(name, behind) for behind in having]
            ]
        return edits

    def receiving(self, receiver: Receiver, sent: Run) -> list[Op]:
        """The edits of run 3."""
        whole = every[: len(self.ids)]
        return [Replace(From(sent, at, whole), at=at, tokens=whole) for at in receiver.sites]


def _patched(paths: _Paths, cells: Cells, listener: Listener | None) -> PathPatch:
    pair, lm = paths.pair, paths.lm
    both = cells.once(
        2, lambda: graded_values(lm, [Trial(of.ids, (), pair.graded) for of in (pair.clean, pair.corrupt)])
    )
    offset, factor = pair.graded.scale(*both)
    clean, corrupt = ((value - offset) * factor for value in both)
    columns = tuple(Column(of.label, paths.column.clean, paths.column.corrupt) for of in paths.receivers)
    empty = np.full((1, len(paths.rows), len(columns)), np.nan)
    begun = PathPatch(
        provenance=provenance(lm), metric=pair.graded.metric,
        pairs=(msgspec.structs.replace(pair_of(lm, pair, clean, corrupt), columns=columns),), rows=tuple(paths.rows),
        columns=columns, values=empty[0], each=empty, clean=clean, corrupt=corrupt, noise_floor=np.nan,
        direction="denoising" if paths.written == "corrupt" else "noising", frozen=paths.frozen,
        source=f"{paths.read} activations", question=json_of(paths.question()),
    )  # fmt: skip
    if listener is not None:
        listener.begin(begun, paths.count)
    told = None if listener is None else teller(listener, paths.rows, columns)
    base = both[1] if paths.written == "corrupt" else both[0]
    each, floor = empty.copy(), 0.0
    runs = _Runs(paths)
    try:
        for some in _chunks(paths):
            values, baselines = _chunk(paths, cells, runs, some, (offset, factor), told)
            floor = max(floor, float(np.max(np.abs(baselines - base))) * abs(factor))
            for (r, p), value in zip(_places(paths, some), values, strict=True):
                each[0, r, p] = value
    finally:
        runs.close()
    return with_values(begun, Filled(each, floor), [getattr(begun, paths.written)], cells.computed, 0)


def _chunk(
    paths: _Paths, cells: Cells, runs: _Runs, some: Sequence[int], scale: tuple[float, float], told: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The values of some senders with all receivers behind them."""
    places = _places(paths, some)
    numbers = [r * len(paths.receivers) + p for r, p in places]
    finished = Finished(
        len(places), 1, None if told is None else lambda which, of: told([numbers[i] for i in which], of)
    )

    def rounds() -> list[Round]:
        sent = dict(zip(some, runs.sent(some), strict=True))
        trials = [Trial(paths.ids, runs.edits(r, p, sent[r]), paths.pair.graded) for r, p in places]
        return [Round(trials, Trial(paths.ids, (), paths.pair.graded))]

    def tell(number: int, which: np.ndarray, values: np.ndarray) -> None:
        finished.add(which, (values - scale[0]) * scale[1])

    (found,) = cells.run([len(places)], rounds, tell, 2)
    return (found.trials - scale[0]) * scale[1], found.baselines


class _Runs:
    """The runs that are read: both prompts', and those of senders whose receivers are being patched."""

    def __init__(self, paths: _Paths) -> None:
        self._paths = paths
        self._open: list[Run] = []
        self._base: Run | None = None
        self._source: Run | None = None

    def sent(self, some: Sequence[int]) -> list[Run | None]:
        """Run 2 of every sender that needs one of its own; the last ones are given up."""
        paths = self._paths
        source, base = self._both()
        for run in self._open:
            run.close()
        inner = list(dict.fromkeys(site for of in paths.receivers for site in of.sites))
        if not inner:
            return [None] * len(some)
        edits = [paths.sending(paths.rows[r], source, base) for r in some]
        self._open = paths.lm.run([list(paths.ids)] * len(some), max_tokens=1, edits=edits, capture=inner)
        for run in self._open:
            run.answer  # noqa: B018  raises the run's own error
        return list(self._open)

    def edits(self, r: int, p: int, sent: Run | None) -> list[Op]:
        """The edits of the run that is graded."""
        receiver = self._paths.receivers[p]
        if not receiver.sites:
            return self._paths.sending(self._paths.rows[r], *self._both())
        assert sent is not None
        return self._paths.receiving(receiver, sent)

    def _both(self) -> tuple[Run, Run]:
        """Runs of the prompt that is read and of the one that is patched."""
        if self._source is None or self._base is None:
            paths = self._paths
            (self._source,) = captured_runs(
                paths.lm, [paths.pair.side(paths.read).ids], [at for row in paths.rows for at in row.sites]
            )
            (self._base,) = captured_runs(paths.lm, [paths.ids], [Site(name) for name in paths.frozen])
        return self._source, self._base

    def close(self) -> None:
        for run in (*self._open, self._source, self._base):
            if run is not None:
                run.close()


def _chunks(paths: _Paths) -> list[list[int]]:
    """Senders with a receiver behind them, some at a time."""
    sending = [r for r, of in enumerate(paths.receivers_of) if of]
    return [sending[i : i + SENDERS_AT_ONCE] for i in range(0, len(sending), SENDERS_AT_ONCE)]


def _places(paths: _Paths, some: Sequence[int]) -> list[tuple[int, int]]:
    return [(r, p) for r in some for p in paths.receivers_of[r]]


def _behind(row: Row, receiver: Receiver) -> bool:
    """Whether a receiver reads what a sender wrote: one of its sites lies in a later layer, or in the same one behind
    the sender. Its other sites have what they have without a patch."""
    return not receiver.sites or any(_site_behind(row, site) for site in receiver.sites)


def _site_behind(row: Row, site: Site) -> bool:
    assert row.layer is not None
    assert isinstance(site.layers, int)
    if site.layers != row.layer:
        return site.layers > row.layer
    order = list(SITES)
    return order.index(site.name) > order.index(row.site) and site.name not in unmoved(row.site)


def _alike_long(lm: LM, clean: Any, corrupt: Any) -> bool:
    return len(words_of(lm, clean, "clean").ids) == len(words_of(lm, corrupt, "corrupt").ids)


def _senders(lm: LM, senders: Any, layers: Any, group: int | None) -> list[Row]:
    """The rows: heads and neurons in groups, and outputs that have no such parts as they are."""
    rows: dict[Row, None] = {}
    for i, text in enumerate([senders] if isinstance(senders, (str, Site)) else senders):
        try:
            site = parse_site(text)
            if site.name not in (*ATTENTION, *MLP):
                raise UnsupportedSite(f"{site} is no sender; these are: {', '.join((*ATTENTION, *MLP))}")
        except PatchclampError as error:
            raise error.under(f"senders[{i}]") from None
        rows.update(dict.fromkeys(rows_of(lm, [site], layers, group if SITES[site.name].index else None)))
    return list(rows)


def _receivers(lm: LM, receivers: Any) -> list[Receiver]:
    items = [receivers] if isinstance(receivers, (str, Site)) else list(receivers)
    found = []
    for i, item in enumerate(items):
        together = list(item) if isinstance(item, (list, tuple)) else [item]
        try:
            sites = [parse_site(site) for site in together]
            ends = [site for site in sites if site.name in ENDS]
            if ends and len(sites) > 1:
                raise ProgramError(f"{ends[0]} is the end of the model, and stands alone")
            inner = tuple(_one_layer(lm, site) for site in sites if site.name not in ENDS)
        except PatchclampError as error:
            raise error.under(f"receivers[{i}]") from None
        found.append(Receiver(" + ".join(map(str, sites)), inner))
    if not found or len({of.label for of in found}) < len(found):
        raise ProgramError("at least one receiver is needed, and none twice", "receivers")
    return found


def _one_layer(lm: LM, site: Site) -> Site:
    refs = lm.sites.resolve(site)
    if site.name in FREEZABLE:
        raise UnsupportedSite(f"{site} is held between sender and receiver; a receiver is an input: q, k, v, mlp_in, …")
    if len(refs) != 1 or refs[0].layer is None:
        raise UnsupportedSite(f"{site}: a receiver is of one layer, as in q[9, 6], or it is logits")
    return Site(site.name, refs[0].layer, site.index)


def _frozen(freeze: Sequence[str]) -> tuple[str, ...]:
    names = [freeze] if isinstance(freeze, str) else list(freeze)
    for name in names:
        if name not in FREEZABLE:
            raise unknown("site to freeze", name, FREEZABLE, "freeze")
    return tuple(dict.fromkeys(names))


def _at(positions: Any) -> dict[str, Any]:
    """The one column of senders' positions."""
    return {"all tokens": [Positions("prompt") if positions is None else positions]}
