"""Path patching: which heads does a head act on, and does it act on the answer directly?

Activation patching shows the effect of a head along all paths. Path patching isolates one. The sender (a head, or any
part of a row) gets its value from the other prompt, and everything between it and the receivers (inputs of later heads,
or the logits) is frozen to the unpatched run. The receivers' inputs from that run are then patched into the unpatched
run. The resulting change came directly from the sender to the receiver.

    run 1  unpatched; everything between is captured
    run 2  sender patched, everything between frozen to run 1; the receivers' inputs are captured
    run 3  unpatched, with the receivers' inputs from run 2; graded

If the receiver is the end of the model (`final_norm` or `logits`), run 2 is graded and there is no run 3.

Source: Goldowsky-Dill et al. 2023 (arXiv:2304.05969); Wang et al. 2022 (arXiv:2211.00593), section 3.1 and appendix B,
where MLPs count as part of the path: freeze=("z",).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, UnsupportedSite, unknown
from patchclamp.language import From, Op, Replace, Site
from patchclamp.language.site import SITES, parse_edited_site, unmoved
from patchclamp.language.tokens import Positions, every
from patchclamp.language.values import as_plain
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.studies.grid import (
    MIN_RERUNS,
    Asked,
    Cells,
    Filled,
    Finished,
    Listener,
    Round,
    Trial,
    announce,
    carrying,
    check_seed,
    pair_of,
    pairs_of,
    planned,
    question_of,
    teller,
    with_values,
)
from patchclamp.studies.inputs import (
    Answers,
    Frozen,
    Layers,
    Position,
    Progress,
    Prompts,
    Receivers,
    ResumeFile,
    Senders,
    Text,
)
from patchclamp.studies.sources import captured_runs
from patchclamp.studies.study import Study, json_of, provenance
from patchclamp.studies.sweep_result import Column, PathPatchResult, Row, Side, listed, rows_of, words_of

ENDS = ("final_norm", "logits")  # receivers that are the end of the model
FREEZABLE = ("z", "attn_out", "mlp_out")
ATTENTION, MLP = ("z", "attn_out"), ("neurons", "mlp_out")  # senders
SENDERS_AT_ONCE = 64  # senders whose receivers' inputs are kept at a time


class Receiver(NamedTuple):
    """Sites whose inputs are patched together; empty for the end of the model."""

    label: str
    sites: tuple[Site, ...]


class PathPatch(Study):
    """Patch the path from every sender to every receiver, everything between them frozen, and show which paths matter.

    Rows of the grid are senders, columns receivers. A receiver that is not downstream of a sender has NaN there.
    Receivers are patched at every position.

    Raises: `UnsupportedSite` for sites that cannot be senders or receivers, `ProgramError` for a wrong argument, and
    the error of any run.
    """

    command = "paths"

    clean: Prompts
    """Prompt whose senders are patched in; or a list, one per pair. Both prompts of a pair have the same length."""
    corrupt: Prompts
    """Prompt that is run with these senders."""
    answer: Answers
    """Expected answer of the clean prompt, with its leading space: text, a token id, or a list of ids, graded exactly.
    One for all pairs, or a list with one per pair."""
    foil: Answers = None
    """Wrong answer to compare with. The metrics logprob and prob do not need one."""
    senders: Senders = ("z",)
    """Senders: z, attn_out, neurons or mlp_out, or 'z[9, 3]'; the heads of all layers by default."""
    receivers: Receivers = ("logits",)
    """Inputs of one layer, such as 'q[9, 6]' or 'mlp_in[8]', or logits; a nested list (joined by + on the command line)
    is patched together."""
    layers: Layers = None
    """Layers of sites without an index: all by default, a number, a list, or a range such as "0:12"."""
    group: int | None = 1
    """Heads or neurons per sender."""
    positions: Position = None
    """Selection at which senders are patched, or a list with one per pair; the whole prompt by default."""
    freeze: Frozen = ("z", "mlp_out")
    """Sites to freeze between sender and receiver: z, attn_out, mlp_out."""
    metric: Text = "logit_diff"
    """logit_diff, recovered, logprob or prob."""
    direction: Text = "denoising"
    """denoising, or noising: corrupt into clean."""
    seed: int = 0
    """Seed of the confidence interval and of the test over pairs."""

    def _run(
        self,
        lm: LM,
        *,
        batch: int = 512,
        show_progress: Progress = None,
        listener: Listener | None = None,
        resume: ResumeFile = None,
    ) -> PathPatchResult:
        if self.direction not in ("denoising", "noising"):
            raise unknown("direction", self.direction, ("denoising", "noising"), "direction")
        written: Side = "corrupt" if self.direction == "denoising" else "clean"
        _check_mixers(lm)
        _check_lengths(lm, self.clean, self.corrupt)
        asked = pairs_of(
            lm, self.clean, self.corrupt, self.answer, self.foil, self.metric, _at(self.positions, self.clean), written
        )
        rows = _senders(lm, self.senders, self.layers, self.group)
        receivers = _receivers(lm, self.receivers)
        announce(show_progress, rows, receivers, len(asked))
        paths = _Paths(lm, asked, rows, receivers, _frozen(self.freeze), written, check_seed(self.seed))
        with carrying(lm, "patching paths", paths.total, paths.question, batch, show_progress, resume) as cells:
            return _patched(paths, cells, listener)


path_patch = PathPatch.short_form("path_patch")


class _Paths:
    """The checked arguments. `receivers_of`: the numbers of the receivers downstream of each sender."""

    def __init__(
        self, lm: LM, asked: list[Asked], rows: list[Row], receivers: list[Receiver], frozen: tuple[str, ...],
        written: Side, seed: int,
    ) -> None:  # fmt: skip
        self.lm, self.asked, self.rows, self.receivers = lm, asked, rows, receivers
        self.frozen, self.seed = frozen, seed
        self.written: Side = written
        self.read: Side = "clean" if written == "corrupt" else "corrupt"
        self.receivers_of = [[i for i, of in enumerate(receivers) if _behind(lm, row, of)] for row in rows]
        self.count = sum(map(len, self.receivers_of))
        if not self.count:
            raise ProgramError("no receiver lies behind any sender", "receivers")

    @property
    def chunks(self) -> list[list[int]]:
        """Senders with a receiver downstream, in groups."""
        sending = [r for r, of in enumerate(self.receivers_of) if of]
        return [sending[i : i + SENDERS_AT_ONCE] for i in range(0, len(sending), SENDERS_AT_ONCE)]

    def places(self, some: Sequence[int]) -> list[tuple[int, int]]:
        """The (sender, receiver) paths of some senders, by number."""
        return [(r, p) for r in some for p in self.receivers_of[r]]

    @property
    def total(self) -> int:
        """The number of graded runs, including those for the noise floor."""
        return len(self.asked) * sum(planned([len(self.places(some))], MIN_RERUNS) for some in self.chunks)

    @functools.cached_property
    def question(self) -> dict[str, Any]:
        return {
            "study": "path_patch", "pairs": question_of(self.asked), "rows": msgspec.to_builtins(self.rows),
            "receivers": [list(map(str, of.sites)) for of in self.receivers], "frozen": self.frozen,
            "written": self.written,
        }  # fmt: skip


def _patched(paths: _Paths, cells: Cells, listener: Listener | None) -> PathPatchResult:
    """The result, one pair of prompts at a time."""
    prompts = [Trial(words.ids, (), pair.graded) for pair in paths.asked for words in (pair.clean, pair.corrupt)]
    values = cells.graded(prompts)
    both = list(zip(values[::2], values[1::2], strict=True))  # clean and corrupt, before normalisation
    begun = _begun(paths, both)
    if listener is not None:
        listener.start(begun, paths.count)
    tell = None if listener is None else teller(listener, paths.rows, begun.columns)
    finished = Finished(len(paths.rows) * len(paths.receivers), len(paths.asked), tell)
    each, floors = begun.each.copy(), []
    for n, (pair, values_of) in enumerate(zip(paths.asked, both, strict=True)):
        of = _OfPair(paths, pair, values_of)
        try:
            floors += [of.fill(cells, some, each[n], finished) for some in paths.chunks]
        finally:
            of.close()
    bases = [getattr(pair, paths.written) for pair in begun.pairs]
    return with_values(begun, Filled(each, max(floors)), bases, cells.computed, paths.seed)


def _begun(paths: _Paths, both: list[tuple[float, float]]) -> PathPatchResult:
    """The result before any path is patched."""
    pairs = []
    for pair, values in zip(paths.asked, both, strict=True):
        offset, factor = pair.graded.scale(*values)
        result = pair_of(paths.lm, pair, *((value - offset) * factor for value in values))
        (at,) = pair.columns
        columns = tuple(Column(of.label, at.clean, at.corrupt) for of in paths.receivers)
        pairs.append(msgspec.structs.replace(result, columns=columns))
    empty = np.full((len(pairs), len(paths.rows), len(paths.receivers)), np.nan)
    return PathPatchResult(
        provenance=provenance(paths.lm, (paths.seed,)), metric=paths.asked[0].graded.metric, pairs=tuple(pairs),
        rows=tuple(paths.rows), columns=pairs[0].columns, values=empty[0], each=empty,
        clean=float(np.mean([pair.clean for pair in pairs])), corrupt=float(np.mean([pair.corrupt for pair in pairs])),
        noise_floor=np.nan, direction="denoising" if paths.written == "corrupt" else "noising", frozen=paths.frozen,
        source=f"{paths.read} activations", question=json_of(paths.question),
    )  # fmt: skip


class _OfPair:
    """Patches the paths in one pair of prompts. It holds the source runs: those of both prompts, and those of senders
    whose receivers are being patched.

    both: the metric of the clean and of the corrupt prompt, before normalisation
    """

    def __init__(self, paths: _Paths, pair: Asked, both: tuple[float, float]) -> None:
        self._paths, self._graded, (self._column,) = paths, pair.graded, pair.columns
        self._ids, self._other_ids = pair.side(paths.written).ids, pair.side(paths.read).ids
        self._base_value = both[1] if paths.written == "corrupt" else both[0]
        self._offset, self._factor = pair.graded.scale(*both)
        self._open: list[Run] = []
        self._base: Run | None = None
        self._source: Run | None = None

    def fill(self, cells: Cells, some: Sequence[int], values: np.ndarray, finished: Finished) -> float:
        """Write the values of some senders and all receivers downstream into `values` [R, P]. Returns the noise floor
        of these runs."""
        places = self._paths.places(some)
        numbers = np.array([r * values.shape[1] + p for r, p in places])
        unpatched = Trial(self._ids, (), self._graded)

        def rounds() -> list[Round]:
            sent = dict(zip(some, self._sent(some), strict=True))
            return [Round([Trial(self._ids, self._edits(r, p, sent[r]), self._graded) for r, p in places], unpatched)]

        def tell(number: int, which: np.ndarray, of: np.ndarray) -> None:
            finished.add(numbers[which], (of - self._offset) * self._factor)

        (found,) = cells.run([len(places)], rounds, tell, MIN_RERUNS)
        values.flat[numbers] = (found.trials - self._offset) * self._factor
        return float(np.max(np.abs(found.baselines - self._base_value))) * abs(self._factor)

    def _sent(self, some: Sequence[int]) -> list[Run | None]:
        """Run 2 of every sender, or None if all receivers are the end of the model; closes the previous ones."""
        paths = self._paths
        source, base = self._both()
        for run in self._open:
            run.close()
        inner = list(dict.fromkeys(site for of in paths.receivers for site in of.sites))
        if not inner:
            return [None] * len(some)
        edits = [self._sending(paths.rows[r], source, base) for r in some]
        self._open = paths.lm.run([list(self._ids)] * len(some), max_tokens=1, edits=edits, capture=inner)
        for run in self._open:
            run.answer  # noqa: B018  raises the run's own error
        return list(self._open)

    def _edits(self, r: int, p: int, sent: Run | None) -> list[Op]:
        """The edits of the graded run."""
        receiver = self._paths.receivers[p]
        if not receiver.sites:
            return self._sending(self._paths.rows[r], *self._both())
        assert sent is not None
        whole = every[: len(self._ids)]
        return [Replace(From(sent, at, whole), at=at, tokens=whole) for at in receiver.sites]

    def _sending(self, row: Row, source: Run, base: Run) -> list[Op]:
        """The edits of run 2: the sender gets its value from the other prompt, everything downstream is frozen to the
        unpatched run. In the sender's own layer, the MLP is downstream of attention.
        """
        column, layer, written = self._column, row.layer, self._paths.written
        assert layer is not None
        read, write = (column.clean, column.corrupt) if written == "corrupt" else (column.corrupt, column.clean)
        edits: list[Op] = [Replace(From(source, at, every[read]), at=at, tokens=every[write]) for at in row.sites]
        whole = every[: len(self._ids)]
        for name in self._paths.frozen:
            first = layer if (row.site in ATTENTION and name == "mlp_out") else layer + 1
            refs = self._paths.lm.sites.resolve(Site(name))
            behind = [Site(name, ref.layer) for ref in refs if ref.layer is not None and ref.layer >= first]
            edits += [Replace(From(base, at, whole), at=at, tokens=whole) for at in behind]
        return edits

    def _both(self) -> tuple[Run, Run]:
        """Runs of the source prompt and of the patched prompt."""
        if self._source is None or self._base is None:
            paths = self._paths
            sending = [at for row in paths.rows for at in row.sites]
            (self._source,) = captured_runs(paths.lm, [self._other_ids], sending)
            (self._base,) = captured_runs(paths.lm, [self._ids], [Site(name) for name in paths.frozen])
        return self._source, self._base

    def close(self) -> None:
        for run in (*self._open, self._source, self._base):
            if run is not None:
                run.close()


def _behind(lm: LM, row: Row, receiver: Receiver) -> bool:
    """True if a receiver reads what a sender wrote: one of its sites is in a later layer, or downstream in the same
    layer. Its other sites keep their unpatched values."""
    return not receiver.sites or any(_site_behind(lm, row, site) for site in receiver.sites)


def _site_behind(lm: LM, row: Row, site: Site) -> bool:
    assert row.layer is not None
    assert isinstance(site.layers, int)
    if site.layers != row.layer:
        return site.layers > row.layer
    if lm.sites.family.parallel and row.site in ATTENTION and SITES[site.name].block == "mlp":
        return False
    order = list(SITES)
    return order.index(site.name) > order.index(row.site) and site.name not in unmoved(row.site)


def _check_mixers(lm: LM) -> None:
    """Refuse recurrent layers: the frozen sites cover attention and MLPs, so a state would let other paths through."""
    recurrent = lm.sites.sizes.recurrent
    if recurrent:
        raise UnsupportedSite(
            f"layers {', '.join(map(str, recurrent))} of {lm.model.name} have a state space or linear attention, which "
            "path patching cannot hold: other ways than the one that is patched would count; patch_sweep works there"
        )


def _check_lengths(lm: LM, clean: Any, corrupt: Any) -> None:
    """Check that both prompts of a pair have the same length, because freezing is position by position."""
    several = listed(clean) and listed(corrupt)
    for i, pair in enumerate(zip(clean, corrupt, strict=False) if several else [(clean, corrupt)]):
        where = f"[{i}]" if several and len(clean) > 1 else ""
        lengths = [len(words_of(lm, of, side + where).ids) for of, side in zip(pair, ("clean", "corrupt"), strict=True)]
        if lengths[0] != lengths[1]:
            raise ProgramError(
                "a path is patched between two prompts of one length, and the clean prompt has "
                f"{lengths[0]} tokens and the corrupt one {lengths[1]}", f"corrupt{where}"
            )  # fmt: skip


def _senders(lm: LM, senders: Any, layers: Any, group: int | None) -> list[Row]:
    """The sender rows: heads and neurons in groups, other outputs whole."""
    rows: dict[Row, None] = {}
    for i, text in enumerate([senders] if isinstance(senders, (str, Site)) else senders):
        try:
            site = parse_edited_site(text)
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
            sites = [parse_edited_site(site) for site in together]
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


def _at(positions: Any, clean: Any) -> dict[str, Any]:
    """The single column of senders' positions; for several pairs, it may hold a selection for each."""
    positions = as_plain(positions, "positions")
    if isinstance(positions, (list, tuple)) and not listed(clean):
        raise ProgramError(
            f"senders are patched at one selection, such as prompt[2:5], and these are {len(positions)}; a list is of "
            "several pairs of prompts", "positions"
        )  # fmt: skip
    if isinstance(positions, (list, tuple)) and len(positions) != len(clean):
        raise ProgramError(f"{len(positions)} selections for {len(clean)} pairs; give one, or one a pair", "positions")
    return {"all tokens": Positions("prompt") if positions is None else positions}
