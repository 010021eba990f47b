"""`Parity`: how far two engines are apart on one model, site by site."""

from __future__ import annotations

from typing import Any

import msgspec

from patchclamp.language import SITES


class Bounds(msgspec.Struct, frozen=True):
    """How far two engines may be apart. `rows`: ‖a − b‖₂ / ‖b‖₂; `edit`: how unlike an edit may move the logits, of
    the largest move if that is above 1; `logprobs`: absolute."""

    rows: float
    edit: float
    logprobs: float


class SiteParity(msgspec.Struct, frozen=True):
    """One site word: its places, the worst of them, and one edit at `edit_at`, which `moved` the reference's logits so
    far, the examined engine's `here` so far, and by `edit` otherwise (of the largest move if that is above 1). What an
    engine's batch may have done is no move."""

    name: str
    places: tuple[str, ...]
    worst: float
    worst_at: str
    edit_at: str
    moved: float
    edit: float
    here: float


class Parity(msgspec.Struct, frozen=True):
    """What came of it. `engines`: with versions, first the one that is examined; `positions`: how many were compared;
    `alike`: generated tokens on which both agree, of how many; `only`: sites that one engine has and the other has not,
    by the same table; `left_out`: those that only one of two tables has, which is no fault; `gaps`: the worst row of
    every place; `logprobs`: the largest difference among the tokens that are alike."""

    model: str
    family: str
    dtype: str
    engines: tuple[str, str]
    prompts: int
    positions: int
    alike: tuple[int, int]
    bounds: Bounds
    sites: tuple[SiteParity, ...]
    only: tuple[str, ...]
    gaps: dict[str, float]
    logprobs: float
    left_out: tuple[str, ...] = ()

    def leaves(self, site: SiteParity) -> str | None:
        """The first place of a site, layer by layer, that is out of tolerance."""
        return next((place for place in site.places if not self.gaps[place] <= self.bounds.rows), None)

    def moves(self, site: SiteParity) -> bool:
        """Whether the edit moved the logits, and both engines' alike."""
        return site.moved > 0 and site.here > 0 and site.edit <= self.bounds.edit

    @property
    def first(self) -> str | None:
        """The first place that is out of tolerance, in the order in which a model computes."""
        wrong = [place for place, gap in self.gaps.items() if not gap <= self.bounds.rows]
        return min(wrong, key=_order, default=None)

    @property
    def problems(self) -> tuple[str, ...]:
        """What is not as it must be, a line each."""
        problems = [f"{name} is a site on one engine only" for name in self.only]
        problems += [f"{at} is out of tolerance, and with it {site.worst_at}: {site.worst:.2g} (at most "
                  f"{self.bounds.rows:g})" for site in self.sites if (at := self.leaves(site))]  # fmt: skip
        for site in self.sites:
            still = [
                engine for engine, moved in zip(self.engines, (site.here, site.moved), strict=True) if not moved > 0
            ]
            if still:
                problems.append(f"an edit at {site.edit_at} does not move the logits of {' and '.join(still)}")
            elif not self.moves(site):
                problems.append(
                    f"an edit at {site.edit_at} moves the logits otherwise, by {site.edit:.2g} (at most "
                    f"{self.bounds.edit:g})"
                )
        if not self.logprobs <= self.bounds.logprobs:
            problems.append(f"log-probabilities are {self.logprobs:.2g} apart (at most {self.bounds.logprobs:g})")
        return tuple(problems)

    @property
    def holds(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        sites = [
            {**msgspec.to_builtins(site), "places": {place: self.gaps[place] for place in site.places},
             "first_out": self.leaves(site), "holds": self.leaves(site) is None, "edit_holds": self.moves(site)}
            for site in self.sites
        ]  # fmt: skip
        rest = {name: value for name, value in msgspec.to_builtins(self).items() if name not in ("sites", "gaps")}
        return {"holds": self.holds, **rest, "first_out": self.first, "problems": list(self.problems), "sites": sites}


def _order(place: str) -> tuple[bool, int, int]:
    name, _, index = place.partition("[")
    return name in ("final_norm", "logits"), int(index.rstrip("]") or -1), list(SITES).index(name)
