"""A short storm, the same each time; `make soak` makes other ones, and what fails there is kept and run here."""

from __future__ import annotations

import pytest

from ..soak.failures import Failure, kept
from .storm import Storm, adapters_of, engine

MANY = ("runs", "taken back", "from the cache")
WANTED = {"crowded": (*MANY, "preempted", "graded by bulk"), "with adapters": (*MANY, "with an adapter", "graded by requests"),
          "few slots and records": (*MANY, "graded by bulk")}  # fmt: skip
ALWAYS = [
    Failure("storm", "crowded", 14657043, 2),
    Failure("storm", "with adapters", 2, 2),
    Failure("storm", "few slots and records", 3, 2),
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) for case in (*ALWAYS, *kept("storm"))],
    ids=str,
)
def test_whoever_comes_and_goes_beside_it_a_request_is_as_if_alone(tiny, case, tmp_path):
    """Each round has what is wanted of it, whatever the seed: so many rounds, however quick the machine."""
    with engine(tiny, case.what) as lm:
        storm = Storm(lm, case.seed, adapters_of(tiny, tmp_path) if case.what == "with adapters" else ())
        storm.run(case.rounds)
    assert all(storm.seen[name] >= case.rounds for name in WANTED.get(case.what, ("runs",))), f"{case}: {storm.seen}"
