"""The prover: a site exists on a live model only when it has been shown there to be what its table says.

Five proofs of a site, all through the engine itself: its rows have the right shape and are finite; writing back what
was read leaves the next-token logits bit-identical; an edit moves them, and of its layer what is made of the site and
nothing else (`order`); and what is read adds up (`sums`).

Cut over GPUs (tensor parallel), the same proofs show the layout: rows that are replicated come from one rank and are
written on all, so that of a partial sum, or of a part, other logits would come; cut ones come together from all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from patchclamp.errors import ModelError
from patchclamp.language import Add, At, Capture, From, Op, Replace, Site, prompt
from patchclamp.lm import LM
from patchclamp.proving.order import disorder, watched
from patchclamp.proving.sums import sums
from patchclamp.run import Run
from patchclamp.sites import SiteRef

LENGTH, LONGER = 4, 11  # tokens of the proof's prompt, and of one that runs beside it
# how far the logits of a run may be apart, alone and in a batch, of the largest: kernels round otherwise there, and
# where few bits are left a router may choose another expert for it
LOGITS_RTOL = {"float32": 1e-3, "float16": 0.3, "bfloat16": 0.5}


class Proof(msgspec.Struct, frozen=True):
    """The proofs of one site word over all its layers; an edit was tried at `tried` of its refs. `note` names the
    first layer that fails, and how; `adds`, `order`: whether the sums hold that are about it, and whether an edit moved
    what it is to move and nothing else; None if none is about it."""

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
    """Proves every site word of a live `LM`.

    Edits are tried in its first, middle and last layer, unless `full`: then in every layer, and what is written back is
    compared alone. Shapes, sums and what is written back are of all layers always.

    Raises: `ModelError` for a model whose numbers are not finite, and where a run depends on those beside it.
    """
    lengths = LENGTH, min(LONGER, lm.model.max_model_len - 1)
    ids, longer = (np.linspace(3, lm.model.d_vocab - 1, length).astype(int).tolist() for length in lengths)
    names = lm.sites.names
    base = lm.run(ids, max_tokens=1, capture=[*(_all(name) for name in names)], logprobs=True)
    _finite(lm, base)
    refs = [ref for name in names for ref in _tried(lm.sites.resolve(Site(name)), full)]
    known = {str(ref) for ref in lm.sites.refs()} if lm.sites.family.tabled else set()
    watched_refs = {str(ref): watched(ref, known) for ref in refs}
    everywhere = [Capture(at, prompt[-1]) for at in sorted(set(itertools.chain(*watched_refs.values())))]
    tries: list[list[Op]] = [[*_captures(watched_refs[str(ref)]), _push(base, ref)] for ref in refs]
    tries += [] if full else [_write_back(base, name) for name in names]
    first, *tried, last = _runs(lm, ids, [everywhere, *tries, []], longer)
    plain = _answer(first)
    noise = _noise(lm, base, first, last)
    edited = dict(zip(map(str, refs), tried, strict=False))
    moved = {at: _moves(_answer(run), plain, noise) for at, run in edited.items()}
    disordered = {str(ref): disorder(ref, first, edited[str(ref)], watched_refs[str(ref)]) for ref in refs}
    back = dict(zip(names, tried[len(refs) :], strict=False))
    same = {name: np.array_equal(_answer(run), plain) for name, run in back.items()}
    noop = {name: same.get(name, False) or _changes_nothing(lm, ids, base, name) for name in names}
    wrong_sums = sums(lm, base)
    proofs = [_proof(lm, base, name, noop[name], moved, wrong_sums.get(name)) for name in names]
    return [_ordered(proof, lm, watched_refs, disordered) for proof in proofs]


_LOGITS = Site("logits") @ prompt[-1]


def _all(name: str) -> Site | At:
    return _LOGITS if name == "logits" else Site(name)


def _tried(refs: list[SiteRef], full: bool) -> list[SiteRef]:
    """Those of a word's site refs at which edits are tried."""
    chosen = {0, len(refs) // 2, len(refs) - 1}
    return refs if full else [ref for i, ref in enumerate(refs) if i in chosen]


def _write_back(base: Run, name: str) -> list[Op]:
    at = Site(name)
    return [Replace(From(base, at), at=at, tokens=prompt[-1] if name == "logits" else prompt)]


def _changes_nothing(lm: LM, ids: list[int], base: Run, name: str) -> bool:
    """Whether a run in which a site is written back says what `base` says, each alone: in a batch, where a run stands
    may change how it is rounded."""
    return np.array_equal(_answer(_runs(lm, ids, [_write_back(base, name)])[0]), _answer(base))


def _captures(refs: list[str]) -> list[Op]:
    return [Capture(ref, prompt[-1]) for ref in refs]


def _runs(lm: LM, ids: list[int], programs: Sequence[Sequence[Op]], beside: list[int] | None = None) -> list[Run]:
    """A run of each program, all in one batch, after a prompt that may run beside them: where batches are small, beside
    the first."""
    others = [] if beside is None else [beside]
    runs = lm.run([*others, *[ids] * len(programs)], max_tokens=1, edits=[*[[] for _ in others], *programs],
                  capture=[_LOGITS], logprobs=True)  # fmt: skip
    return runs[len(others) :]


def _finite(lm: LM, base: Run) -> None:
    for ref in lm.sites.refs():
        if not np.isfinite(np.asarray(base[str(ref)])).all():
            raise ModelError(
                f"{ref} is not finite on this model in {lm.model.dtype}, before anything is edited, and proves "
                "nothing; another dtype may do (dtype=...), or prove=False"
            )


def _noise(lm: LM, base: Run, *others: Run) -> float:
    """By how much runs of one prompt differ in a batch with another one, from one that ran alone, at most."""
    gaps = [np.abs(_answer(other) - _answer(base)) for other in others]
    size, noise = float(np.abs(_answer(base)[:-1]).max()), max(float(gap[:-1].max()) for gap in gaps)
    if noise > LOGITS_RTOL.get(lm.model.dtype, max(LOGITS_RTOL.values())) * size:
        raise ModelError(
            f"on this model a run depends on those beside it: with a longer prompt in the batch its logits, of up to "
            f"{size:.2g}, change by {noise:.2g}. Nothing that is read or written there is one request's alone; run one "
            "at a time (max_num_seqs=1), or another implementation of the model"
        )
    return max(float(gap.max()) for gap in gaps)


def _answer(run: Run) -> np.ndarray:
    """The next token's logits, and its log-probability, which is of what was written where they were."""
    return np.append(np.asarray(run["logits"]).reshape(-1), run.logprobs)


def _moves(edited: np.ndarray, plain: np.ndarray, noise: float) -> bool:
    """Whether an edit changes the logits beyond what the batch does by itself."""
    return bool(np.isfinite(edited).all() and np.abs(edited - plain).max() > 4 * noise + 1e-6)


def push(name: str, row_W: np.ndarray) -> np.ndarray:
    """A vector [W] to be added to a site's row [W]: as large as the row itself, in a direction that no norm removes; of
    a router one that turns its choice round: what all chosen experts get alike changes nothing where their weights are
    normed."""
    row_W = row_W.astype(np.float64)
    if name == "router":
        return (-2 * row_W).astype(np.float32)
    signs_W = np.where(np.arange(len(row_W)) * 2654435761 % 7 < 3, 1.0, -1.0)
    return (max(float(np.sqrt(np.mean(row_W**2))), 1e-3) * signs_W).astype(np.float32)


def _push(base: Run, ref: SiteRef) -> Add:
    return Add(push(ref.name, _row(base, ref)), at=str(ref), tokens=prompt[-1])


def _right(base: Run, ref: SiteRef, rows: int, width: int) -> bool:
    captured = np.asarray(base[str(ref)])
    return (len(captured), captured.size) == (rows, rows * width)


def _row(base: Run, ref: SiteRef) -> np.ndarray:
    """The last row at a ref, heads one after the other."""
    return np.asarray(base[str(ref)])[-1].reshape(-1)


def _proof(lm: LM, base: Run, name: str, noop: bool, moved: dict[str, bool], added: str | None) -> Proof:
    refs = lm.sites.resolve(Site(name))
    point = lm.sites.points[refs[0].point]
    rows = 1 if name == "logits" else LENGTH
    wrong = [p for p in refs if not _right(base, p, rows, point.width)]
    tried = [ref for ref in refs if str(ref) in moved]
    still = [ref for ref in tried if not moved[str(ref)]]
    notes = [f"{wrong[0]} has shape {list(base[str(wrong[0])].shape)}"] if wrong else []
    notes += ["writing back what was read changes the logits"] if not noop else []
    notes += [f"an edit at {still[0]} does not move the logits"] if still else []
    notes += [added] if added else []
    layers = None if refs[0].layer is None else len(refs)
    layout = lm.sites.family.points[point.kind].layout
    adds = None if added is None else not added
    return Proof(
        name, layers, point.width, layout, not wrong, noop, not still, "; ".join(notes), adds, tried=len(tried)
    )


def _ordered(proof: Proof, lm: LM, watched_refs: dict[str, list[str]], disordered: dict[str, str]) -> Proof:
    """With what edits at the word's refs did in their layers."""
    refs = [str(ref) for ref in lm.sites.resolve(Site(proof.name)) if str(ref) in watched_refs]
    wrong = [disordered[at] for at in refs if disordered[at]]
    order = None if not any(watched_refs[at] for at in refs) else not wrong
    note = "; ".join([*([proof.note] if proof.note else []), *wrong[:1]])
    return msgspec.structs.replace(proof, order=order, note=note)
