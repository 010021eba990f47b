"""The picture `docs/rooms.svg`: the package's rooms, from the top down, and what each imports: `make docs`.

The rooms and their order are those of the structure test, and the dots are the imports that it reads from the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from tests.unit.test_structure import FILES, ORDER, room, rooms

FILE = Path(__file__).parents[1] / "docs" / "rooms.svg"
JOBS = {
    "cli": "the command: one file a command, no logic",
    "serve": "programs in vLLM's OpenAI server: routes, names",
    "studies": "questions made of many runs: sweeps, comparisons",
    "plots": "pictures of results: PNG and HTML",
    "doctor": "what works on this machine, and what does not",
    "trace": "pc.LM: proxies of tensors that write programs",
    "proving": "proves each site on the live model",
    "exporting": "a program's effect as a checkpoint",
    "lm": "checks a call, binds its programs, hands it over",
    "grade": "many programs on one prompt: reads, runs as requests",
    "call": "the arguments of a call, read for each prompt",
    "stream": "the tokens of a run as they are generated",
    "run": "the results of a request; fetches its captures",
    "attention": "attention patterns among a run's captures",
    "engines": "carry requests: vLLM, Transformers, the fake",
    "runtime": "in the worker: tables, taps, steps, the way out",
    "kernels": "edit and copy rows: a plain one, and fast ones",
    "plan": "a program and a prompt become numbers and plans",
    "sites": "where each site of each model family lies",
    "store": "captured rows, and vectors by key and by name",
    "language": "the words: sites, tokens, ops, values, programs",
    "errors": "every error, as one tree",
    "version": "the version, imported by anyone",
}
BANDS = {
    "ask": ("#8250df", ("cli", "serve", "studies", "plots", "doctor")),
    "call": ("#0969da", ("trace", "proving", "exporting", "lm", "grade", "call", "stream", "run", "attention")),
    "carry": ("#bc4c00", ("engines",)),
    "compute": ("#1a7f37", ("runtime", "kernels", "plan")),
    "know": ("#57606a", ("sites", "store", "language", "errors", "version")),
}
COLOUR = {name: colour for colour, names in BANDS.values() for name in names}
LEFT, NAME, JOB, GRID, STEP, ROW, TOP, MARGIN = 108, 116, 202, 580, 24, 30, 96, 16
FONT = "font-family='-apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


def imports() -> dict[str, set[str]]:
    """By room, in order from the top: the rooms that its files import."""
    graph: dict[str, set[str]] = {name: set() for name in ORDER if any(room(file) == name for file in FILES)}
    for file in FILES:
        if room(file) in graph:
            graph[room(file)] |= rooms(file) & graph.keys() - {room(file)}
    return graph


def picture() -> str:
    """The picture as SVG."""
    graph = imports()
    width, height = GRID + STEP * len(graph) + 2 * MARGIN, TOP + ROW * len(graph) + MARGIN
    size = f"width='{width}' height='{height}' viewBox='0 0 {width} {height}'"
    head = (f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT} font-size='14' role='img' "
            "aria-label='the rooms of patchclamp and what each imports'>")  # fmt: skip
    ground = f"<rect width='{width}' height='{height}' rx='8' fill='#ffffff' stroke='#d0d7de'/>"
    return "\n".join([head, ground, *_columns(graph), *_bands(list(graph)), *_rows(graph), "</svg>", ""])


def _columns(graph: dict[str, set[str]]) -> Iterator[str]:
    for number, name in enumerate(graph):
        x = GRID + STEP * number + STEP / 2
        yield (f"<text transform='translate({x + 4:g} {TOP - 8}) rotate(-60)' fill='{COLOUR[name]}' "
               f"font-size='13'>{name}</text>")  # fmt: skip
    legend = "a dot: the room of the row imports the room of the column"
    yield f"<text x='{LEFT}' y='{TOP - 10}' fill='#57606a' font-size='13'>{legend}</text>"


def _bands(names: list[str]) -> Iterator[str]:
    for band, (colour, members) in BANDS.items():
        numbers = [names.index(name) for name in members if name in names]
        if numbers:
            y, height = TOP + ROW * min(numbers), ROW * len(numbers)
            yield (f"<rect x='{MARGIN}' y='{y + 2}' width='{LEFT - MARGIN - 8}' height='{height - 4}' rx='4' "
                   f"fill='{colour}'/>")  # fmt: skip
            yield (f"<text x='{(MARGIN + LEFT - 8) / 2:g}' y='{y + height / 2 + 5:g}' fill='#ffffff' font-weight='600' "
                   f"text-anchor='middle'>{band}</text>")  # fmt: skip


def _rows(graph: dict[str, set[str]]) -> Iterator[str]:
    for number, (name, below) in enumerate(graph.items()):
        y = TOP + ROW * number
        yield f"<line x1='{LEFT}' y1='{y}' x2='{GRID + STEP * len(graph)}' y2='{y}' stroke='#eaeef2'/>"
        yield f"<text x='{NAME}' y='{y + 20}' font-weight='600' fill='{COLOUR[name]}'>{name}</text>"
        yield f"<text x='{JOB}' y='{y + 20}' fill='#24292f'>{escape(JOBS[name])}</text>"
        for column, other in enumerate(graph):
            x, middle = GRID + STEP * column + STEP / 2, y + ROW / 2
            if other == name:
                yield f"<rect x='{x - 7:g}' y='{middle - 7:g}' width='14' height='14' rx='3' fill='#eaeef2'/>"
            elif other in below:
                yield f"<circle cx='{x:g}' cy='{middle:g}' r='5' fill='{COLOUR[other]}'/>"


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
