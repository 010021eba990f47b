"""The prover. A site of a live model is available only once runs of the model have shown that the site table is right.

A site has five proofs, all made with runs through the engine:
shape  its rows have the right shape and are finite
noop   writing back the rows that were read leaves the next-token logits bit-identical
edit   an edit moves the logits
order  the edit moves exactly the tensors of its layer that are computed from the site. This detects a table that
       confuses two tensors, even if no sum includes them
sums   the stream adds up: attention and MLP outputs are added to it, and the end of a layer is the start of the next.
       In a table found in the model's modules, a layer may have a mixer other than attention

Under tensor parallelism the same proofs check the layout. A replicated row is read from one worker and written to all:
if it were a partial sum or a slice, the logits would change. Sharded rows are gathered from all workers.

Proofs are cached: a model is proved once for each engine, dtype and version. `ProvedLM` proves its sites when loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from patchclamp.engines.base import Engine, VllmLLM
from patchclamp.engines.grading import GradeJob
from patchclamp.engines.preflight import cache_folder
from patchclamp.errors import EngineError, ModelError, UnsupportedSite, as_patchclamp_error
from patchclamp.language import Add, Capture, From, Op, Replace, Site, prompt
from patchclamp.language.ops import MAX_TOP, Lens
from patchclamp.language.site import SPECS, unmoved
from patchclamp.language.values import as_flag
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.sites import LENS, SiteRef
from patchclamp.store.system import write_whole
from patchclamp.version import __version__

MIN_MOVED_RTOL = 1e-6  # relative change above which an edit has moved a row
MAX_UNMOVED_RTOL = 0.05  # relative change up to which an edit has not moved a row


def watched(ref: SiteRef, watchable: dict[str, int]) -> list[str]:
    """Return sites that an edit at `ref` must, or must not, move (not at its own point). `watchable`: point by site."""
    names = (*SPECS[ref.name].moves, *unmoved(ref.name))
    return [text for name in names if watchable.get(text := f"{name}[{ref.layer}]", ref.point) != ref.point]


def disorder(ref: SiteRef, plain: Run, edited: Run, watched_refs: list[str]) -> str:
    """Describe the first wrong effect of an edit at `ref`, or return "". Compares the last token's rows."""
    for watched_ref in watched_refs:
        name = watched_ref.partition("[")[0]
        gap = _gap(np.asarray(edited[watched_ref]), np.asarray(plain[watched_ref]))
        if name in SPECS[ref.name].moves and gap <= MIN_MOVED_RTOL:
            return f"an edit at {ref} does not change {watched_ref}, which depends on it"
        if name in unmoved(ref.name) and gap > MAX_UNMOVED_RTOL:
            return f"an edit at {ref} changes {watched_ref}, which does not depend on it"
    return ""


def _gap(a: np.ndarray, b: np.ndarray) -> float:
    x, y = a.astype(np.float64).reshape(-1), b.astype(np.float64).reshape(-1)
    return float(np.linalg.norm(x - y) / max(float(np.linalg.norm(y)), 1e-30))


EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
DEFAULT_EPS = 2.0**-3  # for any other dtype
ADDED: tuple[str, ...] = ("attn_out", "mlp_out")
MIXERS: tuple[str, ...] = ("attn_out", "mixer_out")
HEAD_RTOL = 0.1  # per head; large, because the KV cache may have eight bits
STREAM: tuple[str, ...] = ("resid_pre", "resid_mid", "resid_post")


def sums(lm: LM, base: Run) -> dict[str, str]:
    """Return the sites that occur in sums, each with the reason why its sum fails, or "" if it holds. A failed sum
    fails every site in it, because it does not show which one is wrong. `base`: a run that captured everything."""
    return _of_table(lm, base) if lm.sites.family.tabled else _of_modules(lm, base)


def _of_table(lm: LM, base: Run) -> dict[str, str]:
    names = lm.sites.names
    wrong = {name: "" for name in names if name in (*STREAM, *ADDED, "mixer_out")}
    mixers = MIXERS if lm.sites.family.both else ("mixer_out",) if "mixer_out" in names else ("attn_out",)
    added = [name for name in (*mixers, "mlp_out") if name in names]  # the sites added to the stream
    if not {"resid_pre", "resid_post"} <= set(names) or not added:
        return {}
    layers_of = {name: {ref.layer for ref in lm.sites.resolve(Site(name))} for name in added}
    for layer in range(lm.sites.layers):
        for before, gains, after in _stages(names, [name for name in layers_of if layer in layers_of[name]]):
            if after == "resid_post" and lm.sites.family.afterwards:
                continue
            terms = [f"{name}[{layer}]" for name in (before, *gains)]
            if not _close(lm, [_rows(base, term) for term in terms], _rows(base, f"{after}[{layer}]")):
                why = f"{' + '.join(terms)} does not equal {after}[{layer}]"
                # a layer's end and the next layer's start are the same point
                words = (*gains, after, *(["resid_pre"] if after == "resid_post" else []))
                wrong |= {name: wrong[name] or why for name in words}
        if layer and not np.array_equal(_rows(base, f"resid_post[{layer - 1}]"), _rows(base, f"resid_pre[{layer}]")):
            why = f"resid_post[{layer - 1}] does not equal resid_pre[{layer}]"
            wrong |= {name: wrong[name] or why for name in ("resid_pre", "resid_post")}
    if {"mixer_out", "attn_out"} <= wrong.keys() and not lm.sites.family.both:  # the same point in attention layers
        wrong["attn_out"] = wrong["attn_out"] or wrong["mixer_out"]
    return wrong | _of_heads(lm, base) | _of_norms(lm, base)


def _stages(names: list[str], added: list[str]) -> list[tuple[str, tuple[str, ...], str]]:
    """Return a layer's stages as (stream before, sites of `added` that are added to it, stream after)."""
    if "resid_mid" not in names:
        return [("resid_pre", tuple(added), "resid_post")]
    mixers = tuple(name for name in added if name in MIXERS)
    parts = [("resid_pre", mixers, "resid_mid"), ("resid_mid", tuple(added[len(mixers) :]), "resid_post")]
    return [part for part in parts if part[1]]


def _of_heads(lm: LM, base: Run) -> dict[str, str]:
    """Check `z` against `v` at the first token, which attends only to itself: each head returns the token's own value
    or, with attention sinks, a fraction of the value. A wrong tensor or head would differ in direction."""
    if lm.sites.family.gated or not {"v", "z"} <= set(lm.sites.names):
        return {}
    for ref in lm.sites.resolve(Site("z")):
        z_HE, v_KE = (_rows(base, f"{name}[{ref.layer}]")[0] for name in ("z", "v"))
        if z_HE.shape[-1] != v_KE.shape[-1]:
            return {}
        v_HE = np.repeat(v_KE, len(z_HE) // len(v_KE), axis=0)
        part_H = (z_HE * v_HE).sum(1) / np.maximum((v_HE**2).sum(1), 1e-30)
        gap_H = np.linalg.norm(z_HE - part_H[:, None] * v_HE, axis=1)
        wrong = (gap_H > HEAD_RTOL * np.linalg.norm(z_HE, axis=1)) | (part_H < -HEAD_RTOL) | (part_H > 1 + HEAD_RTOL)
        if wrong.any():
            head = int(wrong.argmax())
            group = head * len(v_KE) // len(z_HE)
            why = f"z[{ref.layer}, {head}] of the first token is not a multiple of v[{ref.layer}, {group}]"
            return {"v": why, "z": why}
    return {"v": "", "z": ""}


def _of_norms(lm: LM, base: Run) -> dict[str, str]:
    """Check that each normed input differs from the stream before the norm."""
    names, last = lm.sites.names, lm.sites.layers - 1
    wrong: dict[str, str] = {}
    for name, stream in (("attn_in", "resid_pre"), ("mlp_in", "resid_mid"), ("final_norm", "resid_post")):
        if name in names and stream in names:
            pairs = [(name, f"{stream}[{last}]")] if name == "final_norm" else [
                (str(ref), f"{stream}[{ref.layer}]") for ref in lm.sites.resolve(Site(name))
            ]  # fmt: skip
            same = next((pair for pair in pairs if np.array_equal(_rows(base, pair[0]), _rows(base, pair[1]))), None)
            wrong[name] = "" if same is None else f"{same[0]} equals {same[1]} rather than its norm"
    return wrong


def _of_modules(lm: LM, base: Run) -> dict[str, str]:
    names = [name for name in (*ADDED, "resid_mid") if name in lm.sites.names]
    layers_of = {name: {ref.layer for ref in lm.sites.resolve(Site(name))} for name in names}
    wrong: dict[str, str] = dict.fromkeys(names, "")
    for layer in range(lm.sites.layers):
        known = {"resid_pre", "resid_post"}  # sites verified to be the stream
        for before, gains, after in _stages_of_layer({name for name in names if layer in layers_of[name]}):
            terms = [f"{name}[{layer}]" for name in (before, *gains)]
            if _close(lm, [_rows(base, term) for term in terms], _rows(base, f"{after}[{layer}]")):
                known |= {before, after}
                continue
            why = f"{' + '.join(terms)} does not equal {after}[{layer}]"
            wrong |= {name: wrong[name] or why for name in {before, *gains, after} - known if name in wrong}
    return wrong


def _stages_of_layer(has: set[str]) -> list[tuple[str, tuple[str, ...], str]]:
    """Return the stages of a layer that has only the sites in `has`. The output of a mixer other than attention has no
    site, so in such a layer only the sum after the mixer can be checked. The sum with the MLP comes first, because it
    verifies `resid_mid`."""
    if "resid_mid" not in has:
        gains = tuple(name for name in ADDED if name in has)
        return [("resid_pre", gains, "resid_post")] if gains else []
    stages = [("resid_mid", "mlp_out", "resid_post"), ("resid_pre", "attn_out", "resid_mid")]
    return [(before, (gain,), after) for before, gain, after in stages if gain in has]


def _close(lm: LM, terms: list[np.ndarray], total: np.ndarray) -> bool:
    """True if terms add up to `total` elementwise, within the rounding error of the model's dtype."""
    slack = 2 * EPS.get(lm.model.dtype, DEFAULT_EPS) * sum(np.abs(term) for term in (*terms, total))
    return bool((np.abs(sum(terms) - total) <= slack).all())


def _rows(base: Run, site: str) -> np.ndarray:
    return np.asarray(base[site]).astype(np.float64)


LENGTH, LONGER_LENGTH = 4, 11  # tokens of the proof's prompt, and of the other prompt in its batch
LOUDER = 16.0  # scale of a second edit, for sites where the first edit moved nothing
# largest difference between a run's logits alone and in a batch, relative to the largest logit: kernels round
# differently, and in dtypes with few bits rounding may make a router choose another expert
LOGITS_RTOL = {"float32": 1e-3, "float16": 0.3, "bfloat16": 0.5}


LENS_RTOL = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}  # relative to the logits' spread


class Proof(msgspec.Struct, frozen=True):
    """The proofs of a site in all its layers.

    layers: the number of its layers; None for a site without layers
    width, layout: the width and layout of its rows
    shape, noop, edit: True if the proof holds
    note: the first layer that fails, and the reason
    adds: True if the sums that include it hold; None if no sum includes it
    order: True if edits moved only the tensors computed from the site; None if its layer has no tensors to compare
    tried: the number of its layers in which an edit was tried
    """

    name: str
    layers: int | None
    width: int
    layout: str
    shape: bool
    noop: bool
    edit: bool
    note: str = ""
    adds: bool | None = None
    order: bool | None = None
    tried: int = 1

    @property
    def holds(self) -> bool:
        return self.shape and self.noop and self.edit and self.adds is not False and self.order is not False


def prove(lm: LM, full: bool = False) -> list[Proof]:
    """Prove every site of a live `LM`.

    Edits are tried in the first, middle and last layer, or with `full` in every layer. With `full`, the runs that write
    back are executed one by one instead of in a batch. Shapes, sums and writing back are checked in all layers.

    Raises: `ModelError` if the model's values are not finite, or if a run depends on the other runs of its batch;
        `EngineError` if taps have no effect in a run on its own.
    """
    lengths = LENGTH, min(LONGER_LENGTH, lm.model.max_model_len - 1)
    ids, longer = (np.linspace(3, lm.model.d_vocab - 1, length).astype(int).tolist() for length in lengths)
    names = lm.sites.names
    captures = [_LOGITS if name == "logits" else Site(name) for name in names]
    base = lm.run(ids, max_tokens=1, capture=captures, logprobs=True)
    _check_finite(lm, base)
    refs = lm.sites.refs()
    if not full:  # the first, middle and last layer of each site
        by_word = [lm.sites.resolve(Site(name)) for name in names]
        refs = [ref for own in by_word for i, ref in enumerate(own) if i in (0, len(own) // 2, len(own) - 1)]
    # attention and a state space side by side do not move each other, which the site specs do not express
    beside = {"mixer_out"} if lm.sites.family.both else set()
    watchable = {str(ref): ref.point for ref in lm.sites.refs() if lm.sites.family.tabled and ref.name not in beside}
    watched_refs = {str(ref): [] if ref.name in beside else watched(ref, watchable) for ref in refs}
    everywhere = [Capture(at, prompt[-1]) for at in sorted(set(itertools.chain(*watched_refs.values())))]
    tries: list[list[Op]] = [
        [*(Capture(at, prompt[-1]) for at in watched_refs[str(ref)]), _push(base, ref)] for ref in refs
    ]
    tries += [] if full else [_write_back(base, name) for name in names]
    first, *tried, last = _runs(lm, ids, [everywhere, *tries, []], longer)
    plain = _answer(first)
    noise = _noise(lm, base, first, last)
    edited = dict(zip(map(str, refs), tried, strict=False))
    moved = {at: _moves(_answer(run), plain, noise) for at, run in edited.items()}
    mover = next((ref for ref in reversed(refs) if moved[str(ref)] and ref.name != "logits"), None)
    _same_alone(lm, ids, base, first, everywhere, mover)
    moved |= _moved_by_more(lm, ids, base, [ref for ref in refs if not moved[str(ref)]], noise, longer)
    disordered = {str(ref): disorder(ref, first, edited[str(ref)], watched_refs[str(ref)]) for ref in refs}
    written_back = dict(zip(names, tried[len(refs) :], strict=False))
    same = {name: np.array_equal(_answer(run), plain) for name, run in written_back.items()}
    wrong_sums = sums(lm, base)

    def changes_nothing(name: str) -> bool:  # in the batch, or else alone, because a batch may change rounding
        return same.get(name, False) or np.array_equal(
            _answer(_runs(lm, ids, [_write_back(base, name)])[0]), _answer(base)
        )

    return [
        _proof(lm, base, name, changes_nothing(name), moved, wrong_sums.get(name), watched_refs, disordered)
        for name in names
    ]


_LOGITS = Site("logits") @ prompt[-1]


def _write_back(base: Run, name: str) -> list[Op]:
    at = Site(name)
    return [Replace(From(base, at), at=at, tokens=prompt[-1] if name == "logits" else prompt)]


def _runs(lm: LM, ids: list[int], programs: Sequence[Sequence[Op]], beside: list[int] | None = None) -> list[Run]:
    """Run every program in one batch, computed in full. If given, the prompt `beside` comes first in the batch; if the
    engine splits the batch, only the first programs share a batch with it."""
    others = [] if beside is None else [beside]
    with lm.engine.computing_whole():
        runs = lm.run([*others, *[ids] * len(programs)], max_tokens=1, edits=[*[[] for _ in others], *programs],
                      capture=[_LOGITS], logprobs=True)  # fmt: skip
    return runs[len(others) :]


def _check_finite(lm: LM, base: Run) -> None:
    for ref in lm.sites.refs():
        if not np.isfinite(np.asarray(base[str(ref)])).all():
            raise ModelError(
                f"{ref} is not finite on this model in {lm.model.dtype}, even without edits; try another dtype= or "
                "prove=False"
            )


def _noise(lm: LM, base: Run, *others: Run) -> float:
    """Return the largest difference in `_answer` between a run on its own and runs in a batch with a longer prompt."""
    gaps = [np.abs(_answer(other) - _answer(base)) for other in others]
    size, noise = float(np.abs(_answer(base)[:-1]).max()), max(float(gap[:-1].max()) for gap in gaps)
    if noise > LOGITS_RTOL.get(lm.model.dtype, max(LOGITS_RTOL.values())) * size:
        raise ModelError(
            f"runs of this model depend on other runs in their batch: logits of up to {size:.2g} change by "
            f"{noise:.2g} beside a longer prompt. Run one request at a time (max_num_seqs=1), or use another "
            "implementation of the model. On a CPU, vLLM's kernels may cause this: try "
            'compilation_config={"custom_ops": ["none"]}'
        )
    return max(float(gap.max()) for gap in gaps)


def _same_alone(
    lm: LM, ids: list[int], base: Run, in_batch: Run, captures: Sequence[Capture], mover: SiteRef | None
) -> None:
    """Raise `EngineError` unless a run on its own reads the same rows as in a batch, and an edit at `mover` that moves
    the logits in a batch also moves them on its own. Small steps may run other code than large ones (CUDA graphs); code
    without taps ignores edits. If the batch is a small step, too, both runs read only zeros."""
    pairs = [(_row(base, ref), _row(in_batch, ref)) for ref in (lm.sites.resolve(each.at)[0] for each in captures)]
    gaps = [np.linalg.norm(alone - beside) / max(np.linalg.norm(beside), 1e-9) for alone, beside in pairs]
    inert = mover is not None and np.array_equal(_answer(_runs(lm, ids, [[_push(base, mover)]])[0]), _answer(base))
    unread = bool(gaps) and float(np.median(gaps)) > LOGITS_RTOL.get(lm.model.dtype, max(LOGITS_RTOL.values()))
    silent = bool(pairs) and not any(alone.any() for alone, _ in pairs)
    if silent or unread or inert:
        differs = "rows differ from those in a batch" if unread else "an edit that works in a batch has no effect"
        raise EngineError(
            f"in a single run {'no rows are read' if silent else differs}: some engine steps run code without taps. "
            "Start vLLM with enforce_eager=True, and report this with the model's name"
        )


def _answer(run: Run) -> np.ndarray:
    """Return the captured next-token logits, followed by the token's log-probability, which reflects logit edits."""
    return np.append(np.asarray(run["logits"]).reshape(-1), run.logprobs)


def _moves(edited: np.ndarray, plain: np.ndarray, noise: float) -> bool:
    """True if an edit changes the logits by more than the noise of the batch."""
    return bool(np.isfinite(edited).all() and np.abs(edited - plain).max() > 4 * noise + 1e-6)


def _moved_by_more(
    lm: LM, ids: list[int], base: Run, refs: list[SiteRef], noise: float, longer: list[int]
) -> dict[str, bool]:
    """Map each ref to True if a stronger edit (scaled by `LOUDER`, at every second token) moves the logits. A weaker
    edit may be lost in rounding, and the key of a single token has little effect on attention."""
    if not refs:
        return {}
    plain, *edited = _runs(lm, ids, [[], *([_push(base, ref, louder=True)] for ref in refs)], longer)
    return {str(ref): _moves(_answer(run), _answer(plain), noise) for ref, run in zip(refs, edited, strict=True)}


def push(name: str, row_W: np.ndarray) -> np.ndarray:
    """Return a test edit: a vector [W] to add to a row [W]. It has the row's norm, and no norm layer removes it. For a
    router it reverses the choice of experts, because one constant added to all experts may change nothing."""
    row_W = row_W.astype(np.float64)
    if name == "router":
        return (-2 * row_W).astype(np.float32)
    signs_W = np.where(np.arange(len(row_W)) * 2654435761 % 7 < 3, 1.0, -1.0)
    return (max(float(np.sqrt(np.mean(row_W**2))), 1e-3) * signs_W).astype(np.float32)


def _push(base: Run, ref: SiteRef, louder: bool = False) -> Add:
    tokens = prompt[1::2] if louder and ref.name != "logits" else prompt[-1]  # both include the last of LENGTH tokens
    return Add(push(ref.name, _row(base, ref)), at=str(ref), tokens=tokens, scale=LOUDER if louder else 1.0)


def _row(base: Run, ref: SiteRef) -> np.ndarray:
    """Return the last token's row at a ref, with its heads concatenated."""
    return np.asarray(base[str(ref)])[-1].reshape(-1)


def _proof(
    lm: LM, base: Run, name: str, noop: bool, moved: dict[str, bool], wrong_sum: str | None,
    watched_refs: dict[str, list[str]], disordered: dict[str, str],
) -> Proof:  # fmt: skip
    """Return a site's proofs. `wrong_sum`: the site's entry in `sums`."""
    refs = lm.sites.resolve(Site(name))
    point = lm.sites.points[refs[0].point]
    rows = 1 if name == "logits" else LENGTH
    shapes = {str(ref): base[str(ref)].shape for ref in refs}
    misshapen = [at for at, shape in shapes.items() if (shape[0], math.prod(shape)) != (rows, rows * point.width)]
    tried = [str(ref) for ref in refs if str(ref) in moved]
    unmoved = [at for at in tried if not moved[at]]
    wrong_order = [disordered[at] for at in tried if disordered[at]]
    notes = [f"{misshapen[0]} has shape {list(shapes[misshapen[0]])}"] if misshapen else []
    notes += ["writing back the rows that were read changes the logits"] if not noop else []
    notes += [f"an edit at {unmoved[0]} does not change the logits"] if unmoved else []
    notes += [wrong_sum] if wrong_sum else []
    return Proof(
        name, None if refs[0].layer is None else len(refs), point.width, lm.sites.family.points[point.kind].layout,
        not misshapen, noop, not unmoved, "; ".join([*notes, *wrong_order[:1]]),
        adds=None if wrong_sum is None else not wrong_sum,
        order=not wrong_order if any(watched_refs[at] for at in tried) else None,
        tried=len(tried),
    )  # fmt: skip


def prove_lens(lm: LM) -> Proof:
    """Prove the unembedding: a lens on the final stream gives the model's sampling distribution. `shape` is False if
    the run raised an unexpected error."""
    ids = np.linspace(3, lm.model.d_vocab - 1, LENGTH).astype(int).tolist()
    last, top = Site("resid_post", -1), min(MAX_TOP, lm.model.d_vocab)
    try:
        run = lm.run(ids, max_tokens=1, capture=[Lens(last, prompt[-1], top), _LOGITS])
        read, logits_V = run.lens[last], np.asarray(run["logits"])[-1].astype(np.float64)
    except Exception as error:  # unexpected modules may raise any error
        is_refused, note = isinstance(error, UnsupportedSite), as_patchclamp_error(error).message
        return Proof(LENS, None, lm.model.d_vocab, "", is_refused, False, False, note)
    logprobs_V = logits_V - logits_V.max()
    logprobs_V -= np.log(np.exp(logprobs_V).sum())
    best = np.sort(logprobs_V)[::-1][:top]
    gap = max(float(np.abs(read.logprobs[0] - expected).max()) for expected in (best, logprobs_V[read.ids[0]]))
    spread = float(np.ptp(logits_V[np.isfinite(logits_V)]))
    holds = gap <= LENS_RTOL.get(lm.model.dtype, max(LENS_RTOL.values())) * spread
    note = "" if holds else (
        f"final norm and unembedding of the last stream differ by {gap:.2g} from the model's log-probabilities"
    )  # fmt: skip
    return Proof(LENS, None, lm.model.d_vocab, "", True, holds, holds, note)


def ensure_proved(lm: LM) -> list[Proof]:
    """Return the proofs of an `LM` and of its lens, from the cache or computed now. Removes failed sites from the site
    map. Proofs of weights updated after loading are not cached."""
    engine = lm.engine
    engine.proved_weights = weights = engine.weights  # set first: the proofs' own runs check it
    engine.batch_difference = engine.lens_difference = None
    try:
        proofs = _proofs(lm, is_loaded=not weights)
    except BaseException:
        engine.proved_weights = -1
        raise
    lm.sites.withdrawn = {proof.name: proof.note for proof in proofs if not proof.holds}
    engine.lens_difference = lm.sites.withdrawn.get(LENS, "")
    return proofs


def lens_difference(lm: LM) -> str:
    """Return how a lens on the final stream differs from the model; "" if equal. Proved once for these weights."""
    if lm.engine.lens_difference is None:
        proof = prove_lens(lm)
        lm.engine.lens_difference = proof.note if proof.shape else None  # an unexpected error may be temporary
        return proof.note
    return lm.engine.lens_difference


def _proofs(lm: LM, is_loaded: bool) -> list[Proof]:
    path = cache_folder() / "proofs" / f"{_key(lm)}.json"
    with contextlib.suppress(OSError, msgspec.DecodeError):
        if is_loaded:
            return msgspec.json.decode(path.read_bytes(), type=list[Proof])
    lm.sites.withdrawn = {}
    sites, lens = prove(lm), prove_lens(lm)
    proofs = [*sites, lens]
    # cache failures only of tables found in modules: they may have wrong sites, and proving again would not help;
    # and of the lens, unless an error of another kind ended its proof
    if is_loaded and (all(proof.holds for proof in sites) or not lm.sites.family.tabled) and lens.shape:
        with contextlib.suppress(OSError):
            write_whole(path, msgspec.json.encode(proofs))
    return proofs


def _key(lm: LM) -> str:
    """Return a hash of everything that proofs depend on. A model's files are identified by name, size and mtime."""
    folder = Path(lm.model.name)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    marks = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    facts = (msgspec.structs.astuple(lm.model), lm.batching, marks, __version__, _code())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _code() -> str:
    """Return a hash of the code that reads and writes sites. A change invalidates old proofs."""
    root = Path(__file__).parent
    rooms = ("sites", "language", "kernels", "runtime", "engines", "plan", "store")
    files = [file for room in rooms for file in sorted((root / room).rglob("*.py"))]
    files += [root / name for name in ("lm.py", "run.py", "proving.py", "testing.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class ProvedLM(LM):
    """A language model. `model` is a hub id, a folder, a server's URL, "smollm2" (from the demo extra), or a `vllm.LLM`
    made with `additional_config={"patchclamp": {}}`, whose sites are proved again after its weights were updated.

    engine: "vllm" (the default if it is installed), "transformers", "fake", or an engine object.
    prove: offer only sites that are proved on this live model. Proving takes a few seconds on a CPU; the result is
        cached for the model and the versions.
    allow_code: allow programs with `Apply`, which runs Python in the engine. The engine must be in this process.
    capture_bytes: the limit on the captures of one call; by default 80 % of the available memory at that time.
    probes: probes that score every token of every request. On vLLM the engine runs them, and cached prefixes keep
        their scores; on other engines they are added to every program.
    options: the engine's options by its own names (vLLM's engine arguments; for Transformers see `TransformersEngine`).

    Raises: `ModelError` for a model without a site table, `EngineError` if the engine does not start,
    `UnknownName` for an unknown option.
    """

    def __init__(
        self, model: str | VllmLLM, engine: str | Engine | None = None, *, prove: bool = True,
        allow_code: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        as_flag(prove, "prove")
        super().__init__(model, engine, allow_code=allow_code, **options)
        self._proves = prove
        if prove and not self.engine.proved:
            try:
                ensure_proved(self)
            except BaseException:
                self.close()
                raise

    def prove_again(self) -> None:
        """Prove the sites again if the model's weights were updated since the last proof."""
        if self.engine.weights != self.engine.proved_weights:
            ensure_proved(self)

    def _follow_weights(self) -> None:
        if self._proves:
            self.prove_again()
        elif self.engine.proved_weights != self.engine.weights:
            self.engine.proved_weights = self.engine.weights
            self.engine.batch_difference = self.engine.lens_difference = None

    def _read_call(self, *args: Any, **kwargs: Any) -> Any:
        self._follow_weights()
        return super()._read_call(*args, **kwargs)

    def _grade_job(self, *args: Any, **kwargs: Any) -> GradeJob:
        self._follow_weights()
        return super()._grade_job(*args, **kwargs)
