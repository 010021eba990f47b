"""The prover: a site exists on a live model only when it has been shown there to be what its table says.

Three proofs of each place, all through the engine itself: its rows have the right shape and are finite; writing back
what was read leaves the next-token logits bit-identical; an edit of it moves them.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from patchclamp.sites.sums import unexplained
from patchclamp.spec import Add, From, Replace, Site, prompt

LENGTH = 4  # tokens of the proof's prompt


class Proof(msgspec.Struct, frozen=True):
    """The proofs of one site word over all its layers. `note` names the first layer that fails, and how; `adds`: where
    the table was made of modules, what is read is what the stream gains."""

    name: str
    layers: int | None
    width: int
    layout: str
    shape: bool
    noop: bool
    edit: bool
    note: str = ""
    adds: bool = True

    @property
    def holds(self) -> bool:
        return self.shape and self.noop and self.edit and self.adds


def prove(lm: Any) -> list[Proof]:
    """Proves every site word of a live `LM`."""
    ids = [int(i) for i in np.linspace(3, lm.model.d_vocab - 1, LENGTH)]
    names = lm.sites.names
    base = lm.run(ids, max_tokens=1, capture=[*(_all(name) for name in names)])
    logits = np.asarray(base["logits"])
    noop = {
        name: np.array_equal(
            _logits(lm.run(ids, max_tokens=1, edits=_write_back(base, name), capture=[_LOGITS])), logits
        )
        for name in names
    }
    moved = _moved(lm, ids, base, names)
    wrong = {} if lm.sites.family.tabled else unexplained(lm, base)
    return [_proof(lm, base, name, noop[name], moved, wrong.get(name, "")) for name in names]


_LOGITS = Site("logits") @ prompt[-1]


def _all(name: str) -> Any:
    return _LOGITS if name == "logits" else Site(name)


def _write_back(base: Any, name: str) -> list[Replace]:
    at = Site(name)
    return [Replace(From(base, at), at=at, tokens=prompt[-1] if name == "logits" else prompt)]


def _moved(lm: Any, ids: list[int], base: Any, names: list[str]) -> dict[str, bool]:
    """For every place, whether an edit there changes the logits beyond what the batch does by itself."""
    places = [place for name in names for place in lm.sites.resolve(Site(name))]
    edits: list[list[Any]] = [[], *([_push(base, place)] for place in places), []]
    runs = lm.run([ids] * len(edits), max_tokens=1, edits=edits, capture=[_LOGITS])
    first, *edited, last = (_logits(run) for run in runs)
    noise = max(float(np.abs(other - np.asarray(base["logits"])).max()) for other in (first, last))
    return {
        str(place): bool(np.isfinite(found).all() and np.abs(found - first).max() > 4 * noise + 1e-6)
        for place, found in zip(places, edited, strict=True)
    }


def _push(base: Any, place: Any) -> Add:
    """An edit as large as the row itself, in a direction that no norm removes."""
    row = _row(base, place).astype(np.float64)
    signs = np.where(np.arange(len(row)) * 2654435761 % 7 < 3, 1.0, -1.0)
    size = max(float(np.sqrt(np.mean(row**2))), 1e-3)
    return Add((size * signs).tolist(), at=str(place), tokens=prompt[-1])


def _right(base: Any, place: Any, rows: int, width: int) -> bool:
    found = np.asarray(base[str(place)])
    return (len(found), found.size) == (rows, rows * width) and bool(np.isfinite(found).all())


def _row(base: Any, place: Any) -> np.ndarray:
    """The last row at a place, heads one after the other."""
    return np.asarray(base[str(place)])[-1].reshape(-1)


def _logits(run: Any) -> np.ndarray:
    return np.asarray(run["logits"])


def _proof(lm: Any, base: Any, name: str, noop: bool, moved: dict[str, bool], unexplained: str) -> Proof:
    places = lm.sites.resolve(Site(name))
    point = lm.sites.points[places[0].point]
    rows = 1 if name == "logits" else LENGTH
    wrong = [p for p in places if not _right(base, p, rows, point.width)]
    still = [place for place in places if not moved[str(place)]]
    notes = [f"{wrong[0]} has shape {list(base[str(wrong[0])].shape)} or is not finite"] if wrong else []
    notes += ["writing back what was read changes the logits"] if not noop else []
    notes += [f"an edit at {still[0]} does not move the logits"] if still else []
    notes += [unexplained] if unexplained else []
    layers = None if places[0].layer is None else len(places)
    layout = lm.sites.family.points[point.kind].layout
    return Proof(name, layers, point.width, layout, not wrong, noop, not still, "; ".join(notes), not unexplained)
