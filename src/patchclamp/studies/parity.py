"""Parity: do two engines agree on a model's sites? All sites of all layers are captured on both, with one edit at each.

The reference runs first and is closed before the other starts, so that a GPU holds one model at a time; only its rows
are kept. A row's difference is ‖a − b‖₂ / ‖b‖₂, with b from the reference; a site's difference is its worst row's.

T positions · W width of a site · V vocabulary
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

import patchclamp as pc
from patchclamp.engines import known_options
from patchclamp.language.site import SITES
from patchclamp.language.values import as_items
from patchclamp.lm import LM
from patchclamp.proving import ensure_proved, push
from patchclamp.run import Run
from patchclamp.studies.inputs import Std, Text, as_prompt, as_texts, checked
from patchclamp.studies.study import Arg


class Bounds(msgspec.Struct, frozen=True):
    """Allowed differences between two engines. `rows`: ‖a − b‖₂ / ‖b‖₂; `edit`: difference between the logit changes of
    the same edit, relative to the largest change if that is above 1; `logprobs`: absolute."""

    rows: float
    edit: float
    logprobs: float


class SiteParity(msgspec.Struct, frozen=True):
    """A site's comparison: its places (one per layer), the place with the largest difference (`worst_at`), and one edit
    at `edit_at`, which changed logits by `moved` on the reference and `here` on the examined engine. `edit` is the
    difference of the changes, relative to the largest if that is above 1. A change within batch noise counts as 0."""

    name: str
    places: tuple[str, ...]
    worst: float
    worst_at: str
    edit_at: str
    moved: float
    edit: float
    here: float


class Parity(msgspec.Struct, frozen=True):
    """The result of a comparison. `engines`: names with versions, the examined one first; `positions`: the number
    compared; `equal_tokens`: numbers of equal and of all generated tokens; `only`: sites of a shared table that one
    engine lacks; `left_out`: sites in only one of two different tables, which is not an error; `gaps`: the largest row
    difference by place; `logprobs`: the largest difference among the equal tokens."""

    model: str
    family: str
    dtype: str
    engines: tuple[str, str]
    prompts: int
    positions: int
    equal_tokens: tuple[int, int]
    bounds: Bounds
    sites: tuple[SiteParity, ...]
    only: tuple[str, ...]
    gaps: dict[str, float]
    logprobs: float
    left_out: tuple[str, ...] = ()

    def leaves(self, site: SiteParity) -> str | None:
        """Return a site's first place that is out of tolerance, in layer order; None if all are within tolerance."""
        return next((place for place in site.places if not self.gaps[place] <= self.bounds.rows), None)

    def moves(self, site: SiteParity) -> bool:
        """True if the edit moved the logits of both engines, and equally within tolerance."""
        return site.moved > 0 and site.here > 0 and site.edit <= self.bounds.edit

    @property
    def first(self) -> str | None:
        """The first place out of tolerance, in computation order, or None."""
        wrong = [place for place, gap in self.gaps.items() if not gap <= self.bounds.rows]
        return min(wrong, key=_order, default=None)

    @property
    def problems(self) -> tuple[str, ...]:
        """The failed checks, one line each."""
        problems = [f"{name} is a site on only one engine" for name in self.only]
        problems += [f"{at} is out of tolerance; worst at {site.worst_at}: {site.worst:.2g} (at most "
                  f"{self.bounds.rows:g})" for site in self.sites if (at := self.leaves(site))]  # fmt: skip
        for site in self.sites:
            still = [
                engine for engine, moved in zip(self.engines, (site.here, site.moved), strict=True) if not moved > 0
            ]
            if still:
                problems.append(f"an edit at {site.edit_at} does not move the logits of {' and '.join(still)}")
            elif not self.moves(site):
                problems.append(
                    f"an edit at {site.edit_at} moves the logits differently, by {site.edit:.2g} (at most "
                    f"{self.bounds.edit:g})"
                )
        if not self.logprobs <= self.bounds.logprobs:
            problems.append(f"log-probabilities differ by {self.logprobs:.2g} (at most {self.bounds.logprobs:g})")
        return tuple(problems)

    @property
    def holds(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
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


PROMPTS = ("The capital of France is", "When John and Mary went to the store, John gave a drink to")
ENGINES = ("transformers", "vllm")
READ = ("trust_remote_code", "skip_tokenizer_init")  # options that decide how a model is read
ITS_OWN = ("numerics",)  # an option for the second engine only, although the first has one of the same name
# In bf16 and fp16 each engine rounds a layer's values at different places. On a CPU SmolLM2's worst rows (30 layers)
# were 0.09 and 0.007 apart, edits 0.47 and 0.055, log-probabilities 0.09 and 0.006 (in fp32: 2e-5, 7e-5, 8e-6); the
# bounds are about twice that. They detect a site that is the wrong tensor (off by 1); a subtle error shows only in
# fp32. An edit that does nothing on one engine is detected however small its effect on the other.
BOUNDS = {
    "float32": Bounds(rows=1e-4, edit=1e-3, logprobs=1e-3),
    "float16": Bounds(rows=1.5e-2, edit=1.2e-1, logprobs=2e-2),
    "bfloat16": Bounds(rows=2e-1, edit=9e-1, logprobs=2e-1),
}


def _engines(engines: Any, path: str) -> tuple[str, str]:
    names = as_texts(engines, path)
    if len(names) != 2:
        raise pc.ProgramError(f"expected the names of two engines, got {names}", path)
    return names[0], names[1]


@checked
def parity(
    model: str,
    *,
    dtype: Text = "float32",
    prompts: Sequence[Any] = PROMPTS,
    tolerance: Std = None,
    max_tokens: int = 4,
    engines: Annotated[tuple[str, str], Arg(_engines)] = ENGINES,
    tell: Callable[[str], None] = lambda what: None,
    **options: Any,
) -> Parity:
    """Run `prompts` as one batch on both `engines` and compare every site in the model's table.

    `tolerance`: bound on rows, by default the dtype's in `BOUNDS`; `max_tokens`: tokens to generate, to compare decode
    steps too, as long as both engines choose the same token. `options` go to each engine that has an option of that
    name; an unknown option is an error. `tell` receives progress messages.

    Raises: `ProgramError` if the dtype has no bounds or there is no prompt, and any error from starting an engine.
    """
    bounds = _bounds(dtype, tolerance)
    prompts = [as_prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(as_items(prompts, "prompts"))]
    if not prompts:
        raise pc.ProgramError("expected at least one prompt, got none", "prompts")
    shared, options = given(options, engines)
    tell(f"running {model} on {engines[0]} …")
    theirs = _observe(model, engines[0], {"dtype": dtype, **shared}, prompts, max_tokens, None)
    tell(f"running {model} on {engines[1]} …")
    ours = _observe(model, engines[1], {"dtype": dtype, **options}, prompts, max_tokens, theirs.edits)
    return _compared(model, ours, theirs, bounds)


def given(options: dict[str, Any], engines: tuple[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options for each engine. An unknown option goes to the second, which refuses it. If both engines are
    of the same kind, options go to the second only, except those that determine how the model is loaded."""
    if engines[0] == engines[1]:
        return {name: value for name, value in options.items() if name in READ}, options
    first, second = (known_options(engine) if options else [] for engine in engines)
    return (
        {name: value for name, value in options.items() if name in first and name not in ITS_OWN},
        {name: value for name, value in options.items() if name in second or name not in first},
    )


Edits = Mapping[str, tuple[str, np.ndarray]]  # by site: the place, and the vector [W] that is added there


class _ObservedPrompt(NamedTuple):
    """A prompt's run as plain data: rows [T, W] by place, positions in order."""

    prompt: list[int]
    tokens: list[int]
    logprobs: np.ndarray
    rows: dict[str, np.ndarray]


class _Seen(NamedTuple):
    """The observations of one engine.

    engine: its name and version
    edits: the edit at each site, by name
    moved: change in the next token's logits [V] per edit
    noise: largest difference in these logits without an edit, in the same batch
    """

    engine: str
    family: str
    dtype: str
    kept: list[_ObservedPrompt]
    edits: Edits
    moved: dict[str, np.ndarray]
    noise: float


def _observe(
    model: str,
    engine: str,
    options: dict[str, Any],
    prompts: list[str | list[int]],
    max_tokens: int,
    edits: Edits | None,
) -> _Seen:
    """Run the prompts and edits on one engine, record the results, and close it."""
    if engine == "fake":
        options = {name: value for name, value in options.items() if name != "dtype"}
    with pc.LM(model, engine, prove=False, **options) as lm:
        if not lm.sites.family.tabled:  # a table made from modules offers only what is proved
            ensure_proved(lm)
        names = [pc.Site(name) for name in lm.sites.names]
        runs = lm.run(prompts, max_tokens=max_tokens, capture=names, logprobs=True)
        for run in runs:
            run.answer  # noqa: B018  raises the run's own error
        kept = [_kept(lm, run) for run in runs]
        edits = edits or {name: _edit(lm, name, kept[0]) for name in lm.sites.names}
        name = f"{lm.model.engine} {lm.model.version}"
        seen = _Seen(name, lm.model.family, lm.model.dtype, kept, edits, *_moves(lm, kept[0].prompt, edits))
        del runs
    del lm
    _free()
    return seen


def _free() -> None:
    """Free a closed engine's memory before the next engine measures the free memory."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def _kept(lm: LM, run: Run) -> _ObservedPrompt:
    rows = {str(place): _flat(run[str(place)]) for place in lm.sites.refs()}
    return _ObservedPrompt(run.prompt_token_ids, run.token_ids, np.array(run.logprobs, np.float64), rows)


def _flat(rows: Any) -> np.ndarray:
    """Return rows as [T, W], heads concatenated."""
    array = np.asarray(rows, np.float32)
    return array.reshape(len(array), -1)


def _edit(lm: LM, name: str, kept: _ObservedPrompt) -> tuple[str, np.ndarray]:
    """Return the site in a middle layer, and the vector [W] that the prover adds to the prompt's last row there."""
    places = lm.sites.resolve(pc.Site(name))
    place = str(places[len(places) // 2])
    return place, push(name, kept.rows[place][0 if name == "logits" else len(kept.prompt) - 1])


def _moves(lm: LM, prompt: list[int], edits: Edits) -> tuple[dict[str, np.ndarray], float]:
    """Return the change [V] in the next token's logits caused by each edit of the prompt's last token, and the largest
    change without an edit. All runs are in one batch."""
    here = {name: edit for name, edit in edits.items() if name in lm.sites.names}
    programs = [[], *([pc.Add(vector, at=place, tokens=pc.prompt[-1])] for place, vector in here.values()), []]
    at = pc.logits @ pc.prompt[-1]
    runs = lm.run([prompt] * len(programs), max_tokens=1, edits=programs, capture=[at])
    plain, *edited, again = (_flat(run["logits"])[0].astype(np.float64) for run in runs)
    return {name: logits - plain for name, logits in zip(here, edited, strict=True)}, _largest(again - plain)


# -- comparing


def _bounds(dtype: str, tolerance: float | None) -> Bounds:
    if dtype not in BOUNDS:
        raise pc.ProgramError(f"no tolerances for {dtype!r}; available: {', '.join(BOUNDS)}", "dtype")
    bounds = BOUNDS[dtype]
    return bounds if tolerance is None else Bounds(tolerance, bounds.edit, bounds.logprobs)


def _compared(model: str, ours: _Seen, theirs: _Seen, bounds: Bounds) -> Parity:
    common = [_common(a, b) for a, b in zip(ours.kept, theirs.kept, strict=True)]
    gaps = [_gaps(a, b, n) for a, b, n in zip(ours.kept, theirs.kept, common, strict=True)]
    worst = {place: max(gap[place] for gap in gaps) for place in gaps[0]}
    one_sided = tuple(sorted(_names(ours.kept[0].rows) ^ _names(theirs.kept[0].rows)))
    alike = ours.family == theirs.family
    logprobs = [
        _largest(a.logprobs[:n] - b.logprobs[:n]) for a, b, n in zip(ours.kept, theirs.kept, common, strict=True)
    ]
    return Parity(
        model=model, family=theirs.family, dtype=theirs.dtype,
        engines=(ours.engine, theirs.engine),
        prompts=len(common), positions=sum(_positions(b, n) for b, n in zip(theirs.kept, common, strict=True)),
        equal_tokens=(sum(common), sum(len(kept.tokens) for kept in theirs.kept)), bounds=bounds,
        sites=tuple(_site(name, worst, ours, theirs) for name in theirs.edits if name in ours.moved),
        only=one_sided if alike else (), left_out=() if alike else one_sided, gaps=worst, logprobs=max(logprobs),
    )  # fmt: skip


def _names(places: Iterable[str]) -> set[str]:
    return {place.partition("[")[0] for place in places}


def _common(a: _ObservedPrompt, b: _ObservedPrompt) -> int:
    """Return the number of leading generated tokens on which two runs agree."""
    same = [x == y for x, y in zip(a.tokens, b.tokens, strict=False)]
    return same.index(False) if False in same else len(same)


def _positions(kept: _ObservedPrompt, common: int) -> int:
    """Return the number of leading positions whose input tokens agree; the last generated token is never an input."""
    return len(kept.prompt) + min(common, len(kept.tokens) - 1)


def _gaps(a: _ObservedPrompt, b: _ObservedPrompt, common: int) -> dict[str, float]:
    """Return the largest row difference at each place, over positions with the same tokens in both runs."""
    positions = {place: (common + 1 if place == "logits" else _positions(b, common)) for place in a.rows}
    return {place: apart(a.rows[place][:n], b.rows[place][:n]) for place, n in positions.items() if place in b.rows}


def apart(ours_TW: np.ndarray, theirs_TW: np.ndarray) -> float:
    """Return the largest ‖a − b‖₂ / ‖b‖₂ over rows; infinite for NaN, no rows or different widths."""
    if ours_TW.shape[1:] != theirs_TW.shape[1:] or not len(ours_TW) or not len(theirs_TW):
        return float("inf")
    n = min(len(ours_TW), len(theirs_TW))
    a_TW, b_TW = ours_TW[:n].astype(np.float64), theirs_TW[:n].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        gap_T, size_T = np.linalg.norm(a_TW - b_TW, axis=1), np.linalg.norm(b_TW, axis=1)
        return _largest(np.where(gap_T == 0, 0.0, gap_T / size_T))


def _largest(numbers: np.ndarray) -> float:
    """Return the largest absolute value; infinite if one is NaN, 0 for an empty array."""
    return float(np.nan_to_num(np.abs(numbers), nan=np.inf, posinf=np.inf).max(initial=0.0))


def _site(name: str, worst: Mapping[str, float], ours: _Seen, theirs: _Seen) -> SiteParity:
    mine = {place: gap for place, gap in worst.items() if place.partition("[")[0] == name}
    here, there = (_beyond(seen.moved[name], seen.noise) for seen in (ours, theirs))
    gap = _largest(ours.moved[name] - theirs.moved[name]) / max(1.0, there)
    return SiteParity(name, tuple(mine), max(mine.values()), max(mine, key=mine.__getitem__), theirs.edits[name][0],
                      there, gap, here)  # fmt: skip


def _beyond(moved: np.ndarray, noise: float) -> float:
    """Return the largest change of the logits; 0 if it may be batch noise."""
    most = _largest(moved)
    return most if most > 4 * noise + 1e-6 else 0.0
