"""The patch sweep: where in the model does what tells a clean prompt from a corrupt one live?

The corrupt prompt is run many times, each time with one cell (a site, a layer, a position) replaced by its value in a
run of the clean prompt (denoising).  Where that brings the clean answer back, the cell carries what makes the
difference.

Source: activation patching as in causal tracing, Meng et al. 2022 (arXiv:2202.05262), section 2.1; practice after
Heimersheim and Nanda 2024 (arXiv:2404.15255).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, TokensError, UnsupportedSite
from patchclamp.language import From, Range, Replace, Site
from patchclamp.language.site import Index, parse_index, parse_site
from patchclamp.language.tokens import Positions, Tokens, every, parse_tokens
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.studies.align import Alignment, align
from patchclamp.studies.batches import run_batches
from patchclamp.studies.metric import Graded, grade, single_token
from patchclamp.studies.progress import progress
from patchclamp.studies.sweep_result import Cell, Column, PatchSweep

BASELINES = 8  # reruns of the corrupt prompt, spread through the batch, that measure the noise floor


def patch_sweep(
    lm: LM,
    *,
    clean: Any,
    corrupt: Any,
    answer: str | int,
    foil: str | int | None = None,
    sites: Sequence[Any] = (Site("resid_pre"),),
    layers: Any = None,
    positions: Sequence[Any] | None = None,
    metric: str = "logit_diff",
    batch: int = 256,
    show_progress: bool | None = None,
    listener: Listener | None = None,
) -> PatchSweep:
    """Patches every cell of sites × layers × positions from the clean run into the corrupt one; returns the grid.

    `clean`, `corrupt`: prompts, as text or token ids. `answer`, `foil`: one token each, as text or id, graded exactly.
    `sites`: sites with or without layers; `layers`: which layers of those without (all), a number, a list, or text
    such as "0:12". `positions`: columns of the grid, selections of the corrupt prompt (`pc.prompt[-1]`,
    `pc.span("Colosseum")`, a number); a span of several tokens is patched together. All aligned positions otherwise.
    `metric`: "logit_diff", "logprob" or "recovered". `batch`: runs submitted at a time; two batches are under way.
    `listener`: hears of cells as they finish; what it raises stops the sweep.

    Raises: `TokensError` for an answer of several tokens or prompts that cannot be aligned, and the error of any run.
    """
    graded = grade(metric, single_token(lm, answer, "answer"), None if foil is None else single_token(lm, foil, "foil"))
    names = [_site(site, i) for i, site in enumerate([sites] if isinstance(sites, (str, Site)) else sites)]
    if not isinstance(batch, int) or batch < 1:
        raise ProgramError(f"runs are submitted at least one at a time, not {batch!r}", "batch")
    rows = _rows(lm, names, layers)
    source = lm.run(clean, max_tokens=1, capture=[Site(*row) @ _readable(row[0]) for row in rows], score=graded.score)
    base = lm.run(corrupt, max_tokens=1, score=graded.score)
    alignment = align(source.prompt_token_ids, base.prompt_token_ids)
    columns = _columns(lm, source, base, alignment, positions)
    cells = [(row, column) for row in rows for column in columns if _possible(row, column, base)]
    if not cells:
        raise ProgramError("no cell to patch: no site has a value at any of the positions")
    source_value, base_value = graded.read(source.scores), graded.read(base.scores)
    offset, factor = graded.scale(source_value, base_value)
    sweep = PatchSweep(
        model=lm.model.name, engine=f"{lm.model.engine} {lm.model.version}", dtype=lm.model.dtype, metric=metric,
        clean_prompt=_text(lm, clean), corrupt_prompt=_text(lm, corrupt),
        clean_tokens=tuple(lm.tokenizer.token_strings(source.prompt_token_ids)),
        corrupt_tokens=tuple(lm.tokenizer.token_strings(base.prompt_token_ids)),
        answer=lm.tokenizer.token_strings([graded.answer])[0],
        foil=None if graded.foil is None else lm.tokenizer.token_strings([graded.foil])[0],
        sites=tuple(dict.fromkeys(site.name for site in names)), layers=_layers(rows), columns=tuple(columns),
        grid=_grid(names, rows, columns, cells, np.full(len(cells), np.nan)),
        clean=(source_value - offset) * factor, corrupt=(base_value - offset) * factor,
        noise_floor=np.nan, alignment=alignment.pairs, skipped=_skipped(lm, source, base, alignment),
    )  # fmt: skip

    def tell(which: list[int], values: np.ndarray) -> None:
        if listener is not None:
            scaled = ((values - offset) * factor).tolist()
            listener.cells([Cell(*cells[i][0], cells[i][1], value) for i, value in zip(which, scaled, strict=True)])

    try:
        if listener is not None:
            listener.begin(sweep, len(cells))
        values, floor = _run_cells(lm, source, base, cells, graded, batch, show_progress, tell)
    finally:
        source.close()  # an error's frames may hold it for long
    grid = _grid(names, rows, columns, cells, (values - offset) * factor)
    return msgspec.structs.replace(sweep, grid=grid, noise_floor=floor * abs(factor))


class Listener(Protocol):
    """Hears of a sweep as it goes, on threads of the sweep's."""

    def begin(self, sweep: PatchSweep, cells: int) -> None:
        """The sweep begins: its result so far, whose grid is NaN, and how many cells there will be."""
        ...

    def cells(self, cells: list[Cell]) -> None:
        """Cells that have finished."""
        ...


Row = tuple[str, int | None]


def _run_cells(
    lm: LM, source: Run, base: Run, cells: list[tuple[Row, Column]], graded: Graded, batch: int, show: bool | None,
    tell: Callable[[list[int], np.ndarray], None],
) -> tuple[np.ndarray, float]:  # fmt: skip
    """The metric of every cell, and the largest difference among reruns of the unpatched prompt beside them. `tell` is
    given numbers of cells and their values."""
    edits: list[list[Replace]] = [[_patch(source, row, column)] for row, column in cells]
    every_nth = max(len(edits) // BASELINES, 1)
    plan: list[int | None] = []
    for i in range(len(edits)):
        plan += [None, i] if i % every_nth == 0 else [i]
    plan.append(None)
    values, baselines = np.full(len(edits), np.nan), []
    parts = [plan[begin : begin + batch] for begin in range(0, len(plan), batch)]
    calls = (
        {"prompt": [base.prompt_token_ids] * len(part), "max_tokens": 1, "score": graded.score,
         "edits": [[] if i is None else edits[i] for i in part]}
        for part in parts
    )  # fmt: skip
    unread = iter(plan)
    with progress("patching", len(plan), show) as advance:

        def read(runs: list[Run]) -> None:
            new: list[int] = []
            for run, i in zip(runs, unread, strict=False):
                if i is None:
                    baselines.append(graded.read(run.scores))
                else:
                    values[i] = graded.read(run.scores)
                    new.append(i)
            tell(new, values[new])
            advance(len(runs))

        run_batches(lm, calls, read)
    return values, float(np.max(np.abs(np.array(baselines) - graded.read(base.scores))))


def _patch(source: Run, row: Row, column: Column) -> Replace:
    at = Site(*row)
    return Replace(From(source, at, every[column.clean]), at=at, tokens=every[column.corrupt])


def _site(text: Any, number: int) -> Site:
    try:
        site = parse_site(text)
    except PatchclampError as error:
        raise error.under(f"sites[{number}]") from None
    if site.index is not None:
        raise UnsupportedSite(f"{site}: heads and neurons cannot be swept yet", f"sites[{number}]")
    return site


def _rows(lm: LM, sites: list[Site], layers: Any) -> list[Row]:
    """Every (site, layer) to patch, once."""
    chosen = _which(layers, lm.model.layers)
    rows: dict[Row, None] = {}
    for site in sites:
        for ref in lm.sites.resolve(site):
            if site.layers is not None or ref.layer is None or ref.layer in chosen:
                rows[ref.name, ref.layer] = None
    return list(rows)


def _which(layers: Any, count: int) -> set[int]:
    if isinstance(layers, str):
        layers = parse_index(layers)
    if layers is None:
        return set(range(count))
    indices: list[Index] = [Range.of(layers) if isinstance(layers, slice) else layers] if isinstance(
        layers, (int, Range, slice)) else list(layers)  # fmt: skip
    chosen = {n for index in indices for n in (index.indices(count) if isinstance(index, Range) else [index])}
    outside = [n for n in chosen if not -count <= n < count]
    if outside or not chosen:
        raise UnsupportedSite(f"this model has layers 0 to {count - 1}, not {layers}", "layers")
    return {n % count for n in chosen}


def _columns(lm: LM, source: Run, base: Run, alignment: Alignment, positions: Sequence[Any] | None) -> list[Column]:
    partner = {corrupt: clean for clean, corrupt in alignment.pairs}
    tokens = lm.tokenizer.token_strings(base.prompt_token_ids)
    if positions is None:
        return [Column(tokens[corrupt], (clean,), (corrupt,)) for clean, corrupt in alignment.pairs]
    columns = []
    for i, selection in enumerate(positions):
        try:
            chosen = [int(p) for p in base.select(_selection(selection))]
        except PatchclampError as error:
            raise error.under(f"positions[{i}]") from None
        alone = [p for p in chosen if p not in partner]
        if alone or not chosen:
            what = (
                f"position {alone[0]} ({tokens[alone[0]]!r}) has no partner in the clean prompt"
                if alone
                else "nothing selected"
            )
            raise TokensError(f"{selection}: {what}; aligned are {sorted(partner)}", f"positions[{i}]")
        if any(column.corrupt == tuple(chosen) for column in columns):
            raise TokensError(f"{selection} selects {chosen}, which another column has already", f"positions[{i}]")
        label = "".join(tokens[p] for p in chosen)
        columns.append(Column(label, tuple(partner[p] for p in chosen), tuple(chosen)))
    return columns


def _selection(text: Any) -> Tokens:
    return Positions("prompt", text) if isinstance(text, int) else parse_tokens(text)


def _readable(name: str) -> Positions:
    """What of the clean prompt to capture: logits exist at its end only."""
    return Positions("prompt", -1) if name == "logits" else Positions("prompt")


def _possible(row: Row, column: Column, base: Run) -> bool:
    return row[0] != "logits" or column.corrupt == (len(base.prompt_token_ids) - 1,)


def _layers(rows: list[Row]) -> tuple[int, ...]:
    return tuple(sorted({layer for _, layer in rows if layer is not None})) or (0,)


def _grid(
    names: list[Site], rows: list[Row], columns: list[Column], cells: list[tuple[Row, Column]], values: np.ndarray
) -> np.ndarray:
    """[S, L, P], NaN where nothing was run; an unlayered site stands in the first layer's row."""
    sites, layers = list(dict.fromkeys(s.name for s in names)), _layers(rows)
    grid = np.full((len(sites), len(layers), len(columns)), np.nan)
    place = {column: p for p, column in enumerate(columns)}
    for ((name, layer), column), value in zip(cells, values, strict=True):
        grid[sites.index(name), 0 if layer is None else layers.index(layer), place[column]] = value
    return grid


def _skipped(lm: LM, source: Run, base: Run, alignment: Alignment) -> tuple[tuple[str, int, str], ...]:
    sides = (("clean", source, alignment.clean_only), ("corrupt", base, alignment.corrupt_only))
    return tuple(
        (side, position, lm.tokenizer.token_strings([run.prompt_token_ids[position]])[0])
        for side, run, alone in sides
        for position in alone
    )


def _text(lm: LM, prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else lm.tokenizer.decode(list(prompt))
