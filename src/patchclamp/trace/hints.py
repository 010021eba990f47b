"""Hints for names from nnsight, nnterp and Transformers that a trace lacks, each with a replacement."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from patchclamp.errors import ProgramError, UnknownName, near

P = ParamSpec("P")
R = TypeVar("R")

OF_A_TRACE: dict[str, str] = {
    "norm": "the normalised final stream is t.final_norm",
    "lm_head": "the unembedding's output is t.logits, one row per sampled token",
    "output": "the generated output is t.text and t.token_ids after the trace; the logits are t.logits",
    "project_on_vocab": "write the stream into the last layer and read the logits: t.layers[-1].output[-1] = "
                        "t.layers[20].output[-1], then t.logits.save()",
    "skip_layer": "write a layer's input into its output: t.layers[5].output = t.layers[5].input",
    "skip_layers": "write the first layer's input into the last one's output: t.layers[7].output = t.layers[5].input",
    "steer": "add to the stream: t.layers[5].output[-1] += 4 * v",
    "iter": "step n of a generation is t.generated[n - 1], as the first step is the prompt; t.all() is every step",
    "next": "the next step of a generation is t.generated[0], the one after it t.generated[1]",
    "barrier": "prompts need no barrier: b.layers[5].output[-1] = a.layers[5].output[-1]",
    "stop": "a trace always runs to its end: lm.trace(prompt, max_tokens=1) computes only the prompt",
    "model": "use the layers of the trace: t.layers[5]",
    "transformer": "use the layers of the trace: t.layers[5]",
    "embed_tokens": "the token embedding's output is t.embed",
    "input_ids": "the ids of a prompt are lm.tokens(prompt), and t.run.prompt_token_ids after the trace",
    "attention_mask": "no mask is needed, because prompts are not padded",
    "num_layers": "the number of layers is len(t.layers), or lm.model.layers",
    "hidden_size": "the width of the stream is lm.model.d_model",
    **dict.fromkeys(("generated", "all", "prompt"), "use the token groups of the prompt: t.generated[3], t.all()"),
    "result": "the run is t.run, after the trace",
}  # fmt: skip
OF_A_LAYER: dict[str, str] = {
    "o_proj": "its input, all heads concatenated, is t.layers[5].attn.z, with a head z[3]; its output is .attn.output",
    "q_proj": "its output is t.layers[5].attn.q, with a head q[3]", "k_proj": "its output is t.layers[5].attn.k",
    "v_proj": "its output is t.layers[5].attn.v", "qkv_proj": "its output is t.layers[5].attn.q, k and v",
    "down_proj": "its input is t.layers[5].mlp.neurons, its output t.layers[5].mlp.output",
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "act_fn"),
                    "it computes one factor of each neuron; the product is t.layers[5].mlp.neurons"),
    "input_layernorm": "its output is t.layers[5].attn.input, and its input t.layers[5].input",
    "post_attention_layernorm": "in most families its output is t.layers[5].mlp.input, and its input t.layers[5].mid",
    "gate": "the routing logits are t.layers[5].mlp.router", "experts": "the routing logits are t.layers[5].mlp.router",
    "skip": "write a layer's input into its output: t.layers[5].output = t.layers[5].input",
    "next": "the next step of a generation is t.generated[0].layers[5]",
}  # fmt: skip


OF_A_MODEL: dict[str, str] = {
    "generate": "use lm.run(prompt, max_tokens=20), whose text is run.text, or lm.trace(prompt, max_tokens=20)",
    "forward": "use lm.run(prompt, max_tokens=1, capture='logits')",
    "run_with_cache": "use lm.run(prompt, capture=[pc.resid_post]), and read run[pc.resid_post[5]]",
    "run_with_hooks": "use lm.run(prompt, edits=[pc.Add(v, pc.resid_post[5])]), or use `with lm.trace(prompt) as t:`",
    **dict.fromkeys(("to_tokens", "tokenize"), "use lm.tokens(text)"),
    "to_str_tokens": "use lm.tokenizer.token_strings(lm.tokens(text))",
    "to_string": "use lm.tokenizer.decode(ids)",
    **dict.fromkeys(("cfg", "config"), "the sizes are in lm.model, such as lm.model.layers and lm.model.d_model"),
    **dict.fromkeys(("hook_dict", "hook_points", "named_modules"), "the sites of this model are lm.sites"),
    "invoke": "use `with lm.trace() as t:`, and `with t.invoke(prompt) as a:` inside it",
    "session": "use `with lm.trace() as t:`, and `with t.invoke(prompt) as a:` for each prompt",
    **{
        name: f"use lm.weights({name!r})"
        for name in ("W_E", "W_pos", "W_U", "W_Q", "W_K", "W_V", "W_O", "W_in", "W_out")
    },
    "blocks": "use lm.weights('W_O', layer=5) for weights, and pc.resid_post[5] for sites",
    "layers": "use `with lm.trace(prompt) as t:`, and t.layers[5].output inside it",
}
OPTIONS: dict[str, str] = {
    **dict.fromkeys(("max_new_tokens", "max_length", "n_tokens"), "use max_tokens="),
    **dict.fromkeys(("temperature", "top_p", "top_k", "seed", "stop", "do_sample", "n"),
                    "pass it in sampling, such as sampling={'temperature': 0.7, 'seed': 0}"),
    "capture": "use t.cache(pc.resid_post) inside the trace, or a tensor's .save()",
    **dict.fromkeys(("inputs", "input_ids", "text", "prompts"), "pass the prompt first, lm.trace(prompt)"),
    **dict.fromkeys(("scan", "validate", "trace", "remote"), "omit it: each line is checked as it is recorded"),
}  # fmt: skip
OF_INVOKE = ("messages", "sampling", "score")
OF_TRACE = (*OF_INVOKE, "max_tokens", "edits", "logprobs", "lora", "stream")


def hint(name: str, hints: dict[str, str]) -> ProgramError | None:
    """Return the error for a name with a hint, or None for other names."""
    return UnknownName(f"{name!r} is not available in a trace: {hints[name]}") if name in hints else None


def check_options(others: Iterable[str], call: str, known: Iterable[str], hints: Iterable[str] = OPTIONS) -> None:
    """Raise `UnknownName` for unknown arguments of a call. `hints`: the names in `OPTIONS` that apply to the call."""
    known, hints = list(known), set(hints)
    for name in others:
        instead = f": {OPTIONS[name]}" if name in hints else f"{near(name, known)}; available: {', '.join(known)}"
        raise UnknownName(f"{call} has no argument {name!r}{instead}", name)


def checked_names(function: Callable[P, R], call: str) -> Callable[P, R]:
    """Wrap a function to reject unknown arguments and suggest replacements, as `lm.trace` does."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_options((name for name in kwargs if name not in known), call, known, hints_for(known))
        return function(*args, **kwargs)

    @functools.wraps(function)
    async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
        return await checked(*args, **kwargs)  # pyright: ignore[reportGeneralTypeIssues]

    return awaited if inspect.iscoroutinefunction(function) else checked  # pyright: ignore[reportReturnType]


def hints_for(known: Iterable[str]) -> list[str]:
    """Return the names in `OPTIONS` whose advice mentions one of the arguments in `known`."""
    known = list(known)
    return [name for name, words in OPTIONS.items() if any(f"{one}=" in words for one in known)]
