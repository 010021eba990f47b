"""The section of `docs/architecture.md` that works an engine step through: `make docs`.

Every number in it comes out of the package's own code: binding, tables, planner, plain kernel, captures. Only the model
is made up. It is small enough to be followed by hand.

    R rows of a step · D model width
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

import patchclamp as pc
from patchclamp.kernels import reference
from patchclamp.language import Program
from patchclamp.language.values import DTYPES
from patchclamp.plan import CAPTURE, LINEAR, Batch, BoundProgram, ProgramTable, Prompt, StepPlan, bind, make_plan
from patchclamp.plan.room import Room
from patchclamp.plan.table import named, record_count, records_of
from patchclamp.runtime.host_step import Bank
from patchclamp.runtime.runtime import Continuity
from patchclamp.sites import SiteMap, Sizes
from patchclamp.sites.tables import LLAMA
from patchclamp.store.captures import BufferSlice, CaptureStore
from patchclamp.store.host_memory import HostBlock

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
BEGIN, END = "<!-- begin: an engine step, made by `make docs` -->\n", "<!-- end: an engine step -->\n"
D, LAYERS, VOCABULARY = 4, 2, 100
SITES = SiteMap(LLAMA, Sizes(LAYERS, D, VOCABULARY))
POINTS = [SITES.resolve(pc.resid_post[layer])[0].point for layer in range(LAYERS)]
WIDTHS = np.array([point.width for point in SITES.points])
SAMPLED = np.array([point.rows == "sampled" for point in SITES.points])
KINDS = {CAPTURE: "`CAPTURE`", LINEAR: "`LINEAR`"}

TEXT = """\
**The model.** It has {layers} layers, and its stream is {d} numbers wide. The embedding of token t is (t, 0, 0,
0). Layer 0 adds 1 to every number. Layer 1 doubles every number. The token after t is t + 1.

**The requests.** "steer" came a while ago. It has a prompt of four tokens, and has generated two, so its next
position is 5. "read" has just come, with a prompt of three tokens.

```python
{programs}
```

**1. Bind.** `bind` turns each program into a `BoundProgram`, for one prompt. Site words become point numbers:
{points}. Selections become ranges of positions. The edit
becomes `Linear`: 1 · h + 2 · v, for a row h and the vector v. A request's last token is never an input, so "steer"
has positions 0 to {steer_last}, and "read" 0 to {read_last}. The vector goes to the bank under the hash of its
content.

{bound}

**2. Admit.** Each bound op becomes records, one for every point and range. `Room.place` gives a request a slot, and
room for its records and vectors. `ProgramTable.install` writes the records there. A record has 48 bytes, and its kind
says what its fields mean (`plan/table.py`). `vector` is where the vector begins in the bank.

{records}

Range {range} and regions {regions} are numbers of the capture layout. "read" keeps one capture range, at two
points. The two points form a point group, because they keep the same ranges in the same dtype. The group has a
region for each of its points. Nothing here changes until a request
comes or goes.

**3. Plan.** The step computes one token of "steer" and all three of "read", as {rows} flat rows. `make_plan`
labels the rows. A rank is a row's number among its request's rows.

{labels}

It also says where the captured rows go. "read" captures from position {begin} on, and this step has {count}
such positions. So its range keeps {count} rows, and each region is {count} × {d} numbers long. The buffer of
the step has {size} numbers.

{layout}

**4. Apply.** The model runs. At each of the two points a tap calls the op, and the kernel looks at every row:
it takes the records of the row's slot at this point, and carries out those whose range holds the row's
position. The table shows the rows on which records act in the plain kernel (`kernels/reference.py`).

{applied}

The edit changes row 0 alone, and layer 1 doubles it. The step's buffer now holds:

```text
{buffer}
```

**5. Keep.** The buffer leaves for the host as it is, as a `CaptureChunk`. A table of `CAPTURED` entries says
whose its bytes are:

{chunk}

**6. Go on.** In the next step each request computes one token: "steer" at position {second[0]}, "read" at
{second[1]}. The batch has changed, so the step is planned again, with a second chunk. The plan holds for {steady}
more steps (`steady_steps`) while the requests stay the same. `Continuity` calls these "{sameness}": nothing is
planned or uploaded, and their buffers join the chunk, which now has {steps} steps.

**7. Fetch.** `run[pc.resid_post[0]]` filters the tables for the run and the point, and gathers the rows:

{fetched}
"""


class Request(msgspec.Struct):
    """A request: its `tokens` so far, of which `prompt` were given, and how many are `computed`."""

    name: str
    tokens: list[int]
    prompt: int
    max_tokens: int
    program: Program
    text: str
    computed: int = 0
    slot: int = 0

    def bind(self, vectors: dict[str, np.ndarray]) -> BoundProgram:
        prompt = Prompt(self.tokens[: self.prompt], lambda: ("", []))
        return bind(self.program, self.name, prompt, self.max_tokens, SITES, _no_source, vectors=vectors)


def _no_source(run: str) -> None:
    raise pc.MissingSource(f"run {run} is not here")


def _requests() -> list[Request]:
    vector = [0.0, 0.0, 1.0, -1.0]
    edit = pc.Add(vector, at=pc.resid_post[0], tokens=pc.generated, scale=2.0)
    capture = pc.resid_post[0:2] @ pc.every[1:]
    return [
        Request("steer", [21, 22, 23, 24, 25, 26], 4, 8, Program.of([edit]),
                "steer = dict(prompt=[21, 22, 23, 24], max_tokens=8,\n"
                "             edits=[pc.Add([0, 0, 1, -1], at=pc.resid_post[0], tokens=pc.generated, scale=2.0)])",
                computed=5),
        Request("read", [11, 12, 13], 3, 4, Program.of((), [capture]),
                "read = dict(prompt=[11, 12, 13], max_tokens=4, capture=[pc.resid_post[0:2] @ pc.every[1:]])"),
    ]  # fmt: skip


class Worker:
    """What a worker holds between steps, and a step of it. `seen`: the rows before and after each point, in order."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.room, self.table = Room(4, 16, 64), ProgramTable(4, len(SITES.points), 16, SAMPLED)
        self.bank, self.store = Bank(64), CaptureStore(WIDTHS)
        self.continuity = Continuity(self.table)
        self.run_of_slot = np.full(5, -1, np.int64)
        self.bound: list[BoundProgram] = []
        self.addresses: dict[str, tuple[int, int]] = {}
        for request in requests:
            self._admit(request)

    def _admit(self, request: Request) -> None:
        vectors: dict[str, np.ndarray] = {}
        bound = request.bind(vectors)
        records = record_count(bound.ops)
        placement = self.room.place(records, {key: rows.shape for key, rows in vectors.items()})
        assert placement is not None
        for key, rows in vectors.items():
            begin = placement.addresses[key][0]
            self.bank.write(begin, [torch.from_numpy(rows.astype(np.float32))])
            self.addresses[key] = begin, rows.shape[1]
        request.slot = placement.slot
        self.table.install(*records_of(bound.ops, self.addresses, len(SITES.points)), placement.slot, placement.record)
        self.run_of_slot[request.slot] = self.store.open(request.name)
        self.bound.append(bound)

    def step(self) -> str:
        """One step of all requests: the prompt's tokens that are left, or one. Returns how it relates to the last."""
        counts = np.array([len(request.tokens) - request.computed for request in self.requests])
        position = np.array([request.computed for request in self.requests])
        names = [request.name for request in self.requests]
        sameness = self.continuity.judge(names, position, int(counts.sum()))
        if sameness == "changed":
            slots = np.array([request.slot for request in self.requests])
            batch = Batch(slots, np.cumsum(counts) - counts, position, counts, int(counts.sum()))
            self.continuity.start(names, batch, make_plan(batch, self.table, WIDTHS), False)
        assert self.continuity.plan is not None
        self.plan = self.continuity.plan.advanced(self.continuity.steps)
        self._forward(self.plan)
        self._keep()
        for request, count in zip(self.requests, counts.tolist(), strict=True):
            request.computed += count
            request.tokens.append(request.tokens[-1] + 1)
        return sameness

    def _forward(self, plan: StepPlan) -> None:
        """The made-up model, with the kernel at the end of each layer."""
        self.tokens = [token for request in self.requests for token in request.tokens[request.computed :]]
        h_RD = np.zeros((len(self.tokens), D), np.float32)
        h_RD[:, 0] = self.tokens
        self.buffer, self.seen = np.zeros(plan.size, np.float32), []
        for layer, point in enumerate(POINTS):
            h_RD = h_RD + 1 if layer == 0 else h_RD * 2
            before_RD = h_RD.copy()
            reference.apply(h_RD, plan.tokens, point, self.table, plan, self.bank.data.numpy(), self.buffer)
            self.seen.append((before_RD, h_RD.copy()))

    def _keep(self) -> None:
        """Gives the step's buffer to the store."""
        block = HostBlock(torch.from_numpy(self.buffer).view(torch.uint8))
        chunk = self.continuity.captured(BufferSlice(block, 0), self.run_of_slot)
        if chunk is not None:
            self.chunk = chunk
            self.store.add(chunk)


def section() -> str:
    """The section of the page."""
    worker = Worker(_requests())
    steer, read = worker.requests
    records = _records_table(worker)
    ((range_, *regions),) = _layout_numbers(worker)
    worker.step()
    plan, layout = worker.plan, worker.plan.layout
    first = dict(labels=_labels_table(worker), layout=_layout_table(plan), applied=_applied_table(worker),
                 buffer=_rows_text(worker.buffer), chunk=_chunk_table(worker))  # fmt: skip
    second = steer.computed, read.computed
    worker.step()
    steady = worker.plan.steady_steps
    sameness = worker.step()
    return TEXT.format(
        layers=LAYERS, d=D, programs=f"{steer.text}\n{read.text}", points=_points_text(),
        steer_last=steer.prompt + steer.max_tokens - 2, read_last=read.prompt + read.max_tokens - 2,
        bound=_bound_table(worker), records=records, range=range_, regions=" and ".join(map(str, regions)),
        rows=len(plan.tokens.slot), begin=int(layout.start[0]), count=int(plan.count[0]), size=plan.size, **first,
        second=second, steady=steady, sameness=sameness, steps=worker.chunk.steps,
        fetched=_fetched_table(worker, read.name),
    )  # fmt: skip


# -- tables


def _points_text() -> str:
    return " and ".join(f"`resid_post[{layer}]` is point {point}" for layer, point in enumerate(POINTS))


def _bound_table(worker: Worker) -> str:
    rows = (
        [bound.run, f"`{op.path}`", f"`{type(op.action).__name__}`",
         ", ".join(map(str, op.points)), ", ".join(f"{a} to {b - 1}" for a, b, *_ in op.ranges),
         ", ".join(f"`{key[:8]}…`" for key in op.values) or "–"]
        for bound in worker.bound for op in bound.ops
    )  # fmt: skip
    return _table(("request", "op", "action", "points", "positions", "bank key"), rows)


def _records_table(worker: Worker) -> str:
    rows, first = [], worker.table.first
    for request in worker.requests:
        for point in POINTS:
            for number in range(first[request.slot, point], first[request.slot, point + 1]):
                record = worker.table.records[number]
                kind = int(record["kind"])
                fields = named(record[None], kind)
                own = (name for name in fields.dtype.names if name not in ("start", "stop", "kind", "columns"))
                rows.append([
                    request.name, request.slot, point, number, KINDS[kind], record["start"], record["stop"],
                    ", ".join(f"{name} {_number(fields[name][0])}" for name in own),
                ])  # fmt: skip
    return _table(("request", "slot", "point", "record", "kind", "start", "stop", "its own fields"), rows)


def _layout_numbers(worker: Worker) -> Iterable[tuple[int, ...]]:
    layout = worker.table.captures.layout()
    return [(int(number), *layout.region_number.tolist()) for number in layout.range_number]


def _labels_table(worker: Worker) -> str:
    labels = worker.plan.tokens
    names = {request.slot: request.name for request in worker.requests}
    columns = zip(worker.tokens, labels.slot.tolist(), labels.position.tolist(), labels.rank.tolist(), strict=True)
    rows = (
        [row, names[slot], token, slot, position, rank] for row, (token, slot, position, rank) in enumerate(columns)
    )
    return _table(("row", "request", "token", "slot", "position", "rank"), rows)


def _layout_table(plan: StepPlan) -> str:
    rows = []
    for c, a in zip(*plan.layout.pairs(np.flatnonzero(plan.count)), strict=True):
        first = plan.base[a] + plan.offset[c] * plan.row[a]
        end = first + plan.count[c] * plan.row[a]
        rows.append([
            plan.layout.range_number[c], plan.begin[c], plan.count[c], plan.layout.region_number[a],
            plan.layout.point[a], plan.base[a], f"{first} to {end - 1}",
        ])  # fmt: skip
    return _table(("range", "begin", "count", "region", "point", "base", "numbers in the buffer"), rows)


def _applied_table(worker: Worker) -> str:
    labels, rows = worker.plan.tokens, []
    for point, (before_RD, after_RD) in zip(POINTS, worker.seen, strict=True):
        for row, (slot, position) in enumerate(zip(labels.slot.tolist(), labels.position.tolist(), strict=True)):
            acting = [
                f"{KINDS[int(record['kind'])]} (record {number})"
                for number in range(worker.table.first[slot, point], worker.table.first[slot, point + 1])
                if (record := worker.table.records[number])["start"] <= position < record["stop"]
            ]
            if acting:
                rows.append([point, row, position, _row(before_RD[row]), ", ".join(acting), _row(after_RD[row])])
    return _table(("point", "row", "position", "row before", "records that act", "row after"), rows)


def _chunk_table(worker: Worker) -> str:
    table = worker.chunk.source.table()
    names = [name for name in table.dtype.names or () if name not in ("pool", "pooled", "span")]  # of pooled rows
    rows = ([DTYPES[entry["dtype"]] if name == "dtype" else entry[name] for name in names] for entry in table)
    return _table([name.replace("_", " ") for name in names], rows)


def _fetched_table(worker: Worker, run: str) -> str:
    positions, rows = worker.store.fetch(run, POINTS[0])
    table = zip(positions.tolist(), rows.numpy(), strict=True)
    return _table(("position", "row"), ([position, _row(row)] for position, row in table))


def _rows_text(buffer: np.ndarray) -> str:
    rows = buffer.reshape(-1, D)
    return "\n".join(f"{D * i:2d}: {' '.join(f'{_number(n):>3}' for n in row)}" for i, row in enumerate(rows))


def _row(row_D: Sequence[float]) -> str:
    return f"({', '.join(map(_number, row_D))})"


def _number(number: float) -> str:
    return f"{float(number):g}"


def _table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows])


# -- the page


def with_section(page: str) -> str:
    """The page with the section made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{section()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
