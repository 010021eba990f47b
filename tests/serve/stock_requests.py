"""Requests of the kinds that vLLM's own tests of its OpenAI server send, none of them with a program. What our server
answers is what stock's does, byte for byte, but for ids and times. `system_fingerprint` is an id: a hash of the engine's
configuration, which has `additional_config`.

    python -m tests.serve.stock_requests OURS STOCK MODEL      (URLs of two servers of one model)
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

import httpx

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
)  # fmt: skip
OTHERS = (("GET", "/v1/models", None), ("POST", "/tokenize", {"prompt": PROMPT}), ("GET", "/version", None),
          ("POST", "/v1/completions", []), ("POST", "/v1/completions", "x"), ("GET", "/v1/completions", None),
          ("POST", "/v1/chat/completions", {}))  # fmt: skip
CHANGING = (
    (r'"(id|system_fingerprint)":\s*"[^"]*"', r'"\1":""'), (r'"created":\s*\d+', '"created":0'),
    (r"(cmpl|chatcmpl|modelperm)-[0-9a-f-]+", ""),
)  # fmt: skip
GROWING = ("text", "content")  # what parts of a stream add to


def requests(model: str) -> list[tuple[str, str, Any]]:
    """Method, path and body of each."""
    common = {"model": model, "max_tokens": 5, "temperature": 0}
    return [
        *(("POST", "/v1/completions", {**common, "prompt": PROMPT, **body}) for body in COMPLETIONS),
        *(("POST", "/v1/chat/completions", {**common, "messages": CHAT, **body}) for body in CHATS),
        *OTHERS,
    ]


def answer(client: httpx.Client, method: str, path: str, body: Any) -> tuple[int, str, str]:
    """Status, content type and body of an answer, without what no two answers share."""
    response = client.request(method, path, json=body)
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


def differences(ours: httpx.Client, stock: httpx.Client, model: str, each: int = 1) -> list[str]:
    """What is not answered alike, of every `each`th request."""
    told = []
    for method, path, body in requests(model)[::each]:
        a, b = answer(ours, method, path, body), answer(stock, method, path, body)
        if a != b:
            told.append(f"{method} {path} {body}\n  ours  {a}\n  stock {b}")
    return told


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
