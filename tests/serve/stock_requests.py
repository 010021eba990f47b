"""Requests of the kinds that vLLM's own tests of its OpenAI server send, none of them with a program. What our server
answers is what stock's does, byte for byte, but for ids and times. `system_fingerprint` is an id: a hash of the engine's
configuration, which has `additional_config`. Log-probabilities are asked for of one run at a time: of several, which of
them a step takes together, and so the last bits, is chance.

    python -m tests.serve.stock_requests OURS STOCK MODEL      (URLs of two servers of one model)
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

PROMPT = "Hello, my name is"
CHAT = [{"role": "system", "content": "you are a helpful assistant"}, {"role": "user", "content": "what is 1+1?"}]
PARTS = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "what is 1+1? please provide the result without any other text."}],
    }
]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
CALLED = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"name": "x"}'}}
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
COMPLETIONS: tuple[dict[str, Any], ...] = (
    {}, {"prompt": [0, 0, 0, 0, 0]}, {"logprobs": 0}, {"logprobs": 5}, {"logprobs": 21}, {"logprobs": -1},
    {"prompt_logprobs": 1}, {"prompt_logprobs": 0, "echo": True}, {"prompt_logprobs": -1, "stream": True},
    {"stream": True}, {"stream": True, "n": 3, "temperature": 0.95, "seed": 42}, {"n": 2, "temperature": 0.5, "seed": 42},
    {"stream": True, "stream_options": {"include_usage": False}}, USAGE, {"stream_options": {"include_usage": True}},
    {"prompt": [PROMPT] * 2}, {"prompt": [PROMPT, "Water boils at"], "stream": True}, {"prompt": [[1, 2], [3]]},
    {"logit_bias": {"1000": 100}}, {"logit_bias": {"9999999": 1}}, {"allowed_token_ids": [11, 12, 13]}, {"echo": True},
    {"echo": True, "logprobs": 1}, {"echo": True, "stream": True}, {"echo": True, "max_tokens": 0}, {"best_of": 2},
    {"structured_outputs": {"choice": ["Python", "Java"]}}, {"structured_outputs": {"regex": "[0-9]{2}"}},
    {"structured_outputs": {"json": SCHEMA}, "max_tokens": 12}, {"structured_outputs": {"regex": "["}},
    {"stop": ["a", "e"], "include_stop_str_in_output": True}, {"stop_token_ids": [30]}, {"min_tokens": 3, "ignore_eos": True},
    {"top_k": 3, "top_p": 0.9, "min_p": 0.1, "temperature": 1, "seed": 3}, {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"return_token_ids": True}, {"return_tokens_as_token_ids": True, "logprobs": 1}, {"skip_special_tokens": False},
    {"truncate_prompt_tokens": 2}, {"max_tokens": 100_000}, {"max_tokens": -1}, {"temperature": -1}, {"temperature": "hot"},
    {"model": "nobody"}, {"model": None}, {"prompt": None}, {"prompt": ""}, {"prompt": []}, {"prompt": [99_999_999]},
    {"use_beam_search": True, "n": 2}, {"suffix": "x"}, {"unknown_field": 1}, {"vllm_xargs": {"mine": 1}}, {"user": "me"},
    {"cache_salt": "salt"}, {"priority": 1}, {"kv_transfer_params": {"x": 1}},
    # what is sampled
    {"bad_words": [" the", " I"]}, {"logprob_token_ids": [11, 12], "logprobs": 2}, {"logprob_token_ids": [11]},
    {"frequency_penalty": 1.5}, {"frequency_penalty": 9}, {"logit_bias": {"1000": 101}}, {"logit_bias": {"x": 1}},
    {"allowed_token_ids": []}, {"allowed_token_ids": [-1]}, {"top_p": 0}, {"top_k": -2}, {"min_p": 2}, {"repetition_penalty": 0},
    {"temperature": None, "seed": 5}, {"seed": -1}, {"seed": 2**63}, {"n": 0}, {"n": 100_000}, {"n": 2}, {"best_of": 1, "n": 2},
    {"use_beam_search": True, "n": 2, "length_penalty": 0.5}, {"use_beam_search": True, "stream": True}, {"watermarking": True},
    {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}, {"repetition_detection": {"x": 1}},
    {"thinking_token_budget": 3}, {"thinking_token_budget": -3},
    # where it ends
    {"stop": "a"}, {"stop": []}, {"stop": [1]}, {"stop": ["a"], "stream": True}, {"stop": "a", "n": 2, "temperature": 1, "seed": 1},
    {"stop": ["a"], "include_stop_str_in_output": True, "stream": True}, {"stop_token_ids": [28, 29, 30, 31], "min_tokens": 2},
    {"min_tokens": 9}, {"min_tokens": -1}, {"max_tokens": 0}, {"max_tokens": None, "stop": ["."]}, {"ignore_eos": True, "max_tokens": 9},
    # what the prompt is
    {"prompt": [[1, 2]], "echo": True, "logprobs": 1}, {"prompt": ["a", [1]]}, {"prompt": [1, "a"]}, {"prompt": [[]]},
    {"prompt": [[1, 2, 3]], "prompt_logprobs": 1}, {"prompt": {"x": 1}}, {"prompt": [-1]}, {"prompt_embeds": "x"},
    {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": -2}, {"truncate_prompt_tokens": 2, "truncation_side": "right"},
    {"truncation_side": "middle"}, {"add_special_tokens": False}, {"prompt": PROMPT * 200}, {"prompt": [7] * 510},
    {"prompt": [PROMPT] * 2, "n": 2, "temperature": 1, "seed": 9, "stream": True}, {"prompt": ["a", "b"], "n": 2, "temperature": 1, "seed": 9},
    # what is told
    {"stream": True, "stream_options": {"continuous_usage_stats": True}}, {"prompt": [PROMPT, "a"], **USAGE}, {"stream": True, "logprobs": 2},
    {"stream": True, "stream_options": {"include_usage": True}, "echo": True, "n": 2, "temperature": 1, "seed": 1},
    {"return_token_ids": True, "stream": True}, {"return_tokens_as_token_ids": True, "logprobs": 1, "stream": True, "echo": True},
    {"return_token_offsets": True}, {"spaces_between_special_tokens": False, "skip_special_tokens": False}, {"stream": True, "stream_interval": 3},
    {"stream_interval": 0}, {"echo": True, "prompt_logprobs": 1, "logprobs": 2, "temperature": 1, "seed": 2}, {"request_id": "mine"},
    # what is allowed
    {"response_format": {"type": "json_object"}, "max_tokens": 12}, {"response_format": {"type": "text"}}, {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, "max_tokens": 12}, {"response_format": {}},
    {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, {"structured_outputs": {"grammar": "root ::="}}, {"structured_outputs": {}},
    {"structured_outputs": {"json": SCHEMA, "regex": "x"}}, {"structured_outputs": {"choice": []}}, {"structured_outputs": {"json_object": True}},
    {"structured_outputs": {"choice": ["Python", "Java"]}, "stream": True}, {"structured_outputs": {"json": "{"}}, {"guided_choice": ["a"]},
    {"structured_outputs": {"regex": "[0-9]{2}"}, "n": 2, "temperature": 1, "seed": 4},
)  # fmt: skip
CHATS: tuple[dict[str, Any], ...] = (
    {}, {"logprobs": True, "top_logprobs": 0}, {"logprobs": True, "top_logprobs": 5}, {"logprobs": True, "top_logprobs": 21},
    {"top_logprobs": 5}, {"prompt_logprobs": 1}, {"stream": True}, USAGE, {"stream": True, "logprobs": True, "top_logprobs": 2},
    {"n": 3, "temperature": 1, "seed": 7}, {"n": 2, "temperature": 1, "seed": 7, "stream": True}, {"messages": PARTS},
    {"messages": [{"role": "custom", "content": "hi"}]}, {"messages": [{"role": "user"}]}, {"messages": []}, {"messages": None},
    {"messages": [*CHAT, {"role": "assistant", "content": "It is"}], "continue_final_message": True, "add_generation_prompt": False},
    {"continue_final_message": True, "add_generation_prompt": True}, {"echo": True, "add_generation_prompt": False},
    {"response_format": {"type": "json_object"}, "max_tokens": 12},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, "max_tokens": 12},
    {"structured_outputs": {"choice": ["yes", "no"]}}, {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": "auto"}, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
    {"tool_choice": "required"}, {"chat_template": "{{ messages }}"}, {"chat_template_kwargs": {"x": 1}}, {"seed": 2**63},
    {"max_completion_tokens": 3}, {"stop": "1"}, {"return_token_ids": True}, {"unknown_field": 1}, {"model": "nobody"},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, {"reasoning_effort": "low"},
    # tools
    {"tools": [TOOL], "tool_choice": "required", "max_tokens": 12}, {"tools": []}, {"tools": [{"type": "function"}]},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}, "max_tokens": 12}, {"tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}, "max_tokens": 12, "stream": True},
    {"tools": [TOOL], "tool_choice": "sometimes"}, {"tools": [TOOL], "parallel_tool_calls": False, "tool_choice": "none"},
    {"messages": [*CHAT, {"role": "assistant", "tool_calls": [CALLED]}, {"role": "tool", "tool_call_id": "a", "content": "2"}]},
    {"messages": [*CHAT, {"role": "tool", "content": "2"}]}, {"messages": [*CHAT, {"role": "assistant", "tool_calls": [{}]}]},
    # what is allowed
    {"response_format": {"type": "text"}}, {"response_format": {"type": "json_schema"}}, {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_object"}, "max_tokens": 12, "stream": True}, {"structured_outputs": {"regex": "[0-9]{2}"}},
    {"structured_outputs": {"json": SCHEMA}, "max_tokens": 12}, {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
    {"structured_outputs": {"regex": "x", "choice": ["x"]}}, {"structured_outputs": {"choice": ["yes", "no"]}, "n": 2, "temperature": 1, "seed": 6},
    # what is sampled, and where it ends
    {"logit_bias": {"1000": 100}}, {"logit_bias": {"9999999": 1}}, {"allowed_token_ids": [11, 12, 13]}, {"bad_words": ["2"]},
    {"temperature": 1, "seed": 3, "top_k": 3, "top_p": 0.9, "min_p": 0.1}, {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"seed": -(2**63) - 1}, {"n": 0}, {"n": 2}, {"use_beam_search": True, "n": 2}, {"max_tokens": 0}, {"max_completion_tokens": 100_000},
    {"stop": ["1", "2"], "include_stop_str_in_output": True}, {"stop_token_ids": [28, 29, 30, 31]}, {"min_tokens": 4, "ignore_eos": True},
    {"stop": "1", "stream": True}, {"truncate_prompt_tokens": 3}, {"truncate_prompt_tokens": -2}, {"skip_special_tokens": False},
    {"thinking_token_budget": 3}, {"include_reasoning": False},
    # what the prompt is, and what is told
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, {"messages": [{"role": "user", "content": [{"type": "x"}]}]},
    {"messages": [{"role": "system", "content": [{"type": "text", "text": "hi"}]}, CHAT[1]]}, {"messages": "hi"}, {"messages": [[CHAT[1]]]},
    {"messages": [{"role": "user", "content": "hi" * 2000}]}, {"documents": [{"title": "a", "text": "b"}]}, {"add_special_tokens": True},
    {"messages": [*CHAT, {"role": "assistant", "content": "It is"}], "continue_final_message": True, "add_generation_prompt": False,
     "echo": True, "stream": True}, {"echo": True}, {"return_prompt_text": True}, {"return_token_offsets": True},
    {"prompt_logprobs": 1, "stream": True}, {"logprobs": True, "top_logprobs": 2, "temperature": 1, "seed": 7},
    {"return_tokens_as_token_ids": True, "logprobs": True, "top_logprobs": 1}, {"return_token_ids": True, "stream": True},
    {"logprobs": True, "logprob_token_ids": [11, 12]}, {"stream_options": {"include_usage": True}}, {"request_id": "mine"},
    {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "temperature": 1, "seed": 8}, {"vllm_xargs": {"mine": 1}},
    {"stream": True, "stream_interval": 3}, {"best_of": 2}, {"cache_salt": ""},
)  # fmt: skip
TOKENIZED: tuple[dict[str, Any], ...] = (
    {"prompt": PROMPT}, {"prompt": PROMPT, "return_token_strs": True}, {"prompt": PROMPT, "add_special_tokens": False}, {},
    {"prompt": PROMPT, "model": "nobody"}, {"prompt": [1]}, {"messages": CHAT}, {"messages": PARTS, "add_generation_prompt": False},
    {"messages": CHAT, "tools": [TOOL], "return_token_strs": True}, {"messages": []}, {"messages": CHAT, "continue_final_message": True},
)  # fmt: skip
OTHERS: tuple[tuple[str, str, Any], ...] = (
    *(("GET", path, None) for path in ("/v1/models", "/version", "/health", "/ping", "/load", "/v1/models/x", "/nowhere", "/v1/completions")),
    *(("POST", "/tokenize", body) for body in TOKENIZED), ("POST", "/ping", None), ("POST", "/health", None),
    *(("POST", "/detokenize", body) for body in ({"tokens": [1, 2, 30]}, {"tokens": []}, {"tokens": [-1]}, {"tokens": [9_999_999]}, {"tokens": "x"}, {})),
    *(("POST", "/v1/completions", body) for body in ([], "x", b"{", b"", b"\xff", b'{"prompt": "a", "prompt": "b", "temperature": 0}')),
    *(("POST", "/v1/chat/completions", body) for body in ({}, b"{", b"[]", None)),
    ("POST", "/v1/chat/completions/batch", {"messages": [CHAT, CHAT[1:]], "max_tokens": 3, "temperature": 0}),
    ("POST", "/v1/responses", {"input": "what is 1+1?", "max_output_tokens": 3, "temperature": 0, "store": False}),
    ("POST", "/v1/messages", {"model": "nobody", "messages": CHAT[1:], "max_tokens": 3}), ("DELETE", "/v1/models", None),
    ("POST", "/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3, "temperature": 0}}),
    ("POST", "/v1/completions/render", {"prompt": PROMPT}), ("POST", "/v1/chat/completions/render", {"messages": CHAT}),
)  # fmt: skip
CHANGING = (
    (r'"(id|system_fingerprint)":\s*"[^"]*"', r'"\1":""'), (r'"(created|created_at|completed_at)":\s*[\d.]+', r'"\1":0'),
    (r"(cmpl|chatcmpl|modelperm)-[0-9a-f-]+", ""),
)  # fmt: skip
GROWING = ("text", "content")  # what parts of a stream add to


def requests(model: str) -> list[tuple[str, str, Any]]:
    """Method, path and body of each."""
    common = {"model": model, "max_tokens": 3, "temperature": 0}
    return [
        *(("POST", "/v1/completions", {**common, "prompt": PROMPT, **body}) for body in COMPLETIONS),
        *(("POST", "/v1/chat/completions", {**common, "messages": CHAT, **body}) for body in CHATS),
        *OTHERS,
    ]


def answer(client: httpx.Client, method: str, path: str, body: Any) -> tuple[int, str, str]:
    """Status, content type and body of an answer, without what no two answers share."""
    sent = (
        {"content": body, "headers": {"Content-Type": "application/json"}}
        if isinstance(body, bytes)
        else {"json": body}
    )
    response = client.request(method, path, **sent)
    text = response.text
    for pattern, same in CHANGING:
        text = re.sub(pattern, same, text)
    text = _joined(text) if text.startswith("data: {") else text
    return response.status_code, response.headers.get("Content-Type", ""), text


def _joined(stream: str) -> str:
    """A stream's parts in one: how many tokens come in a part, and which choice's come first, is chance."""
    first, *parts = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    whole = json.loads(first)
    for part in parts[:-1]:
        whole = _merged(whole, json.loads(part))
    return json.dumps([whole, parts[-1:]], sort_keys=True)


def _merged(a: Any, b: Any, name: str = "") -> Any:
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, dict) and isinstance(b, dict):
        return {key: _merged(a.get(key), b.get(key), key) for key in {**a, **b}}
    if name == "choices":
        by_index = {choice["index"]: choice for choice in a}
        for choice in b:
            by_index[choice["index"]] = _merged(by_index.get(choice["index"]), choice)
        return [by_index[index] for index in sorted(by_index)]
    return a + b if isinstance(a, list) or name in GROWING else b


def differences(ours: httpx.Client, stock: httpx.Client, model: str) -> list[str]:
    """What is not answered alike."""
    told = []
    for method, path, body in requests(model):
        a, b = answer(ours, method, path, body), answer(stock, method, path, body)
        if a != b:
            told.append(f"{method} {path} {body}\n  ours  {a}\n  stock {b}")
    return told


def metric_names(client: httpx.Client) -> set[str]:
    """The names of what a server counts, beside ours."""
    families = text_string_to_metric_families(client.get("/metrics/").text)
    return {family.name for family in families if not family.name.startswith("patchclamp")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("ours", "stock", "model"):
        parser.add_argument(name)
    args = parser.parse_args()
    with httpx.Client(base_url=args.ours, timeout=120) as ours, httpx.Client(base_url=args.stock, timeout=120) as stock:
        told = differences(ours, stock, args.model)
        statuses = [answer(stock, *request)[0] for request in requests(args.model)]
    print("\n".join(told))
    print(
        f"{len(told)} of {len(statuses)} differ; stock's statuses: { {each: statuses.count(each) for each in set(statuses)} }"
    )
    raise SystemExit(bool(told))


if __name__ == "__main__":
    main()
