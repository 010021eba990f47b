"""A server: startup through vLLM's own command, limits per caller, and metrics.

The limits are in `--additional-config '{"patchclamp": {"serve": {...}}}'`. They do not affect compiled code, so they
are removed from `additional_config` before vLLM hashes it for its compile cache.

Metrics are exported with vLLM's own at `/metrics`, from the process's prometheus_client registry. Each front end counts
its requests and results, and vLLM sums over its API processes. Resource counts are polled from the engine cores
(`held`); a program's waiting time arrives with its answer.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from patchclamp.engines.vllm.compat import configuration
from patchclamp.engines.vllm.compat.configuration import KEY, MEGA
from patchclamp.errors import (
    CapacityError,
    EngineError,
    Mislabelled,
    PatchclampError,
    ProgramError,
    TooLarge,
    describe_error,
    unknown,
    unpack,
)
from patchclamp.language.dictionaries import PRECISIONS, SAEOption
from patchclamp.language.sae import SAE
from patchclamp.plan import ALL, CAPTURE, LATCH, STORE, TEST, BoundProgram
from patchclamp.plan.bound import (
    ADD_NORMED,
    APPLY,
    BLEND,
    LINEAR,
    LOW_RANK,
    NOISE,
    PROJECT,
    REMOVE,
    ROTATE,
    SPAN,
    acted_on,
)
from patchclamp.plan.room import captured_bytes
from patchclamp.sites import Dictionary, SiteMap, placed

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from patchclamp.engines.vllm.admission import Verdict
    from patchclamp.engines.vllm.monitors import Monitor

CAUSES = "PATCHCLAMP_START_CAUSES"  # a file for the errors of a server's processes
CONFIG = "--additional-config"
FIX = "set the cache's size with --kv-cache-memory-bytes, or shorten --max-model-len"
GROUPS = ("general", "platform", "io_processor", "stat_logger", "endpoint")  # of plugins, by vLLM's names
KINDS = {CAPTURE: "capture", LINEAR: "linear", BLEND: "blend", PROJECT: "project", NOISE: "noise", APPLY: "apply",
         STORE: "store", TEST: "compare", ALL: "join", LATCH: "latch", LOW_RANK: "low_rank", ADD_NORMED: "add_normed",
         ROTATE: "rotate", SPAN: "between", REMOVE: "remove_keys"}  # fmt: skip
SECONDS = (0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)
Count = Annotated[int, msgspec.Meta(ge=0)]


class ProbeLog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The score log of a server's own probes.

    path: a .jsonl or .parquet path; a number is added to each file's name; None: no log
    sample: the fraction of requests that are logged
    file_bytes, files: the maximum size of a file, and the number of files kept
    """

    path: str | None = None
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    file_bytes: Count = 1 << 28
    files: Annotated[int, msgspec.Meta(ge=1)] = 8


OF_OPERATOR = ("show_scores", "probe_log")  # settings that are not limits, hidden from callers


class ServeLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server's limits. An owner is an API key; all callers of a server without keys are one owner.

    Per request:
    body_bytes: the body on a patchclamp route
    json_bytes: a JSON body on a patchclamp route; parsed numbers take eight times the memory
    json_values: commas in a JSON body on a patchclamp route, or in a program; for more, use base64 or safetensors
    program_bytes: the body of an OpenAI request with a program
    program_body_values: commas in such a body, including its prompt
    openai_body_bytes: any body on the two OpenAI routes; None: unlimited, as in stock vLLM
    program_ops: ops of a program, including its variant
    program_captures: captures among them
    program_records: records of a bound program, one per op, point and range of positions, for every step, plus one for
        each 256 rows of a matrix beyond the first; the total over all prompts and choices (n) of a request, and over
        the active runs of a batch
    inline_bytes: captures returned in a response; larger ones are fetched

    sweep_prompts: prompts of a sweep: both of each pair, and those of its source
    sweep_grid: cells of a sweep's grid over all pairs; a zoom patches few of them
    sweep_cells: patched cells of a sweep, counted for every pair, draw, and answer token
    sweeps: concurrent sweeps of one owner

    Stored per owner:
    bank_names, named_bytes: vectors and programs, and their bytes
    kept_runs: runs
    run_bytes: captures of runs; for a sweep, the peak size of the captures that it patches from
    kept_sweeps, kept_sweep_bytes: sweeps that can be resumed, and the bytes of their values
    run_ttl_s: seconds without access after which a run or a kept sweep is dropped

    For the server's own probes:
    show_scores: add their scores to responses
    probe_log: the log of their scores
    """

    body_bytes: Count = 1 << 26
    json_bytes: Count = 1 << 23
    json_values: Count = 1 << 16
    program_bytes: Count = 1 << 24
    program_body_values: Count = 1 << 20
    openai_body_bytes: Count | None = None
    program_ops: Count = 1024
    program_captures: Count = 1024
    program_records: Count = 2048
    inline_bytes: Count = 1 << 20
    sweep_prompts: Count = 512
    sweep_grid: Count = 1_000_000
    sweep_cells: Count = 20_000
    sweeps: Count = 4
    bank_names: Count = 1024
    named_bytes: Count = 1 << 28
    kept_runs: Count = 4096
    run_bytes: Count = 1 << 32
    kept_sweeps: Count = 16
    kept_sweep_bytes: Count = 1 << 26
    run_ttl_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    show_scores: bool = True
    probe_log: ProbeLog = ProbeLog()

    def check(self, limit: str, asked: int, what: str, path: str | None = None) -> None:
        """Raise `TooLarge` if a request exceeds a limit. `what`: the start of the message, before the number."""
        most = getattr(self, limit)
        if most is not None and asked > most:
            raise TooLarge(f"{what}: expected at most {most}, got {asked} ({_larger(limit)})", path)

    def check_room(
        self, limit: str, used: int, more: int, what: str, path: str | None = None,
        fix: str = "delete what you no longer need",
    ) -> None:  # fmt: skip
        """Raise `CapacityError` if an owner's usage leaves no room for `more`."""
        most = getattr(self, limit)
        if used + more > most:
            raise CapacityError(
                f"{what}: {more} more requested, {most - used} of {most} left: {fix} ({_larger(limit)})", path
            )


def _larger(limit: str) -> str:
    return f'limit {limit}; set it with --additional-config \'{{"patchclamp": {{"serve": {{"{limit}": N}}}}}}\''


class _Additional(dict[str, Any]):
    """An `additional_config` with attributes for settings that do not affect compiled code, because vLLM hashes only
    its items. They cannot be attributes of `VllmConfig`: vLLM could not derive a submodel's configuration from it."""

    serving: ServeLimits
    monitors: tuple[Monitor, ...]
    saes: tuple[tuple[SAEOption, ...], str]
    check_rate: int


SET_APART = ("serve", "probes", "saes", "sae_precision", "check_rate")
CHECK_RATE = 1000  # by default, one in this many requests with captures is checked


def set_apart(
    vllm_config: VllmConfig, limits: ServeLimits, monitors: tuple[Monitor, ...],
    saes: tuple[tuple[SAEOption, ...], str], check_rate: int,
) -> dict[str, Any]:  # fmt: skip
    """Move a server's limits, always-on probes, SAEs and the self-check rate out of patchclamp's section of
    `additional_config`, and return the section. `serving`, `monitors_of_config`, `loaded_saes` and `check_rate_of` read
    the moved settings. The original engine arguments are not modified."""
    extra: Any = vllm_config.additional_config
    ours = {part: value for part, value in extra[KEY].items() if part not in SET_APART}
    extra = vllm_config.additional_config = _Additional({**extra, KEY: ours})
    extra.serving, extra.monitors, extra.saes, extra.check_rate = limits, monitors, saes, check_rate
    return ours


def checked_rate(given: Any, unchecked: str) -> int:
    """Read the engine option `check_rate`: 0 for no checks, None for the default. `unchecked`: the reason why this
    model's `embed` cannot be checked; "" if it can. Raises `ProgramError`, or `EngineError` for such a model."""
    if given is None:
        return 0 if unchecked else CHECK_RATE
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise ProgramError(f"expected a non-negative integer, got {given!r:.200}", "check_rate")
    if given and unchecked:
        raise EngineError(f"captures of this model cannot be checked: {unchecked}; use check_rate=0", "check_rate")
    return given


def check_rate_of(vllm_config: VllmConfig) -> int:
    """Return the rate N of self-checks: one in N requests with captures is checked; 0: none."""
    extra: Any = vllm_config.additional_config
    return extra.check_rate


def saes_of(given: Any, precision: Any) -> tuple[tuple[SAEOption, ...], str]:
    """Read the engine options `saes` and `sae_precision`. Raises `ProgramError` or `UnknownName`."""
    if precision not in PRECISIONS:
        raise unknown("precision", str(precision), PRECISIONS, "sae_precision")
    if not isinstance(given, (list, tuple)):
        raise ProgramError(f"expected a list of NAME=PATH@SITE, got {given!r:.200}", "saes")
    saes: list[SAEOption] = []
    for i, words in enumerate(given):
        try:
            saes.append(SAEOption.of(str(words)))
        except PatchclampError as error:
            raise error.under(f"saes[{i}]") from None
        if saes[-1].name in [other.name for other in saes[:-1]]:
            raise ProgramError(f"duplicate SAE name {saes[-1].name!r}", f"saes[{i}]")
    return tuple(saes), precision


def loaded_saes(vllm_config: VllmConfig, sites: SiteMap) -> Iterator[tuple[SAE, Dictionary, str]]:
    """Load the SAEs that an engine attaches at startup, each with its site and precision."""
    saes: tuple[SAEOption, ...]
    saes, precision = getattr(vllm_config.additional_config, "saes", ((), ""))
    for i, (name, path, site) in enumerate(saes):
        try:
            sae = SAE.load(path)
            dtype = configuration.model_facts(vllm_config)["dtype"] if precision == "model" else "float32"
            yield sae, placed(sae, sites, name, site or None, dtype=dtype), precision
        except PatchclampError as error:
            raise error.under(f"saes[{i}]") from None


def serving(vllm_config: VllmConfig) -> ServeLimits:
    """Return the server limits in a configuration with patchclamp."""
    extra: Any = vllm_config.additional_config
    return extra.serving


# -- metrics


class Metrics:
    """The metrics of one model in this process. Use `metrics_of`: a registry accepts each name only once."""

    def __init__(self, model: str) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        own, latest = ("model_name",), "mostrecent"  # every API process polls all cores, so do not sum
        counter, gauge = functools.partial(Counter, labelnames=own), functools.partial(Gauge, labelnames=own)
        self._programs = counter("patchclamp:programs", "Programs submitted to the engine, in requests or in batches.")
        self._ops = Counter("patchclamp:ops", "Ops of these programs, by kind.", (*own, "kind"))
        self._rows = counter("patchclamp:rows_edited", "Rows (a token at a point) edited by finished runs.")
        self._bytes = counter("patchclamp:captured_bytes", "Bytes captured by finished runs, in fp32.")
        self._refusals = Counter("patchclamp:refusals", "patchclamp requests answered with a 4xx.", (*own, "error"))
        self._failures = Counter("patchclamp:failures", "patchclamp requests answered with a 5xx.", (*own, "error"))
        self._checks = Counter("patchclamp:self_checks", "Runs with checked labels, by result.", (*own, "result"))
        self._admission = Histogram(
            "patchclamp:admission_seconds", "From arrival in the engine core to admission, in seconds.", own,
            buckets=SECONDS,
        )  # fmt: skip
        self._waiting = gauge("patchclamp:programs_waiting", "Programs waiting for room.", multiprocess_mode=latest)
        self._admitted = gauge("patchclamp:programs_admitted", "Programs admitted.", multiprocess_mode=latest)
        self._model = model
        for each in (self._programs, self._rows, self._bytes, self._admission, self._waiting, self._admitted):
            each.labels(model)  # export 0 from the start
        for result in ("passed", "failed"):
            self._checks.labels(model, result)

    def started(self, bound: BoundProgram) -> None:
        """Count a request with a program that is sent to the engine."""
        self._programs.labels(self._model).inc()
        for op in bound.ops:
            self._ops.labels(self._model, KINDS[op.kind]).inc()

    def graded(self, programs: int) -> None:
        """Count programs graded in batches, which no other metric includes."""
        self._programs.labels(self._model).inc(programs)

    def ended(self, bound: BoundProgram, ids: Sequence[int], vectors: Mapping[str, np.ndarray], sites: SiteMap) -> None:
        """Count an ended run. `ids`: prompt and generated ids; `vectors`: must include those of conditions."""
        computed = len(ids) - 1
        self._rows.labels(self._model).inc(edited_rows(bound, np.asarray(ids[:computed], np.int64), vectors))
        if size := captured_bytes(bound, sites, computed):
            self._bytes.labels(self._model).inc(size)

    def settled(self, verdict: Verdict) -> None:
        """Count a self-check, and record the time that a program waited for admission."""
        if verdict.waited_s is not None:
            self._admission.labels(self._model).observe(verdict.waited_s)
        if verdict.checked:
            failed = verdict.error is not None and isinstance(unpack(verdict.error), Mislabelled)
            self._checks.labels(self._model, "failed" if failed else "passed").inc()

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
    """Count the rows that a program's edits act on for these token ids, as if all conditions were met."""
    edits = [op for op in bound.ops if op.is_edit]
    return sum(len(op.points) * len(acted_on(op, ids, vectors)) for op in edits)


# -- the start


def run_server(model: str, options: Sequence[str]) -> None:
    """Run `vllm serve MODEL OPTIONS` in this process, with patchclamp in the engine and its routes in the API servers.

    Raises `EngineError` for vLLM's Rust front end, which has fixed routes, and if the server stops with an error.
    Raises `ProgramError` for an `--additional-config` that is not a JSON object.
    """
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise EngineError(
            "vLLM's Rust front end does not support patchclamp's routes: unset VLLM_USE_RUST_FRONTEND; with it, "
            "programs need vllm_xargs and a server started by `vllm serve --additional-config '{\"patchclamp\": {}}'`"
        )
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's own command does
    os.environ.update(environment())
    # not vLLM's `main`: it looks up the version of the package "vllm", and the CPU build has another name
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="patchclamp")
    [command] = cmd_init()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    sys.argv = [
        "patchclamp",
        "serve",
        model,
        *with_config(options),
        *_cache_size(options),
    ]  # vLLM's parser also reads sys.argv
    args = parser.parse_args(sys.argv[1:])
    assert args is not None
    configure_logging_from_args(args)
    command.validate(args)
    with tempfile.NamedTemporaryFile("r", prefix="patchclamp-start-") as causes:
        os.environ[CAUSES] = causes.name
        try:
            command.cmd(args)
        except PatchclampError:
            raise
        except Exception as error:
            cause = causes.readline().strip() or describe_error(error)
            fix = FIX if "memory" in cause.lower() or "cache" in cause.lower() else "see the traceback in the log above"
            raise EngineError(f"the server stopped: {cause} ({fix})") from error


def _cache_size(options: Sequence[str]) -> list[str]:
    """Return the option that limits the cache to a CPU's free memory; empty on a GPU, or if a size is given."""
    names = [word.partition("=")[0].lstrip("-").replace("-", "_") for word in options]
    if "config" in names:  # the file may set it
        return []
    arguments = dict.fromkeys(names)
    configuration.spare_memory(arguments)
    size = arguments.get("kv_cache_memory_bytes")
    return ["--kv-cache-memory-bytes", str(size)] if size is not None else []


def environment() -> dict[str, str]:
    """Return a server's environment variables. `VLLM_PLUGINS` adds patchclamp to the plugins that vLLM would load."""
    import torch

    named = os.environ.get("VLLM_PLUGINS")
    if named is None:
        installed = [point.name for kind in GROUPS for point in entry_points(group=f"vllm.{kind}_plugins")]
        # vLLM loads endpoint plugins only if they are named; name no others
        others = {point.name for point in entry_points(group="vllm.endpoint_plugins")}
        names = [name for name in dict.fromkeys(installed) if name not in others]
    else:
        names = [name for name in named.split(",") if name]
    variables = {"VLLM_PLUGINS": ",".join(dict.fromkeys([*names, KEY])), MEGA: "0"}
    if not torch.cuda.is_available():
        variables["VLLM_USE_AOT_COMPILE"] = os.environ.get("VLLM_USE_AOT_COMPILE", "0")
    return variables


def with_config(options: Sequence[str]) -> list[str]:
    """Move patchclamp's CLI options (`OWN`) into `--additional-config`; return the options for vLLM."""
    rest, config = [], {}
    own: dict[str, list[str]] = {name: [] for name in OWN}
    words = iter(options)
    for word in words:
        name, _, value = word.partition("=")
        name = name.replace("_", "-")
        if name in OWN:
            own[name].append("" if name == "--hide-scores" else value or next(words, ""))
            continue
        if name != CONFIG:
            rest.append(word)
            continue
        text = value or next(words, "")
        try:
            config = json.loads(text)
        except ValueError as error:
            raise ProgramError(f"expected JSON: {error}", CONFIG) from None
        if not isinstance(config, dict):
            raise ProgramError(f"expected an object, got {text}", CONFIG)
    return [*rest, CONFIG, json.dumps({**config, KEY: _with_own(config.get(KEY) or {}, own)})]


OF_PROBES = ("--probe", "--probe-log", "--probe-log-sample", "--hide-scores")
OWN = (*OF_PROBES, "--sae", "--sae-precision", "--patchclamp-check-rate")


def _with_own(ours: Any, own: Mapping[str, list[str]]) -> Any:
    """Merge patchclamp's CLI options into its section of `additional_config`."""
    if not any(own.values()) or not isinstance(ours, dict):
        return ours
    if own["--sae"]:
        ours = {**ours, "saes": [*ours.get("saes", ()), *own["--sae"]]}
    if own["--sae-precision"]:
        ours = {**ours, "sae_precision": own["--sae-precision"][-1]}
    if own["--patchclamp-check-rate"]:
        text = own["--patchclamp-check-rate"][-1]
        if not text.isdecimal():
            raise ProgramError(f"expected a non-negative integer, got {text!r}", "--patchclamp-check-rate")
        ours = {**ours, "check_rate": int(text)}
    probes, serve = [*ours.get("probes", ()), *own["--probe"]], dict(ours.get("serve") or {})
    of_probes = [name for name in OF_PROBES if own[name]]
    if not of_probes:
        return ours
    if not probes:
        raise ProgramError("requires --probe NAME=FILE@SITE", of_probes[0])
    log = dict(serve.get("probe_log") or {})
    if own["--probe-log"]:
        log["path"] = os.path.abspath(own["--probe-log"][-1])
    if own["--probe-log-sample"]:
        try:
            log["sample"] = float(own["--probe-log-sample"][-1])
        except ValueError:
            raise ProgramError(
                f"expected a number, got {own['--probe-log-sample'][-1]!r}", "--probe-log-sample"
            ) from None
    serve |= ({"probe_log": log} if log else {}) | ({"show_scores": False} if own["--hide-scores"] else {})
    return {**ours, "probes": probes, **({"serve": serve} if serve else {})}
