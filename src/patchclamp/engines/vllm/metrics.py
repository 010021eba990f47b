"""Metrics beside vLLM's own at `/metrics`, in the process's prometheus_client registry.

Each front end counts its requests and results, and vLLM sums over its API processes. Resource counts are polled from
the engine cores (`held`); a program's waiting time comes with its answer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from patchclamp.errors import PatchclampError
from patchclamp.plan import CAPTURE, STORE, BoundProgram
from patchclamp.plan.bound import APPLY, BLEND, LINEAR, NOISE, PROJECT, acted_on
from patchclamp.plan.room import captured_bytes
from patchclamp.sites import SiteMap

KINDS = {CAPTURE: "capture", LINEAR: "linear", BLEND: "blend", PROJECT: "project", NOISE: "noise", APPLY: "apply",
         STORE: "store"}  # fmt: skip
SECONDS = (0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)


class Metrics:
    """The metrics of one model in this process. Use `metrics_of`: a registry accepts each name only once."""

    def __init__(self, model: str) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        own, latest = ("model_name",), "mostrecent"  # every API process polls all cores, so do not sum
        counter, gauge = functools.partial(Counter, labelnames=own), functools.partial(Gauge, labelnames=own)
        self._programs = counter("patchclamp:programs", "Requests with a program that were given to the engine.")
        self._ops = Counter("patchclamp:ops", "Ops of these programs, by what they compute.", (*own, "kind"))
        self._rows = counter("patchclamp:rows_edited", "Rows (a token at a point) that edits of ended runs acted on.")
        self._bytes = counter("patchclamp:captured_bytes", "Bytes that ended runs captured, in fp32.")
        self._refusals = Counter("patchclamp:refusals", "Requests of ours answered with a 4xx.", (*own, "error"))
        self._failures = Counter("patchclamp:failures", "Requests of ours answered with a 5xx.", (*own, "error"))
        self._admission = Histogram(
            "patchclamp:admission_seconds", "From a program's arrival in the engine core to its admission.", own,
            buckets=SECONDS,
        )  # fmt: skip
        self._waiting = gauge("patchclamp:programs_waiting", "Programs that wait for room.", multiprocess_mode=latest)
        self._admitted = gauge("patchclamp:programs_admitted", "Programs that have room.", multiprocess_mode=latest)
        self._model = model
        for each in (self._programs, self._rows, self._bytes, self._admission, self._waiting, self._admitted):
            each.labels(model)  # export 0 from the start

    def started(self, bound: BoundProgram) -> None:
        """Count a request with a program that goes to the engine."""
        self._programs.labels(self._model).inc()
        for op in bound.ops:
            self._ops.labels(self._model, KINDS[op.kind]).inc()

    def ended(self, bound: BoundProgram, ids: Sequence[int], vectors: Mapping[str, np.ndarray], sites: SiteMap) -> None:
        """Count an ended run. `ids`: prompt and generated ids; `vectors`: includes those of conditions."""
        computed = len(ids) - 1
        self._rows.labels(self._model).inc(edited_rows(bound, np.asarray(ids[:computed], np.int64), vectors))
        if size := captured_bytes(bound, sites, computed):
            self._bytes.labels(self._model).inc(size)

    def admitted(self, waited_s: float) -> None:
        """Record the time that a program waited for admission."""
        self._admission.labels(self._model).observe(waited_s)

    def failed(self, error: PatchclampError) -> None:
        """Count a request that was answered with an error."""
        counter = self._refusals if error.status < 500 else self._failures
        counter.labels(self._model, type(error).__name__).inc()

    def held(self, counts: Mapping[str, int]) -> None:
        """Set the gauges to the counts of all engine cores (`Admission.counts`)."""
        self._waiting.labels(self._model).set(counts["waiting"])
        self._admitted.labels(self._model).set(counts["programs"])


metrics_of = functools.cache(Metrics)


def edited_rows(bound: BoundProgram, ids: np.ndarray, vectors: Mapping[str, np.ndarray]) -> int:
    """Count the rows that a program's edits acted on, for these token ids."""
    edits = [op for op in bound.ops if op.is_edit]
    return sum(len(op.points) * len(acted_on(op, ids, vectors)) for op in edits)
