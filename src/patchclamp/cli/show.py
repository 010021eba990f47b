"""Results in a terminal: tables for people, and JSON for programs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from patchclamp.language.site import SPECS
from patchclamp.plots import AttentionMaps, Curve, Curves, Heatmap, Picture, TokenGrid, style
from patchclamp.plots.style import tick

if TYPE_CHECKING:
    from patchclamp import studies
    from patchclamp.doctor import Report
    from patchclamp.lm import LM
    from patchclamp.proving import Proof
    from patchclamp.studies.parity import Parity


def wrote(console: Console, path: Path) -> None:
    console.print(Text.assemble("wrote ", (str(path), "bold")), soft_wrap=True)


def show(console: Console, result: Any, top: int) -> None:
    """Print the result of a study: title, provenance, and its most important numbers."""
    from patchclamp import studies

    if isinstance(result, studies.SteeringVectors) and result.best is None:
        return  # without held-out prompts there is nothing to show
    picture = result.picture()
    _head(console, picture, *(picture.notes if isinstance(picture, Curves) else
                              [] if isinstance(picture, Heatmap) else [picture.explained]))  # fmt: skip
    if isinstance(picture, Heatmap):
        show_prompts(console, picture)
        show_best(console, picture, top)
    elif isinstance(result, studies.LogitLensResult):
        show_lens(console, result)
    elif isinstance(result, studies.DirectAttributionResult):
        show_attribution(console, result, top)
    elif isinstance(result, studies.PatchscopeResult):
        show_patchscope(console, result)
    elif isinstance(result, (studies.AttributionPatchingResult, studies.EdgeAttributionResult)):
        show_patching(console, result, top)
    elif isinstance(picture, Curves):
        show_curves(console, picture)
        if isinstance(result, studies.FuzzSweepResult):
            show_answers(console, result)
    elif isinstance(picture, AttentionMaps):
        show_maps(console, picture, top)
    elif isinstance(picture, TokenGrid) and picture.table:
        table = _table(*picture.table[0])
        for row in picture.table[1 : top + 1]:
            table.add_row(*map(Text, row))
        _print(console, table)


def show_maps(console: Console, picture: AttentionMaps, top: int) -> None:
    """Print the `top` largest attention values of the last query."""
    last_GK = picture.maps[:, -1]
    table = _table("map", f"from {style.quoted(picture.tokens[picture.queries[-1]])} to", "value")
    for place in np.argsort(-np.abs(last_GK), axis=None, kind="stable")[:top].tolist():
        n, key = divmod(place, last_GK.shape[1])
        value = style.number(float(last_GK[n, key]))
        table.add_row(Text(picture.names[n]), Text(style.visible(picture.tokens[key])), value)
    _print(console, table)


def show_texts(console: Console, prompt: str, texts: dict[float, str]) -> None:
    """Print a prompt's continuation at each scale."""
    table = _table("scale", "continuation")
    for scale, text in texts.items():
        table.add_row(f"{scale:g}", Text(style.plain(text)))
    console.print(Text(f"\n{style.plain(prompt)} …"), soft_wrap=True)
    _print(console, table)


PROOFS = {"shape": "shape", "noop": "no-op", "edit": "edit", "order": "order", "adds": "sums"}  # columns of proofs
FOLDED = frozenset({
    "likeliest tokens", "continuation", "token", "sender", "receiver", "heads", "neurons", "module", "detail",
})  # fmt: skip
LEFT = FOLDED | {"layer parts", "best cells", "place", "positions", "site", "shape", "layout", "mark", "finding"}


def _table(*columns: str, header: bool = True, gap: int = 2) -> Table:
    """Create a table without lines. Text is left-aligned and wrapped; numbers are right-aligned."""
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=header)
    for name in columns:
        justify: JustifyMethod = "left" if name in LEFT else "center" if name in PROOFS.values() else "right"
        table.add_column(name, justify=justify, no_wrap=name not in FOLDED, overflow="fold")
    return table


def _print(console: Console, table: Table) -> None:
    """Print a table, wider than the console if it must be: numbers are never cut."""
    for column in table.columns:
        if column.no_wrap:
            cells = (column.header, *column.cells) if table.show_header else column.cells
            column.min_width = max((cell_len(str(cell)) for cell in cells), default=0)
    least = console.measure(table, options=console.options.update(max_width=1 << 16)).minimum
    table.width = least if least > console.width else None
    console.print(table, crop=False)


def _head(console: Console, picture: Picture, *texts: str) -> None:
    """Print the title and provenance of a plot, followed by `texts`."""
    console.print()
    console.print(Text(picture.title, style="bold"), soft_wrap=True)
    console.print(Text(picture.provenance, style="dim"), soft_wrap=True)
    for text in texts:
        console.print(Text(text), soft_wrap=True)
    console.print()


_COLOURS = {"clean": "blue", "corrupt": "dark_orange3"}


def show_prompts(console: Console, heatmap: Heatmap) -> None:
    """Print the prompts, with the tokens that differ underlined."""
    for strip in heatmap.strips:
        line = Text(f"{strip.title:7} ", style=f"bold {_COLOURS[strip.side]}")
        for token, mark in zip(strip.tokens, strip.marks, strict=True):
            line.append(style.plain(token), style="not bold default" if mark == "same" else "underline")
        console.print(line, soft_wrap=True)


def show_best(console: Console, heatmap: Heatmap, top: int) -> None:
    """Print the baselines, the noise floor, and a table of the `top` best cells."""
    console.print()
    for anchor in sorted(heatmap.anchors, key=lambda anchor: anchor.side):
        value = style.number(anchor.value)
        console.print(Text.assemble(f"{anchor.name + ' run':11} ", (value, f"bold {_COLOURS[anchor.side]}")))
    console.print(Text(heatmap.noise))
    if heatmap.note:
        console.print(Text(heatmap.note), soft_wrap=True)
    if heatmap.skipped:
        tokens = ", ".join(f"{style.quoted(token)} ({side} {position})" for side, position, token in heatmap.skipped)
        console.print(Text(f"not patched, because the other prompt has no counterpart: {tokens}"), soft_wrap=True)
    console.print()
    over, goal = f"over {heatmap.baseline.name}", heatmap.goal
    spread = [name for name, _ in heatmap.panels[0].details if name in ("effect from", "effect to", "p")]
    to_goal = [] if goal is None else [f"way to {goal.name}"]
    table = _table("best cells", "token", "positions", heatmap.metric, over, *spread, *to_goal)
    for spot in heatmap.ranked(top):
        place, label = heatmap.cell_name(spot)
        details = dict(heatmap.panels[spot.panel].details)
        of_cell = [style.number(details[name][spot.row, spot.column]) for name in spread]
        share = [] if goal is None else [style.percent(heatmap.share(spot.value))]
        table.add_row(
            Text(place), Text(style.visible(label)), heatmap.columns[spot.column].positions, style.number(spot.value),
            style.signed(heatmap.effect(spot.value)), *of_cell, *share,
        )  # fmt: skip
    _print(console, table)


def show_curves(console: Console, curves: Curves) -> None:
    """Print each line's value at every x of the shared axis."""
    lines = [(chart, line) for chart in curves.charts if not chart.x_label for line in chart.lines]
    labels = Counter(line.label for _, line in lines)
    table = _table(curves.x_label, *(f"{chart.y_label}, {line.label}" if labels[line.label] > 1 else line.label
                                     for chart, line in lines))  # fmt: skip
    for x in curves.numbers:
        table.add_row(tick(x), *(_at(line, x) for _, line in lines))
    _print(console, table)


def _at(line: Curve, x: float) -> str:
    here = line.y[np.asarray(line.x) == x]
    return style.number(float(here[0])) if len(here) and np.isfinite(here[0]) else "–"


def show_answers(console: Console, sweep: studies.FuzzSweepResult) -> None:
    """Print the answers to the first prompt, by strength, for the first seed."""
    console.print()
    prompt = style.shorten(style.plain(sweep.prompts[0]), 90)
    console.print(Text.assemble("the first prompt: ", (prompt, "bold")), soft_wrap=True)
    table = _table("strength", "continuation", header=False)
    table.add_row("unfuzzed", Text(style.plain(sweep.unfuzzed[0][0].text)))
    for strength, row in zip(sweep.strengths, sweep.answers[0], strict=True):
        table.add_row(tick(strength), Text(style.plain(row[0].text)))
    _print(console, table)


def show_lens(console: Console, lens: studies.LogitLensResult) -> None:
    """Print one row per layer for the last position: likeliest tokens, KL, entropy, and the chosen tokens."""
    column = len(lens.positions) - 1
    at = lens.positions[column]
    console.print(Text(f"after {style.quoted(lens.prompt_tokens[at])} (position {at})"))
    table = _table("layer", "likeliest tokens", "KL", "entropy", *(f"rank of {style.quoted(t)}" for t in lens.tokens))
    for l, layer in reversed(list(enumerate(lens.layers))):  # noqa: E741
        tops = "  ".join(
            f"{style.visible(guess.token)} {100 * guess.probability:.0f}%" for guess in lens.top(layer, at)
        )
        numbers = (f"{lens.kl[l, column]:.2f}", f"{lens.entropy[l, column]:.2f}")
        table.add_row(str(layer), Text(tops), *numbers, *(str(rank) for rank in lens.ranks[l, column]))
    _print(console, table)


def show_attribution(console: Console, result: studies.DirectAttributionResult, top: int) -> None:
    """Print the layers, heads and neurons that contribute most."""
    for kinds, name in ((("attn_out", "mlp_out", "embed", "positions", "bias"), "layer parts"), (("z",), "heads"),
                        (("neurons",), "neurons")):  # fmt: skip
        shares = [share for share in result.ranked() if share.part.partition("[")[0] in kinds][:top]
        if shares:
            table = _table(name, "adds")
            for share in shares:
                table.add_row(Text(share.part), style.signed(share.value))
            _print(console, table)
            console.print()
    console.print(Text(f"all parts together {style.signed(float(result.totals.mean()))}; the model's own "
                       f"{style.signed(float(result.logit_diffs.mean()))}"))  # fmt: skip


def show_patchscope(console: Console, result: studies.PatchscopeResult) -> None:
    """Print one row per cell: the source and target layers of the activation, and the continuation."""
    table = _table("from layer", "in layer", "KL from unpatched", "continuation")
    for s, layer in reversed(list(enumerate(result.layers))):
        for g in range(result.moved.shape[1]):
            to = result.target_layers[g] if result.target_layers else layer
            table.add_row(str(layer), str(to), f"{result.moved[s, g]:.2f}", Text(style.plain(result.texts[s][g])))
    _print(console, table)


def show_patching(
    console: Console, result: studies.AttributionPatchingResult | studies.EdgeAttributionResult, top: int
) -> None:
    """Print the best verified cells or edges, or the largest estimates if none is verified, and the noise floor."""
    table = _table(*result.heads, "estimate", "exact patch")
    for cell in result.best(top) or result.proposals(top):
        exact = "–" if cell.exact is None else style.signed(cell.exact)
        table.add_row(*(Text(style.visible(end)) for end in cell.ends), style.signed(cell.estimate), exact)
    _print(console, table)
    if np.isfinite(result.exact).any():
        console.print(Text(f"two unpatched runs differ by {style.number(result.noise_floor)}"))


TICKS: dict[bool | None, tuple[str, str]] = {None: ("–", "dim"), True: ("✓", "green"), False: ("✗", "bold red")}
NOWHERE = "–"  # shown as the module on an engine without modules


def sites(console: Console, lm: LM, proofs: Sequence[Proof]) -> None:
    """Print one row per site, with a tick for each proof ("–": not applicable) and its module, then the failures."""
    console.print(Text(repr(lm).strip("<>"), style="bold"))
    table = _table("site", "layers", "shape", "layout", *PROOFS.values())
    for proof in proofs:
        ticks = [Text(*TICKS[getattr(proof, field)]) for field in PROOFS]
        layers = "–" if proof.layers is None else str(proof.layers)
        table.add_row(proof.name, layers, Text(shape(proof)), proof.layout, *ticks)
    _print(console, table)
    modules = {proof.name: module(lm, proof.name) for proof in proofs}
    if set(modules.values()) != {NOWHERE}:
        where = _table("site", "module")
        for name, border in modules.items():
            where.add_row(name, Text(border))
        console.print()
        _print(console, where)
        console.print()
    failed = [proof for proof in proofs if not proof.holds]
    tabled = lm.sites.family.tabled
    for proof in failed:
        failure = f"{proof.name}{'' if tabled else ' is withdrawn'}: {proof.note or 'not proved'}"
        console.print(Text(failure, style="red" if tabled else "yellow"), soft_wrap=True)
    if not failed:
        console.print(Text(f"all {len(proofs)} sites hold", style="green"))
    if any(proof.tried < (proof.layers or 1) for proof in proofs):
        tried = "an edit was tried in the first, middle and last layer of each; --full tries all"
        console.print(Text(tried, style="dim"))


def sites_json(console: Console, lm: LM, proofs: Sequence[Proof]) -> None:
    """Print a JSON list with one object per site."""
    rows = [
        {
            "site": proof.name, "layers": proof.layers, "shape": shape(proof), "layout": proof.layout,
            "module": module(lm, proof.name), "proofs": {field: getattr(proof, field) for field in PROOFS},
            "edits_tried": proof.tried, "holds": proof.holds, "note": proof.note,
        }
        for proof in proofs
    ]  # fmt: skip
    console.print_json(data=rows, highlight=False)


def shape(proof: Proof) -> str:
    """Return a shape such as `[T, 576]` for T tokens; with N instead of T if only sampled tokens have rows."""
    return f"[{'N' if proof.name == 'logits' else 'T'}, {proof.width}]"


def module(lm: LM, name: str) -> str:
    """Return the name of the tensor that this engine taps for a site, such as `model.layers.{l}.mlp, output`."""
    kind, shift = lm.sites.family.sites[name]
    tap = getattr(lm.sites.family.points[kind], lm.model.engine, None)
    if tap is None:
        return NOWHERE
    layer = "{l}" if not shift else f"{{l+{shift}}}"
    path = tap.module.replace("{l}", layer if SPECS[name].layered else "0")
    return f"{path}, {'input' if tap.moment == 'in' else 'output' if tap.moment == 'out' else 'its op'}"


def parity(console: Console, result: Parity) -> None:
    """Print one row per site (largest difference, first layer out of tolerance, edit), then all problems."""
    engines = " against ".join(result.engines)
    console.print(Text(f"{result.model} ({result.family}, {result.dtype}): {engines}", style="bold"), soft_wrap=True)
    prompts = f"{result.prompts} prompt{'s' if result.prompts != 1 else ''}, {result.positions} positions"
    same, generated = result.equal_tokens
    console.print(Text(f"{prompts}; {same} of {generated} generated tokens equal"))
    table = _table("site", "layers", "worst row", "in layer", "out from", "edit in", "logits moved", "otherwise", gap=1)
    for site in result.sites:
        out, layered = result.leaves(site), "[" in site.worst_at
        table.add_row(
            site.name, str(len(site.places)) if layered else "–", _bounded(site.worst, out is None),
            _layer(site.worst_at), "–" if out is None else _layer(out) if layered else "out", _layer(site.edit_at),
            f"{site.moved:.2g}", _bounded(site.edit, result.moves(site)),
        )  # fmt: skip
    _print(console, table)
    if result.left_out:
        console.print(Text(f"on one engine only, since the tables differ: {', '.join(result.left_out)}", style="dim"))
    near = result.logprobs <= result.bounds.logprobs
    console.print(Text.assemble("log-probabilities ", _bounded(result.logprobs, near), " apart at most"))
    bounds = result.bounds
    for problem in result.problems:
        console.print(Text(problem, style="red"), soft_wrap=True)
    if result.first is not None:
        console.print(Text(f"the first value out of tolerance is at {result.first}", style="bold red"), soft_wrap=True)
    if result.holds:
        bounded = (
            f"rows within {bounds.rows:g}, edits within {bounds.edit:g}, log-probabilities within {bounds.logprobs:g}"
        )
        console.print(Text(f"all {len(result.sites)} sites are equal: {bounded}", style="green"), soft_wrap=True)


def _layer(place: str) -> str:
    """Return the layer in a site's text, such as `5` for "z[5]"; a dash for a site without layers."""
    return place.partition("[")[2].rstrip("]") or "–"


def _bounded(number: float, within: bool) -> Text:
    return Text(f"{number:.1e}" if number else "0", style="green" if within else "bold red")


MARKS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "problem": ("✗", "bold red")}


def findings(console: Console, report: Report) -> None:
    """Print one table per section of the report, with advice for every problem."""
    for part, group in itertools.groupby(report.findings, lambda finding: finding.part):
        console.print(Text(part, style="bold"))
        table = _table("mark", "finding", "detail", header=False)
        for finding in group:
            mark, style = MARKS[finding.status]
            detail = Text(finding.detail)
            if finding.advice:
                detail.append(f"\n→ {finding.advice}", style=style)
            table.add_row(Text(mark, style=style), finding.name, detail)
        _print(console, table)
        console.print()
    problems, notes = len(report.problems), sum(finding.status == "note" for finding in report.findings)
    summary = f"{problems} problem{'s' if problems != 1 else ''}, {notes} note{'s' if notes != 1 else ''}"
    console.print(Text(summary, style=MARKS["problem" if problems else "ok"][1]))
