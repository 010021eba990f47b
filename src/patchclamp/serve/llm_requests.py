"""Programs in the requests of a `vllm.LLM`: `SamplingParams(extra_args={"patchclamp": program})`.

The sites are proved before the first program, and again after the model's weights were updated. `completion.patchclamp`
is the `Run` of each completion of a request with a program, or of all requests if the engine has its own probes.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from patchclamp.engines.base import Request, carry
from patchclamp.engines.tokenizer import prompt_of
from patchclamp.engines.vllm.compat.configuration import KEY
from patchclamp.engines.vllm.monitors import Choices, monitors_of_config
from patchclamp.engines.vllm.offline import CallersRequest, OfflineEngine, offline_of
from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.language import Probe, Program
from patchclamp.language.ops import FUZZ_NAMES, check_words, fuzz, is_ours
from patchclamp.language.program import from_dict, parse_json
from patchclamp.proving import ProvedLM
from patchclamp.run import Run
from patchclamp.serve.program_call import prompt_in


def added(engine: Any, stock: Any, name: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> str:
    """Run `LLMEngine.add_request` with the program in `params.extra_args`, on an engine with patchclamp."""
    extra = getattr(params, "extra_args", None) or {}
    has_program = any(map(is_ours, extra))
    has_run = has_program or bool(monitors_of_config(engine.vllm_config))
    offline: OfflineEngine | None = offline_of(engine) if has_run else vars(engine).get("patchclamp")
    if offline is None or offline.is_own(name):
        return stock(name, prompt, params, *args, **kwargs)
    offline.check_unused(name, has_run)
    if not has_run:
        return stock(name, prompt, params, *args, **kwargs)
    if offline.front is None:
        offline.front = ProvedLM("", engine=offline, prove=False)
    lm: ProvedLM = offline.front
    program = _program_in(extra, [each.probe for each in offline.monitors]) if has_program else Program()
    if program:
        _check(params)
        lm.prove_again()
    params = copy.copy(params)
    params.extra_args = {word: value for word, value in extra.items() if not is_ours(word)} or None

    def ended(completion: Any, request: Request, answer: Any) -> None:
        run = Run(lm, request, program, answer)
        lm.remember(run)
        vars(completion)[KEY] = run

    ours = CallersRequest(*_bound(lm, offline, program, prompt, params), Choices(), ended)
    return offline.add(ours, stock, name, prompt, params, *args, **kwargs)


def _program_in(extra: dict[str, Any], always_on: list[Probe]) -> Program:
    """Read the program in a request's `extra_args`: a `Program`, its dictionary or JSON, and fuzzing options."""
    check_words(extra, "extra_args")
    given = extra.get(KEY, {})
    try:
        if isinstance(given, str):
            given = parse_json(given)
        program = given if isinstance(given, Program) else from_dict(given)
        program.stopped_by(None, always_on, "")  # raises for names of always-on probes
        fuzzed = fuzz({word: extra[word] for word in FUZZ_NAMES if word in extra})
    except PatchclampError as error:
        raise error.under(f"extra_args.{KEY}") from None
    return msgspec.structs.replace(program, edits=program.edits + fuzzed)


def _check(params: Any) -> None:
    if params.n != 1:
        raise ProgramError(f"expected n=1 with a program, got {params.n}: repeat the prompt instead", "n")
    if params.output_kind.name == "DELTA":
        raise ProgramError("a program requires output_kind FINAL_ONLY or CUMULATIVE", "output_kind")


def _bound(
    lm: ProvedLM, offline: OfflineEngine, program: Program, prompt: Any, params: Any
) -> tuple[Request, bytes | None]:
    """Bind a program to a prompt. Return the request and the encoded program."""
    ids, text, images = prompt_in(prompt) if program else ([], None, [])
    longest = lm.model.max_model_len - len(ids)
    max_tokens = min(params.max_tokens or longest, longest)
    try:
        request = lm.bound_request(program, prompt_of(lm.tokenizer, ids, text, None, images), max_tokens)
    except PatchclampError as error:
        raise error.under(f"extra_args.{KEY}") from None
    request.logprobs = 0 if params.logprob_token_ids else params.logprobs
    request.prompt_logprobs = params.prompt_logprobs
    return request, None if request.bound is None else carry(request, offline.sites)
