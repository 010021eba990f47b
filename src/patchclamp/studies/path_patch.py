"""Path patching: which heads does a head affect, and does it affect the answer directly?

Activation patching shows the effect of a head along all paths. Path patching isolates one. The sender (a head, or any
part of a row) gets its value from the other prompt, and everything between it and the receivers (inputs of later heads,
or the logits) is frozen to the unpatched run. The receivers' inputs from that run are then patched into the unpatched
run. The resulting change is the sender's direct effect on the receiver.

    run 1  unpatched; everything between is captured
    run 2  sender patched, everything between frozen to run 1; the receivers' inputs are captured
    run 3  unpatched, with the receivers' inputs from run 2; graded

If the receiver is the end of the model (`final_norm` or `logits`), run 2 is graded and there is no run 3.

Source: Goldowsky-Dill et al. 2023 (arXiv:2304.05969); Wang et al. 2022 (arXiv:2211.00593), section 3.1 and appendix B,
where MLPs count as part of the path: freeze=("z",).
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from patchclamp.errors import PatchclampError, ProgramError, UnsupportedSite, unknown
from patchclamp.language import From, Op, Replace, Site
from patchclamp.language.site import SITES, SPECS, parse_edited_site, unmoved
from patchclamp.language.tokens import Positions, every
from patchclamp.language.values import as_plain
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.studies import inputs
from patchclamp.studies.grid import MIN_RERUNS, GridCase, GridPlace, GridPlan, OpenWriter, PairGrid
from patchclamp.studies.inputs import Column, Row
from patchclamp.studies.sources import CellWriter, Mixing, captured_runs
from patchclamp.studies.sweep_result import PathPatchResult

ENDS = ("final_norm", "logits")  # receivers at the end of the model
FREEZABLE = ("z", "attn_out", "mlp_out")
ATTENTION, MLP = ("z", "attn_out"), ("neurons", "mlp_out")  # senders
logger: logging.Logger = logging.getLogger(__name__)

SENT = "senders"  # label of the senders' positions
SENDERS_AT_ONCE = 64  # senders whose receivers' inputs are kept at a time


class PathReceiver(NamedTuple):
    """Sites whose inputs are patched together; empty for the end of the model."""

    label: str
    sites: tuple[Site, ...]


class PathPatch(PairGrid):
    """Patch the path from every sender to every receiver, with everything between frozen, and show which paths matter.

    Rows of the grid are senders, columns receivers. A cell is NaN if its receiver is not downstream of its sender.
    Receivers are patched at every position of the patched prompt. For prompts of different lengths, `positions` selects
    the senders' tokens to patch.

    Raises: `UnsupportedSite` for sites that cannot be senders or receivers, `ProgramError` for a wrong argument, and
    the error of any run.
    """

    command = "paths"

    senders: inputs.Senders = ("z",)
    """Senders: z, attn_out, neurons or mlp_out, or 'z[9, 3]'; the heads of all layers by default."""
    receivers: inputs.Receivers = ("logits",)
    """Inputs of one layer, such as 'q[9, 6]' or 'mlp_in[8]', or logits; a nested list (joined by + on the command line)
    is patched together."""
    group: inputs.OptionalCount = 1
    """Number of heads or neurons per sender."""
    positions: inputs.Position = None
    """Selection or `Match` at which senders are patched, or a list with one per pair; the whole prompt by default."""
    freeze: inputs.Frozen = ("z", "mlp_out")
    """Sites to freeze between sender and receiver: z, attn_out, mlp_out."""

    def plan(self, lm: LM) -> GridPlan:
        _check_mixers(lm)
        try:
            cases = self.cases(lm, _at(self.positions, self.clean))
        except PatchclampError as error:  # the label of the column is not the caller's
            raise type(error)(error.message, (error.path or "").replace(f"[{SENT!r}]", "")) from None
        rows = _senders(lm, self.senders, self.layers, self.group)
        receivers, frozen = _receivers(lm, self.receivers), _frozen(self.freeze)
        for i, case in enumerate(cases):
            [at] = case.columns
            columns = tuple(Column(of.label, at.clean, at.corrupt) for of in receivers)
            cases[i] = case._replace(columns=columns)
        return _PathPlan(lm, self, cases, rows, receivers, frozen)


path_patch: Callable[..., PathPatchResult] = PathPatch.short_form("path_patch")


class _PathPlan(GridPlan):
    """A grid of senders (rows) and receivers (columns). One pair of prompts is patched at a time."""

    def __init__(
        self, lm: LM, study: PathPatch, cases: list[GridCase], rows: list[Row], receivers: list[PathReceiver],
        frozen: tuple[str, ...],
    ) -> None:  # fmt: skip
        settings = {"receivers": [list(map(str, of.sites)) for of in receivers], "frozen": frozen}
        super().__init__(lm, study, PathPatchResult, cases, rows, direction=study.direction, seed=study.seed,
                         settings=settings, verb="patching paths")  # fmt: skip
        self.receivers, self.frozen = receivers, frozen
        self.extra = {"frozen": frozen, "notice": self._notice}
        self.reruns = MIN_RERUNS
        if not self.possible.any():
            raise ProgramError("no receiver is downstream of any sender", "receivers")
        if self._notice:
            logger.warning("patchclamp: %s", self._notice)

    @functools.cached_property
    def _notice(self) -> str:
        """The reason why the effect on the end of the model is 0 by construction; "" if it may differ from 0, as for an
        answer's later tokens, which attend to the patched tokens."""
        ends = [of.label for of in self.receivers if not of.sites]
        frozen = [name for name in self.frozen if name in ATTENTION]
        reached = any(
            case.side(self.written).last in getattr(case.columns[0], self.written)
            or any(suffix for score in case.graded.scores for suffix, _ in score) for case in self.cases
        )  # fmt: skip
        if reached or not ends or not frozen:
            return ""
        return (f"The effect on {' and '.join(ends)} is 0 by construction: it is measured at the last token, the "
                "senders are patched at earlier tokens, and attention, the only way between tokens, is frozen "
                f"({', '.join(frozen)}). Patch the last token too, choose an input of a later layer as the receiver, "
                "or leave attention out of freeze=.")  # fmt: skip

    def _possible(self, row: Row, p: int) -> bool:
        sites = self.receivers[p].sites  # receivers that are not downstream keep their unpatched values
        return not sites or any(_behind(self.lm, row, site) for site in sites)

    def parts(self, places: Sequence[GridPlace]) -> list[Sequence[GridPlace]]:
        senders = list(dict.fromkeys(place.at[0] for place in places))
        group = {r: i // SENDERS_AT_ONCE for i, r in enumerate(senders)}
        return [list(of) for _, of in itertools.groupby(places, lambda place: group[place.at[0]])]

    def groups(self) -> list[list[int]]:
        return [[i] for i in range(len(self.cases))]

    def writers(self, group: Sequence[int], until: ExitStack) -> list[OpenWriter]:
        case = self.cases[group[0]]
        ids = case.side(self.written).ids

        @functools.cache
        def both() -> tuple[Run, Run]:
            """Run the source prompt and the patched prompt."""
            [source] = captured_runs(self.lm, [case.side(self.read).ids], self.sites)
            until.callback(source.close)
            [base] = captured_runs(self.lm, [ids], [Site(name) for name in self.frozen])
            until.callback(base.close)
            return source, base

        sent = until.enter_context(ExitStack())

        def writer(places: Sequence[GridPlace]) -> _PathWriter:
            sent.close()  # frees the runs of the previous senders
            writer = _PathWriter(self, ids, *both())
            writer.send({place.at[0]: (place.row, *self.sides(place, group[0])) for place in places}, sent)
            return writer

        return [writer]


class _PathWriter(CellWriter):
    """Writes the edits for the graded runs of a prompt pair.

    source: run of the other prompt · base: unpatched run · sent: each sender's run 2, by row
    """

    def __init__(self, plan: _PathPlan, ids: Sequence[int], source: Run, base: Run) -> None:
        super().__init__(Mixing(), None)
        self._plan, self._ids, self._source, self._base = plan, list(ids), source, base
        self._sent: dict[int, Run] = {}

    def send(self, senders: dict[int, Any], until: ExitStack) -> None:
        """Execute run 2 for every sender (row, positions to read and to write), unless all receivers are the end of the
        model."""
        inner = list(dict.fromkeys(site for of in self._plan.receivers for site in of.sites))
        if not inner:
            return
        edits = [self._sending(*of) for of in senders.values()]
        runs = self._plan.lm.run([self._ids] * len(edits), max_tokens=1, edits=edits, capture=inner)
        for run in runs:
            until.callback(run.close)
        for run in runs:
            run.answer  # noqa: B018  raises the run's own error
        self._sent = dict(zip(senders, runs, strict=True))

    def edits(
        self, row: Row, read: tuple[int, ...], write: tuple[int, ...], cell: tuple[int, int, int]
    ) -> list[list[Op]]:
        _, r, p = cell
        receiver, whole = self._plan.receivers[p], every[: len(self._ids)]
        if not receiver.sites:
            return [self._sending(row, read, write)]
        return [[Replace(From(self._sent[r], at, whole), at=at, tokens=whole) for at in receiver.sites]]

    def _sending(self, row: Row, read: tuple[int, ...], write: tuple[int, ...]) -> list[Op]:
        """Return the edits of run 2: the sender gets its value from the other prompt, and everything downstream is
        frozen to the unpatched run. In the sender's own layer, the MLP is downstream of attention.
        """
        assert row.layer is not None
        edits: list[Op] = [Replace(From(self._source, at, every[read]), at=at, tokens=every[write]) for at in row.sites]
        whole = every[: len(self._ids)]
        for name in self._plan.frozen:
            first = row.layer if (row.site in ATTENTION and name == "mlp_out") else row.layer + 1
            refs = self._plan.lm.sites.resolve(Site(name))
            behind = [Site(name, ref.layer) for ref in refs if ref.layer is not None and ref.layer >= first]
            edits += [Replace(From(self._base, at, whole), at=at, tokens=whole) for at in behind]
        return edits


def _behind(lm: LM, row: Row, site: Site) -> bool:
    """True if a receiver's site reads a sender's output: in a later layer, or downstream in the same layer."""
    assert row.layer is not None
    assert isinstance(site.layers, int)
    if site.layers != row.layer:
        return site.layers > row.layer
    if lm.sites.family.parallel and row.site in ATTENTION and SPECS[site.name].block == "mlp":
        return False
    order = list(SITES)
    return order.index(site.name) > order.index(row.site) and site.name not in unmoved(row.site)


def _check_mixers(lm: LM) -> None:
    """Reject recurrent layers: their state is not among the frozen sites, and would let other paths through."""
    recurrent = lm.sites.sizes.recurrent
    if recurrent:
        raise UnsupportedSite(
            f"path patching is not supported with the state space or linear attention of {lm.model.name}, layers "
            f"{', '.join(map(str, recurrent))}: a state cannot be frozen; use patch_sweep"
        )


def _senders(lm: LM, senders: Any, layers: Any, group: inputs.OptionalCount) -> list[Row]:
    """Return the sender rows: heads and neurons in groups, other outputs whole."""
    rows: dict[Row, None] = {}
    for i, text in enumerate([senders] if isinstance(senders, (str, Site)) else senders):
        try:
            site = parse_edited_site(text)
            if site.name not in (*ATTENTION, *MLP):
                raise UnsupportedSite(f"{site} cannot be a sender; expected one of {', '.join((*ATTENTION, *MLP))}")
        except PatchclampError as error:
            raise error.under(f"senders[{i}]") from None
        rows.update(dict.fromkeys(inputs.rows_of(lm, [site], layers, group if SPECS[site.name].index else None)))
    return list(rows)


def _receivers(lm: LM, receivers: Any) -> list[PathReceiver]:
    items = [receivers] if isinstance(receivers, (str, Site)) else list(receivers)
    found = []
    for i, item in enumerate(items):
        together = list(item) if isinstance(item, (list, tuple)) else [item]
        try:
            sites = [parse_edited_site(site) for site in together]
            ends = [site for site in sites if site.name in ENDS]
            if ends and len(sites) > 1:
                raise ProgramError(f"{ends[0]} is the end of the model and cannot be combined with other sites")
            inner = tuple(_one_layer(lm, site) for site in sites if site.name not in ENDS)
        except PatchclampError as error:
            raise error.under(f"receivers[{i}]") from None
        found.append(PathReceiver(" + ".join(map(str, sites)), inner))
    if not found or len({of.label for of in found}) < len(found):
        raise ProgramError("expected at least one receiver and no duplicates", "receivers")
    return found


def _one_layer(lm: LM, site: Site) -> Site:
    refs = lm.sites.resolve(site)
    if site.name in FREEZABLE:
        raise UnsupportedSite(f"{site} is frozen between sender and receiver: use an input, such as q, k, v or mlp_in")
    if len(refs) != 1 or refs[0].layer is None:
        raise UnsupportedSite(f"{site}: expected a receiver in one layer, such as q[9, 6], or logits")
    return Site(site.name, refs[0].layer, site.index)


def _frozen(freeze: Sequence[str]) -> tuple[str, ...]:
    names = [freeze] if isinstance(freeze, str) else list(freeze)
    for name in names:
        if name not in FREEZABLE:
            raise unknown("site to freeze", name, FREEZABLE, "freeze")
    return tuple(dict.fromkeys(names))


def _at(positions: Any, clean: Any) -> dict[str, Any]:
    """Return the grid's only column, the sender positions; for several pairs it may be a list of selections."""
    positions = as_plain(positions, "positions")
    count = len(clean) if inputs.listed(clean) else 1
    if isinstance(positions, (list, tuple)) and len(positions) != count:
        raise ProgramError(
            f"expected one selection, such as prompt[2:5], or one for each of {count} pairs, got {len(positions)}",
            "positions"
        )  # fmt: skip
    if isinstance(positions, Mapping) and not {"clean", "corrupt"} <= positions.keys():
        raise ProgramError(f"expected one selection for all senders, got a mapping {positions!r:.100}", "positions")
    return {SENT: Positions("prompt") if positions is None else positions}
