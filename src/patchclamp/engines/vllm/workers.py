"""What the front end asks of an engine's workers, between steps: what they captured, and how they are."""

from __future__ import annotations

from typing import Any, TypeVar

from patchclamp.engines.base import Captured
from patchclamp.engines.vllm.compat.core import notice_death
from patchclamp.errors import unpack

Shard = TypeVar("Shard")  # what one worker has of some rows


class Workers:
    """An engine's workers, asked on its thread; all at once, in one call each time."""

    def __init__(self, engine: Any, remote: bool) -> None:
        self._engine = engine
        notice_death(engine)
        self.all("started", remote)

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

    def status(self, verb: str = "status") -> dict[str, Any]:
        """The workers' counts, as those of one."""
        statuses = self.all(verb)
        summed: dict[str, Any] = {
            name: sum(status[name] for status in statuses) for name in ("captured_bytes", "failures")
        }
        if "active_graphs" in statuses[0]:
            summed["active_graphs"] = min(status["active_graphs"] for status in statuses)
            problems = [status["active_graphs_problem"] for status in statuses if status["active_graphs_problem"]]
            summed["active_graphs_problem"] = problems[0] if problems else ""
        return {**statuses[0], **summed, "workers": len(statuses)}


def join_captured(answers: list[dict[int, Captured]], count: int) -> list[Captured]:
    """What the workers have, in order of their ranks, of each of `count` that were wanted: shards are put together."""
    import torch

    shards: list[list[Captured]] = [[] for _ in range(count)]
    for answer in answers:
        for i, captured in answer.items():
            shards[i].append(captured)
    kept = [with_rows(some, [len(positions) for positions, _ in some]) for some in shards]
    return [
        some[0] if len(some) == 1 else (some[0][0], torch.cat([torch.as_tensor(rows) for _, rows in some], 1))
        for some in kept
    ]


def with_rows(shards: list[Shard], counts: list[int]) -> list[Shard]:
    """Those of some workers' shards that have rows: what was projected is with the one that has all columns. If none
    has any, the first."""
    return [shard for shard, count in zip(shards, counts, strict=True) if count] or shards[:1]
