"""Programs in requests to vLLM's completion routes: from the request's `patchclamp` object to the response's.

A `ProgramCall` reads the object. `edited` replaces vLLM's `generate`: it binds the program to each prompt, runs it, and
adds the runs to the call. `ProgramCall.answer` describes them in the response. Variants are stored programs, served to
their owner as the model `MODEL:NAME`, or mixed as `MODEL:0.3 calm + 0.2 honest` (`Program.parse`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import functools
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import msgspec
import numpy as np

from patchclamp.engines.base import Answer, Part, Request
from patchclamp.engines.tokenizer import Chat, prompt_of
from patchclamp.engines.vllm.compat import images
from patchclamp.engines.vllm.compat.clients import http_error
from patchclamp.engines.vllm.frontend import drafts_of
from patchclamp.engines.vllm.server import ServeLimits
from patchclamp.errors import MissingSource, PatchclampError, ProgramError, RunError, UnsupportedSite, unknown
from patchclamp.language import Program, Readout, SiteOp, Use
from patchclamp.language.conditions import ProbeCondition, comparisons
from patchclamp.language.ops import FUZZ_NAMES, Capture, Features, Lens, check_words, fuzz, is_ours
from patchclamp.language.program import condition_from_dict, from_dict, parse_json, to_dict
from patchclamp.language.site import DERIVED
from patchclamp.plan.bind import Binding, is_positional
from patchclamp.plan.bound import BoundProgram, of_sample, position_ranges
from patchclamp.plan.room import captured_bytes
from patchclamp.plan.table import record_work
from patchclamp.run import FeaturesResult, LensResult, Run, joined
from patchclamp.serve import monitoring
from patchclamp.serve.capture_files import captured_file, finite
from patchclamp.serve.kept import NAME, KeptObjects, check_name
from patchclamp.serve.server_state import OPEN, Front, front_of, log
from patchclamp.stream import RunWatch


class Variant(msgspec.Struct, frozen=True):
    """A requested model that combines a base model with a stored program, or with a mix of stored programs.

    asked: the model as named in the request
    model: the base model
    name: the name of the program, or the text of the mix
    uses: the mix, as a program of `Use` ops
    """

    asked: str
    model: str
    name: str
    program: Program
    uses: Program

    def said_of(self, error: PatchclampError) -> PatchclampError:
        """Return the error with a note that, in its path, the variant's edits precede the request's."""
        count = len(self.program.edits)
        edits = f"first {count} edits come" if count > 1 else "first edit comes"
        return type(error)(f"{error.message} (the {edits} from the model {self.asked})", error.path)


async def split_variant(asked: Any, models: Any) -> tuple[str, str] | None:
    """Split `MODEL:NAME` or `MODEL:MIX` into the base model and the rest; None for a vLLM model or an unknown base
    model. `models`: vLLM's `OpenAIServingModels`."""
    if not isinstance(asked, str) or ":" not in asked:
        return None
    known = {card.id for card in (await models.show_available_models()).data}
    bases = [model for model in known if asked.startswith(f"{model}:")]
    model = max(bases, key=len, default=None)
    return None if asked in known or model is None else (model, asked[len(model) + 1 :])


async def variant_of(asked: Any, models: Any, kept: KeptObjects, owner: str) -> Variant | None:
    """Return the variant that a request's `model` names, if any. Raises `MissingSource` if the owner has no such
    program, and `ProgramError` for a malformed mix."""
    if (words := await split_variant(asked, models)) is None:
        return None
    try:
        if NAME.fullmatch(words[1]):
            return Variant(asked, *words, kept.entry(owner, "program", words[1]), Program((Use(words[1]),)))
        mix = Program.parse(words[1])
        for use in mix.edits:
            assert isinstance(use, Use)
            kept.entry(owner, "program", use.name)
        return Variant(asked, *words, mix, mix)
    except MissingSource as error:
        raise MissingSource(f"the model {asked!r} does not exist: {error.message}", "model") from None
    except PatchclampError as error:
        raise error.under("model") from None


def with_variants(cards: list[dict[str, Any]], kept: KeptObjects, owner: str) -> list[dict[str, Any]]:
    """Return vLLM's model cards, followed by a card for each variant of the first model."""
    first = cards[0]
    return cards + [
        {**first, "id": f"{first['id']}:{name}", "root": first["id"], "parent": first["id"], "owned_by": "patchclamp"}
        for name in kept.entries(owner, "program")
    ]


RECORDS = "(op, layer, range of positions) triples of the program"
QUICK_WORK = 1 << 12  # ops × tokens that are bound within milliseconds
WORK_OF_OP, WORK_OF_TEXT = 64, 16  # fixed work per op; work per token for an op that reads the prompt's text
# few, because each competes with the event loop for the GIL; two, so that a long job does not block the others
_binders = ThreadPoolExecutor(2, "patchclamp bind")
LENS_TOKEN_BYTES = 16  # an id, a log-probability and a text
FLAGS = ("keep", "compare", "tokens")
FIELDS = ("edits", "capture", "stop_when", "run", *FLAGS)


class ProgramCall:
    """A request's `patchclamp` object.

    program: its edits and captures; the variant's edits come first
    condition: the condition that ends its runs (`stop_when`), or None; its probes are in the program
    owner: the owner of the request
    name: the name to store its runs under, if given; otherwise each run gets a unique name
    keep: store the captures for later requests
    compare: also return the unedited answer
    tokens: return the tokens as texts, and the positions where each edit acted
    variant: the stored program or mix that the request's model names, or None
    chat: the messages and template options of a chat prompt
    runs: the (name, run) of each choice, by index
    parts: by choice, the output parts whose readouts the stream's next chunk will contain
    error: the error that ended the call, or None
    records: counts the program's records over all prompts
    bindings: the program bound to each distinct prompt
    on_own_route: True on patchclamp's routes, whose responses can carry every result
    """

    owner: str
    variant: Variant | None
    on_own_route: bool
    keep: bool
    compare: bool
    records: Records
    bindings: dict[Hashable, Binding]

    is_long = False  # True if the body is too long to hash its vectors on the event loop

    def __init__(
        self, data: Any, owner: str, extra: dict[str, Any], kept: KeptObjects, variant: Variant | None = None,
        on_own_route: bool = True,
    ) -> None:  # fmt: skip
        if not isinstance(data, dict):
            raise ProgramError(f"expected an object with {', '.join(FIELDS)}, got {type(data).__name__}", "patchclamp")
        for field in data:
            if field not in FIELDS:
                raise unknown("field", str(field), FIELDS, f"patchclamp.{field}")
        try:
            parts = {part: data[part] for part in ("edits", "capture") if part in data}
            ops = sum(len(part) for part in parts.values() if isinstance(part, list))
            kept.limits.check("program_ops", ops, "ops of the program", "edits")
            program = from_dict(parts)
            for field in FLAGS:
                if not isinstance(data.get(field, False), bool):
                    raise ProgramError(f"expected true or false, got {data[field]!r}", field)
            stop = data.get("stop_when")
            self.condition: ProbeCondition | None = None if stop is None else condition_from_dict(stop, "stop_when")
            compared = 0 if self.condition is None else len(comparisons(self.condition))
            kept.limits.check("program_ops", compared, "comparisons", "stop_when")
            self.name: str | None = check_name(data["run"], "run") if data.get("run") is not None else None
        except PatchclampError as error:
            raise error.under("patchclamp") from None
        check_words(extra)
        try:
            fuzzed = fuzz({name: extra[name] for name in FUZZ_NAMES if name in extra})
        except PatchclampError as error:
            raise error.under("vllm_xargs") from None
        edits = () if variant is None else variant.program.edits
        whole = msgspec.structs.replace(program, edits=edits + program.edits + fuzzed)
        try:
            self.program: Program = whole.stopped_by(self.condition, kept.always_on, "stop_when")
        except PatchclampError as error:
            raise error.under("patchclamp") from None
        every = [op for _, op in self.program.ops]
        for path, op in self.program.ops:
            if isinstance(op, Capture) and op.at.name in DERIVED:
                raise UnsupportedSite(f"{op.at} is not supported in files of captures: use pc.LM(url)", path)
        captures = sum(isinstance(op, Readout) for op in every)
        kept.limits.check("program_ops", len(every), "ops of the program", "edits")
        kept.limits.check("program_captures", captures, "captures of the program", "capture")
        if self.name is not None:
            kept.check_free(owner, self.name, "run")
        self.owner, self.variant, self.on_own_route, self._limits = owner, variant, on_own_route, kept.limits
        self.keep, self.compare = bool(data.get("keep", self.name is not None)), bool(data.get("compare", False))
        self.tokens: bool = bool(data.get("tokens", False))
        self.chat: Chat | None = None
        self.runs: dict[int, tuple[str, Run]] = {}
        self.parts: dict[int, list[Part]] = {}
        self.error: PatchclampError | None = None
        self.began = 0  # runs
        self.monitored: monitoring.MonitoredCall | None = monitoring.current.get()
        self.records, self.bindings = Records(kept.limits), dict[Hashable, Binding]()
        self._work, self._unbound = 0, list[Callable[[], Binding]]()
        self._binding: asyncio.Future[list[Binding]] | None = None
        self._prompts, self._began_s = 0, time.perf_counter()

    @functools.cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the program."""
        return self.program.fingerprint

    def next_prompt(self) -> int:
        """Return the index of the next prompt of vLLM's route, and count it."""
        self._prompts += 1
        return self._prompts - 1

    def is_quick(self, tokens: int) -> bool:
        """True if binding the program to all prompts so far, and to one of `tokens` tokens, takes only milliseconds."""
        ops = [op for _, op in self.program.ops]
        if any(isinstance(op, Use) for op in ops):  # a stored program has up to 10,000 edits
            return False
        reads = sum(isinstance(op, SiteOp) and not is_positional(op.tokens) for op in ops)
        self._work += len(ops) * WORK_OF_OP + (len(ops) + reads * WORK_OF_TEXT) * tokens
        return not self.is_long and self._work <= QUICK_WORK

    @contextlib.contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Record an error raised inside the context as the one that ended the call."""
        try:
            yield
        except PatchclampError as error:
            self.error = error
            raise

    def bind_later(self, job: Callable[[], Binding]) -> int:
        """Queue a job for `bound` and return the index of its binding."""
        assert self._binding is None
        self._unbound.append(job)
        return len(self._unbound) - 1

    async def bound(self) -> list[Binding]:
        """Run the queued jobs once, off the event loop's thread, and return their bindings to every caller. Raises any
        binding error before a queued run starts."""
        if self._binding is None:
            if not self._unbound:
                return []
            jobs, self._unbound = self._unbound, []  # a job refers to this call: avoid a cycle
            self._binding = asyncio.get_running_loop().run_in_executor(_binders, lambda: [job() for job in jobs])
            self._binding.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(self._binding)
        except PatchclampError as error:
            self.error = error
            raise
        except asyncio.CancelledError:
            self.records.stop()
            raise

    def add(self, choice: int, run: Run, request: Request, kept: KeptObjects) -> None:
        """Add a choice's run to the call, and store the run if it has captures."""
        name = run.key if self.name is None else self.name if choice == 0 else f"{self.name}.{choice}"
        self.runs[choice] = name, run
        if run.has_captures:
            kept.keep(self.owner, name, run, request)

    @property
    def is_complete(self) -> bool:
        """True once every run has ended, none with an error."""
        return self.error is None and len(self.runs) == self.began

    async def answer(self, kept: KeptObjects, most: int | None = None) -> dict[str, Any]:
        """Return the response's `patchclamp` object. Frees inline captures that are not kept. `most`: the limit on
        base64 characters of inline captures per run, or None."""
        answer: dict[str, Any] = {
            "fingerprint": await asyncio.to_thread(lambda: self.fingerprint),
            "runs": [await self._run_answer(choice, *self.runs[choice], most) for choice in sorted(self.runs)],
        }
        if self.variant is not None:
            uses = to_dict(self.variant.uses)["edits"]
            answer["variant"] = {"name": self.variant.name, "edits": len(self.variant.program.edits), "program": uses}
        for choice, told in zip(sorted(self.runs), answer["runs"], strict=True):
            _, run = self.runs[choice]
            if not run.has_captures:
                run.close()  # frees the rows that lenses and features have read
            elif not self.keep and told["captures"] is not None:
                kept.let_go(self.owner, *self.runs[choice])
        return answer

    def facts(self) -> dict[str, Any]:
        """Return the fields of the call's log line."""
        runs = [run for _, run in self.runs.values()]
        return {
            "fingerprint": self.fingerprint, "runs": len(runs),
            "ops": len(self.program.edits) + len(self.program.capture),
            "prompt_tokens": sum(len(run.prompt_token_ids) for run in runs),
            "generated_tokens": sum(len(run.token_ids) for run in runs),
            "captured_bytes": sum(run.captured_bytes for run in runs),
            "took_s": round(time.perf_counter() - self._began_s, 6),
        }  # fmt: skip

    def leave(self, kept: KeptObjects) -> None:
        """Free runs that are not kept, after the client disconnected or got an error instead of the answer."""
        for name, run in self.runs.values():
            if not run.has_captures:
                run.close()
            elif not self.keep:
                kept.let_go(self.owner, name, run)

    async def _run_answer(self, choice: int, name: str, run: Run, most: int | None) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "index": choice,
            "run": name,
            "idle_edits": await asyncio.to_thread(lambda: run.idle_edits),
        }
        if self.tokens:
            answer["tokens"] = run.token_strings
            answer["acted"] = {
                path: [(each.start, each.stop) for each in position_ranges(np.array(positions, np.int64), None)]
                for path, positions in (await asyncio.to_thread(lambda: run.acted)).items()
            }
        limit = self._limits.inline_bytes
        if run.probes:
            fits = sum(4 * math.prod(run.probe_layout(name)[2]) for name in run.probes) <= limit
            answer["probes"] = await asyncio.to_thread(probe_answers, run) if fits else None
        if run.lens:
            answer["lens"] = await asyncio.to_thread(lambda: lens_answers(run.lens))
        if run.features:
            answer["features"] = await asyncio.to_thread(lambda: feature_answers(run.features))
        if run.has_captures:
            if not self.on_own_route:
                self._limits.check("inline_bytes", run.captured_bytes, "captured bytes in a response of this route")
            file = None
            if run.captured_bytes <= limit:
                file = base64.b64encode(await asyncio.to_thread(captured_file, run)).decode()
                file = file if most is None or len(file) <= most else None
            answer["captures"] = file
            answer["captures_url"] = f"/v1/patchclamp/runs/{name}/captures" if self.keep or file is None else None
        return answer


def lens_bytes(program: Program, bound: BoundProgram) -> int:
    """Estimate the size of a program's lens and SAE results, in bytes."""
    tops = {path: op.top for path, op in program.ops if isinstance(op, Lens)}
    tops |= {path: op.top or len(op.ids or ()) for path, op in program.ops if isinstance(op, Features)}
    return sum(
        LENS_TOKEN_BYTES * tops[op.path] * len(op.points) * sum(stop - start for start, stop, *_ in op.ranges)
        for op in bound.ops if op.path in tops
    )  # fmt: skip


def probe_answers(run: Run) -> dict[str, Any]:
    """Return a run's probe results as JSON; null for non-finite values, and for a pooled result over no tokens."""
    answers, probes = dict[str, Any](), run.program.probes
    for name in run.probes:
        _, positions, _ = run.probe_layout(name)
        is_empty = not len(positions) and probes[name].pool is not None
        scores = None if is_empty else finite(run.probes[name].tolist())
        answers[name] = {"positions": positions.tolist(), "scores": scores}
    return answers


def lens_answers(lenses: Mapping[Any, LensResult]) -> dict[str, Any]:
    """Return the results of lenses as JSON, by site."""
    return {
        str(site): {"positions": read.positions, "ids": read.ids.tolist(), "tokens": read.tokens,
                    "logprobs": finite(read.logprobs.tolist())}
        for site, read in lenses.items()
    }  # fmt: skip


def feature_answers(features: Mapping[str, FeaturesResult]) -> dict[str, Any]:
    """Return the results of SAE features as JSON, by SAE name."""
    return {
        name: {"positions": read.positions, "ids": read.ids.tolist(), "values": finite(read.values.tolist())}
        for name, read in features.items()
    }  # fmt: skip


def readouts_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the readouts of consecutive parts as JSON, like `probe_answers`, `lens_answers` and `feature_answers`."""
    scored = {name: [part.scores[name] for part in parts] for name in parts[0].scores}
    probes = {
        name: {"positions": [at for each in every for at in each.positions],
               "scores": finite(np.concatenate([each.scores for each in every], -2).tolist())}
        for name, every in scored.items()
    }  # fmt: skip
    lenses = {site: joined([part.lens[site] for part in parts]) for site in parts[0].lens}
    features = {name: joined([part.features[name] for part in parts]) for name in parts[0].features}
    found = {"probes": probes, "lens": lens_answers(lenses), "features": feature_answers(features)}
    return {name: read for name, read in found.items() if read}


def in_request(error: PatchclampError) -> PatchclampError:
    """Return the same error with its path in the HTTP request: `edits[0].at` becomes `patchclamp.edits[0].at`."""
    first = (error.path or "").partition(".")[0].partition("[")[0]
    return error.under("patchclamp") if first in FIELDS else error


current: ContextVar[ProgramCall | None] = ContextVar("patchclamp call", default=None)


class Records:
    """Counts a request's records while its program is bound: the sum over all prompts and their `n` runs."""

    def __init__(self, limits: ServeLimits) -> None:
        self._limits, self._total, self._prompts, self._stopped = limits, 0, 0, False

    def of_prompt(self, n: int) -> Callable[[int], None]:
        """Return a counter for the records of another prompt with `n` runs. The counter raises `TooLarge`."""
        self._prompts += 1
        prompts = f"{self._prompts} prompt{'s' if self._prompts > 1 else ''}"

        def count(records: int) -> None:
            if self._stopped:
                raise RunError("the client disconnected while its program was bound")
            self._total += n * records
            self._limits.check("program_records", self._total, f"{RECORDS}, for {prompts} with n={n} together")

        return count

    def stop(self) -> None:
        """Abort binding, because the client disconnected."""
        self._stopped = True


def of_extra_args(
    extra: dict[str, Any], owner: str, kept: KeptObjects, variant: Variant | None = None, on_own_route: bool = False
) -> ProgramCall:
    """Parse the call in a request's `extra_args` (`vllm_xargs`): a JSON string under `patchclamp`, and fuzzing
    options."""
    data = extra.get("patchclamp", {})
    if isinstance(data, str):
        kept.limits.check("json_values", data.count(","), "values of a program", "vllm_xargs.patchclamp")
        try:
            data = parse_json(data)
        except ProgramError as error:
            raise error.under("vllm_xargs.patchclamp") from None
    return ProgramCall(data, owner, extra, kept, variant, on_own_route)


# -- vLLM's `generate`


def edited(client: Any, stock: Any, prompt: Any, params: Any, request_id: str, **others: Any) -> AsyncIterator[Any]:
    """Run vLLM's `generate` with a program. Called in the order of an HTTP request's prompts. On patchclamp's routes,
    program errors are raised immediately: vLLM logs errors in mid-stream, and these may quote the prompt. On vLLM's own
    routes, errors are converted to vLLM's, with the same status."""
    call, front = current.get(), front_of(client)
    if call is None:
        with _resending_images(client, prompt), _as_vllm_errors(front):
            call = _stock_call(front, params, request_id)
        return _on_stock_route(front, stock, prompt, params, request_id, call, others)
    number = call.next_prompt()
    with call.noting_errors(), _resending_images(client, prompt):
        return _bound(front, stock, prompt, params, request_id, call, number, others)


@contextlib.contextmanager
def _resending_images(client: Any, prompt: Any) -> Iterator[None]:
    """Make vLLM resend the prompt's images after a failure, as the engine core may not have received them."""
    try:
        yield
    except Exception:
        if isinstance(prompt, dict):
            images.forget(client, prompt)
        raise


@contextlib.contextmanager
def _as_vllm_errors(front: Front) -> Iterator[None]:
    try:
        yield
    except PatchclampError as error:
        front.failed(error, OPEN)
        raise http_error(str(in_request(error)), error.status) from error


async def _on_stock_route(
    front: Front, stock: Any, prompt: Any, params: Any, request_id: str, call: ProgramCall, others: dict[str, Any]
) -> AsyncIterator[Any]:
    """Yield the outputs of a request on one of vLLM's own routes, with the `patchclamp` object in the last output."""
    is_answered = False
    try:
        with _resending_images(front.engine.client, prompt), _as_vllm_errors(front):
            await front.ready()
            async for output in _bound(front, stock, prompt, params, request_id, call, 0, others):
                if output.finished and call.program:
                    output.kv_transfer_params = {"patchclamp": await call.answer(front.kept)}
                    is_answered = True
                yield output
            log("program", OPEN, **call.facts())
    finally:
        if not is_answered:
            call.leave(front.kept)


def _stock_call(front: Front, params: Any, request_id: str) -> ProgramCall:
    """Read the call in the `extra_args` of a request on one of vLLM's own routes. Raises `ProgramError` for options
    that vLLM's responses cannot carry, and for any program if the server has API keys: vLLM does not authenticate all
    of its routes, and none identifies a request's owner."""
    call = of_extra_args(dict(params.extra_args or {}), OPEN, front.kept)
    if front.has_keys:
        raise ProgramError(
            "this server supports programs only on /v1/completions and /v1/chat/completions", "vllm_xargs.patchclamp"
        )
    if call.name is not None:
        raise ProgramError("a program in vllm_xargs cannot name its run", "vllm_xargs.patchclamp.run")
    streamed = getattr(params.output_kind, "name", "") != "FINAL_ONLY"
    several = params.n != 1 or (request_id.startswith("cmpl-") and not request_id.endswith("-0"))
    for wrong, what in ((streamed, "stream"), (several, "several prompts or n > 1"), (call.compare, "compare")):
        if wrong:
            raise ProgramError(
                f"{what}: a program in vllm_xargs supports only one prompt, n=1, no streaming; start the server with "
                "`patchclamp serve` and use the patchclamp object instead",
                "vllm_xargs.patchclamp",
            )
    return call


def _bound(
    front: Front, stock: Any, prompt: Any, params: Any, request_id: str, call: ProgramCall, number: int,
    others: dict[str, Any],
) -> AsyncIterator[Any]:  # fmt: skip
    """Return vLLM's outputs for prompt `number` of a call, each run with its program. Raises any binding error."""
    extra = params.extra_args or {}
    params.extra_args = {name: value for name, value in extra.items() if not is_ours(name)} or None
    if not call.program:
        if call.monitored is not None:
            request_id = call.monitored.enter(request_id, params.n, number * params.n)
        return stock(prompt, params, request_id, **others)
    tokens = len(prompt_in(prompt)[0]) + params.max_tokens
    bind = _binder(front, call, prompt, params)

    def runs(binding: Binding) -> AsyncGenerator[Any, None]:
        each = [ProgramRun(front, call, binding, prompt, params, i, number * params.n + i) for i in range(params.n)]
        names = [request_id] if params.n == 1 else [f"{i}_{request_id}" for i in range(params.n)]
        streams = [run.outputs(stock, name, others) for run, name in zip(each, names, strict=True)]
        outputs = streams[0] if len(streams) == 1 else _joined(streams, params)
        return _publishing(call, outputs) if each[0].has_readouts else outputs

    if call.is_quick(tokens):
        return runs(bind())
    place = call.bind_later(bind)

    async def when_bound() -> AsyncIterator[Any]:
        bindings = await call.bound()
        with call.noting_errors():
            started = runs(bindings[place])
        async with contextlib.aclosing(started) as outputs:
            async for output in outputs:
                yield output

    return when_bound()


def _binder(front: Front, call: ProgramCall, prompt: Any, params: Any) -> Callable[[], Binding]:
    """Return a function that binds a call's program to a prompt, safe on any thread. Equal prompts are bound once."""
    ids, text, images_of_prompt = prompt_in(prompt)
    whole = prompt_of(front.lm.tokenizer, ids, text, call.chat, images_of_prompt)
    count = call.records.of_prompt(params.n)
    job = front.bindings.job(call.owner, call.program, whole, params.max_tokens, count)

    def bind() -> Binding:
        key = tuple(ids), text, tuple(map(tuple, images_of_prompt)), params.max_tokens
        known = call.bindings.get(key)
        if known is None:
            known = call.bindings[key] = job("")
        elif known.bound is not None:
            count(record_work(known.bound.ops))
        return known

    return bind


class ProgramRun:
    """One run of a prompt with the call's program: sample `index` of its `n`, and choice `choice` of the response."""

    def __init__(
        self, front: Front, call: ProgramCall, binding: Binding, prompt: Any, params: Any, index: int, choice: int
    ) -> None:
        self._front, self._call, self._prompt, self._choice = front, call, prompt, choice
        self._params = copy.copy(params)
        self._params.n = 1
        if params.seed is not None:
            self._params.seed = params.seed + index
        ids, text, images_of_prompt = prompt_in(prompt)
        key = f"{call.owner}-http-{secrets.token_hex(8)}"
        bound = None if binding.bound is None else of_sample(msgspec.structs.replace(binding.bound, run=key), index)
        self._request = Request(
            key, ids, params.max_tokens, bound, binding.vectors, text=text, sources=binding.sources, chat=call.chat,
            images=images_of_prompt,
        )  # fmt: skip
        self._is_taken = False
        is_streamed = params.output_kind.name == "DELTA"
        watch = RunWatch(self._request, call.condition, self._look_at, call.program if is_streamed else None)
        self.has_readouts: bool = watch.has_readouts
        self._watch: RunWatch | None = watch if watch.has_readouts or call.condition is not None else None
        if self._watch is not None and not is_streamed:
            self._params.output_kind = type(params.output_kind).CUMULATIVE
        call.began += 1

    def _look_at(self, answer: Answer, first: int) -> Run:
        lm, request, program = self._front.lm, self._request, self._call.program
        return Run(lm, request, program, answer, is_kept_elsewhere=True, first=first)

    def outputs(self, generate: Callable[..., Any], name: str, others: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Return the stream of vLLM's outputs. The run is added to the call before the last output is yielded."""
        if self._call.monitored is not None:
            name = self._call.monitored.enter(name, 1, self._choice)
        ended = self._take if self._watch is None else self._hold
        outputs = self._front.engine.outputs(
            self._request, self._prompt, self._params, name, generate, ended=ended, within=self._under_way(), **others
        )
        return outputs if self._watch is None else self._watched(outputs, self._watch)

    def _hold(self, output: Any, ids: list[int]) -> None:
        """Keep a finished run's captures; `_take` adds the run to the call once its last readouts are read."""
        self._is_taken = True

    async def _watched(self, outputs: AsyncGenerator[Any, None], watch: RunWatch) -> AsyncGenerator[Any, None]:
        """Yield outputs with their tokens' readouts, up to the token that met the stop condition. Each output waits one
        engine step for its readouts. Without streaming, yield only the last output."""
        in_parts, held, sent = self.has_readouts, list[Any](), [0, ""]  # tokens and text yielded so far
        try:
            with self._call.noting_errors():
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        if watch.end is not None:
                            continue  # past the end, but the program's receipt has not arrived
                        if not in_parts:
                            held.clear()
                            watch.ids.clear()
                        held.append(output)
                        watch.ids += output.outputs[0].token_ids
                        if len(watch.ids) > 1 or output.finished:
                            await self._front.readouts.look(watch)
                        self._request.ended = watch.end is not None
                        if output.finished and watch.end is None:
                            self._take(output, watch.ids)
                        while watch.end is None and len(held) > (not output.finished):
                            yield self._readable(held.pop(0), sent, watch)
                if watch.end is not None:
                    count, reason = watch.end
                    while sent[0] + len(held[0].outputs[0].token_ids) < count:
                        yield self._readable(held.pop(0), sent, watch)
                    self._cut(held[0], watch.ids[:count], reason, sent)
                    self._take(held[0], watch.ids[:count], reason)
                    yield self._readable(held[0], sent, watch)
        finally:
            if self._is_taken and self._choice not in self._call.runs:
                self._front.engine.release([self._request.run])

    def _cut(self, output: Any, ids: list[int], reason: str, sent: list[Any]) -> None:
        """Truncate an output so that it is the last of a run that generated `ids`."""
        last, count = output.outputs[0], len(ids) - sent[0]
        text = self._front.engine.decoded(self._request.prompt_token_ids, self._params, ids)
        last.token_ids, last.text = list(last.token_ids[:count]), text[len(sent[1]) :]
        last.logprobs = None if last.logprobs is None else last.logprobs[:count]
        last.cumulative_logprob, last.finish_reason, last.stop_reason = None, "stop", reason
        output.finished = True

    def _readable(self, output: Any, sent: list[Any], watch: RunWatch) -> Any:
        """Return a stream's output with its tokens' readouts, for `_publishing`."""
        last = output.outputs[0]
        sent[:] = sent[0] + len(last.token_ids), sent[1] + last.text
        if self._call.monitored is not None:
            self._call.monitored.limit(self._choice, len(self._request.prompt_token_ids) + sent[0])
        if self.has_readouts:
            vars(output)["patchclamp"] = self._choice, watch.with_readouts(Part("", [], []), sent[0])
        return output

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        """Reserve memory for the run's captures. On an error, record it in the call and free the run."""
        engine, request = self._front.engine, self._request
        assert request.bound is not None
        room = self._front.kept.room_for(self._call.owner, captured_bytes(request.bound, engine.sites))
        try:
            with self._call.noting_errors(), _resending_images(engine.client, self._prompt), room:
                found = lens_bytes(self._call.program, request.bound)
                what = "bytes of lens tokens and features"
                self._front.kept.limits.check("inline_bytes", found, what, "capture")
                yield
        finally:
            if not self._is_taken:
                engine.release([request.run])

    def _take(self, output: Any, ids: list[int], stop_reason: str | None = None) -> None:
        last = output.outputs[0]
        answer = Answer(ids, last.text, None, {}, last.finish_reason, output.num_cached_tokens or 0,
                        drafts=drafts_of(last), stop_reason=stop_reason)  # fmt: skip
        run = Run(self._front.lm, self._request, self._call.program, answer)
        self._is_taken = True
        self._call.add(self._choice, run, self._request, self._front.kept)


def prompt_in(prompt: Any) -> tuple[list[int], str | None, list[list[int]]]:
    """Return the token ids, text (or None) and image positions of a prompt in the form of vLLM's routes."""
    if not isinstance(prompt, dict) or not isinstance(prompt.get("prompt_token_ids"), list):
        raise ProgramError("a program requires a prompt of text or token ids")
    kind = prompt.get("type", "token")
    if kind == "multimodal":
        return prompt["prompt_token_ids"], None, images.images_in(prompt)
    if kind != "token":
        raise ProgramError(f"programs support only text and image prompts, got {kind!r}: omit the program")
    return prompt["prompt_token_ids"], prompt.get("prompt"), []


async def _publishing(call: ProgramCall, outputs: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    """Yield a stream's outputs, adding each output's readouts to the call first, for the chunk made from it."""
    async for output in outputs:
        choice, part = vars(output).pop("patchclamp")
        call.parts.setdefault(choice, []).append(part)
        yield output


async def _joined(streams: Sequence[AsyncIterator[Any]], params: Any) -> AsyncGenerator[Any, None]:
    """Join the outputs of several runs of a prompt as vLLM does for `n`: each part with its run's index, or all final
    outputs in one."""
    whole = params.output_kind.name == "FINAL_ONLY"
    arrived: asyncio.Queue[tuple[int, Any, BaseException | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[Any]) -> None:
        try:
            async for output in stream:
                arrived.put_nowait((index, output, None))
        except Exception as error:
            arrived.put_nowait((index, None, error))

    tasks = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    left, finals = len(streams), [None] * len(streams)
    try:
        while left:
            index, output, error = await arrived.get()
            if error is not None:
                raise error
            output.outputs[0].index = index
            left -= output.finished
            finals[index] = output
            if whole:
                continue
            output.finished = not left
            yield output
        if whole:
            first: Any = finals[0]
            first.outputs = [final.outputs[0] for final in finals if final is not None]
            yield first
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
