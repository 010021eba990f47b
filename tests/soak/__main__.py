"""Random search for so many minutes: property tests on random examples, then storms on engines of every setting.

    python -m tests.soak --minutes 5 --seed 7

The seed is printed first; what fails is kept in `failures.json`, which `make test` runs, and the search ends with
status 1.  Which requests of a storm meet in one step depends on the machine: a kept storm may need several turns.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path

from .failures import Failure, keep
from .test_kept import searched


def properties(seed: int, seconds: float) -> list[Failure]:
    """The property tests, each time from another seed, until the time is over or one fails."""
    end = time.monotonic() + seconds
    while True:
        done = searched("", seed)
        tests = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
        print(f"properties, seed {seed}: {(done.stdout.splitlines() or [done.stderr])[-1]}", flush=True)
        if done.returncode != 0:
            print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
            return [Failure("hypothesis", test, seed) for test in tests or [""]]
        seed += 1
        if time.monotonic() > end:
            return []


def storms(seed: int, seconds: float) -> list[Failure]:
    """Storms of two rounds from one seed after another, an equal time for each setting."""
    from tests.engines.storm import LAYERS, SETTINGS, SHAPE, Storm, adapters_of, engine
    from tests.models import with_weights

    failures = []
    with tempfile.TemporaryDirectory() as folder:
        model = with_weights(Path(folder) / "model", "8b", LAYERS, **SHAPE)
        for setting in SETTINGS:
            adapters = adapters_of(model, Path(folder) / "adapters") if setting == "with adapters" else ()
            end, first = time.monotonic() + seconds / len(SETTINGS), seed
            with engine(model, setting) as lm:
                while first == seed or time.monotonic() < end:
                    storm = Storm(lm, seed, adapters)
                    try:
                        storm.run(rounds=2)
                    except AssertionError as error:
                        print(f"{setting}, seed {seed}: {error}", flush=True)
                        failures.append(Failure("storm", setting, seed, 2))
                        break
                    seen = {**storm.seen, "worst row": float(f"{storm.worst:.2g}")}
                    print(f"{setting}, seed {seed}: {json.dumps(seen)}", flush=True)
                    seed += 1
    return failures


def main() -> int:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)))
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    failures = properties(asked.seed, 20 * asked.minutes) + storms(asked.seed, 40 * asked.minutes)
    for failure in failures:
        keep(failure)
        print(f"kept: {failure}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
