"""What the front end asks of an engine's workers: all of them carry programs out, one alone keeps what is captured."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from patchclamp.errors import unpack
from patchclamp.plan import BoundProgram
from patchclamp.plan.bound import source_of


class Workers:
    """An engine's workers, asked between its steps, on its thread; all at once, in one call each time."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._failures = 0
        # by run: keys of its rows and points where they are read, that every worker has there that needs them
        self._spread: dict[str, set[tuple[str, int]]] = {}
        self.count = len(self.all("started"))

    def all(self, verb: str, *args: Any) -> list[Any]:
        """Every worker's result; raises the first error."""
        answers = self._engine.collective_rpc("patchclamp_rpc", args=(verb, *args))
        errors = [error for _, error in answers if error is not None]
        if errors:
            raise unpack(errors[0])
        return [result for result, _ in answers]

    def one(self, verb: str, *args: Any) -> Any:
        """The first worker's result that is one."""
        return next((result for result in self.all(verb, *args) if result is not None), None)

    @property
    def salt(self) -> str:
        """How many runs have failed in the workers: blocks of the prefix cache are shared between two such."""
        return str(self._failures)

    def status(self, verb: str = "status") -> dict[str, Any]:
        """The workers' counts, as those of one."""
        found = self.all(verb)
        summed: dict[str, Any] = {
            name: sum(worker[name] for worker in found) for name in ("captured_bytes", "remote_rows", "failures")
        }
        if "active_graphs" in found[0]:
            summed["active_graphs"] = min(worker["active_graphs"] for worker in found)
            problems = [worker["active_graphs_problem"] for worker in found if worker["active_graphs_problem"]]
            summed["active_graphs_problem"] = problems[0] if problems else ""
        return {**found[0], **summed, "workers": len(found)}

    def admit(self, programs: list[BoundProgram]) -> tuple[int, Any]:
        """Seats programs on every worker, in order, until one of them has no room; how many, and what stands against
        the next."""
        if self.count > 1:
            self._share_rows(programs)
        answers = self.all("admit", [msgspec.msgpack.encode(bound) for bound in programs])
        seated = min(count for count, _ in answers)
        more = [bound.run for bound in programs[seated : max(count for count, _ in answers)]]
        if more:
            self.all("evict", more)
        return seated, next((refusal for count, refusal in answers if count == seated and refusal is not None), None)

    def _share_rows(self, programs: list[BoundProgram]) -> None:
        """Brings the rows of other runs that programs read to the workers that read them: one alone captured them."""
        read = dict.fromkeys(pair for bound in programs for op in bound.ops for pair in op.reads())
        runs = {pair: source[0] for pair in read if (source := source_of(pair[0])) is not None}
        new = {pair: run for pair, run in runs.items() if pair not in self._spread.get(run, ())}
        gone = set()
        for key in dict.fromkeys(itertools.chain(*self.all("missing_rows", list(new)))) if new else ():
            rows = self.one("rows", key)
            if rows is None:  # nobody has them: seating the program says so
                gone.add(key)
            else:
                self.all("add_remote_rows", rows, [point for name, point in new if name == key])
        for pair, run in new.items():
            if pair[0] not in gone:
                self._spread.setdefault(run, set()).add(pair)

    def finish(self, runs: list[str], vectors: list[str], aborted: bool = False) -> dict[str, Any]:
        """Ends runs on every worker; the errors of those that failed on any."""
        answers = self.all("finish", runs, vectors, aborted)
        self._failures = sum(failures for _, failures in answers)
        return {run: error for errors, _ in answers for run, error in errors.items()}

    def release(self, runs: list[str]) -> None:
        """Lets runs' captures go, everywhere."""
        for run in runs:
            self._spread.pop(run, None)
        self.all("release", runs)
