"""Hostile requests: bodies and paths that no client of ours sends, and the statuses that may answer them.

Each is sent to a running server by `tests/serve/test_attacks.py`, which also sees that the server lives.
"""

from __future__ import annotations

import json
import struct
from typing import NamedTuple


class Attack(NamedTuple):
    """path: under the server's address
    body: of a PUT, or of the `patchclamp` object as JSON text
    """

    name: str
    path: str
    body: bytes
    statuses: tuple[int, ...] = (400,)


def file(header: object, data: bytes = b"") -> bytes:
    """A safetensors file with that header, as JSON or as it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: str, shape: list[int], size: int) -> dict[str, object]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}


VECTORS, PROGRAMS = "/v1/patchclamp/vectors/x", "/v1/patchclamp/programs/x"
PICKLE = b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x03id \x94\x85\x94R\x94."
FILES = (
    Attack("nothing", VECTORS, b""),
    Attack("a pickle", VECTORS, PICKLE),
    Attack("a zip archive", VECTORS, b"PK\x03\x04" + bytes(100)),
    Attack("a header of 2^62 bytes", VECTORS, struct.pack("<Q", 1 << 62) + b"{}"),
    Attack("a header of a megabyte of spaces", VECTORS, file(b" " * ((1 << 20) + 1))),
    Attack("a header of brackets", VECTORS, file(b"[" * 500_000)),
    Attack("a header of nested objects", VECTORS, file(b'{"x":' * 100_000)),
    Attack("ten thousand tensors", VECTORS, file({f"x{i}": tensor("F32", [1], 4)["x"] for i in range(10_000)}, bytes(4))),
    Attack("a tensor of 2^62 rows", VECTORS, file(tensor("F32", [1 << 62, 4], 16), bytes(16))),
    Attack("a tensor of -1 rows", VECTORS, file(tensor("F32", [-1], 4), bytes(4))),
    Attack("a tensor of a thousand dimensions", VECTORS, file(tensor("F32", [1] * 1000, 4), bytes(4))),
    Attack("offsets beyond the end", VECTORS, file(tensor("F32", [4], 16), bytes(4))),
    Attack("offsets of 2^70", VECTORS, file({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 70]}}, bytes(4))),
    Attack("whole numbers", VECTORS, file(tensor("I64", [1], 8), bytes(8))),
    Attack("eight bits", VECTORS, file(tensor("F8_E5M2", [1], 1), bytes(1))),
    Attack("a dtype of nobody's", VECTORS, file(tensor("<script>", [1], 4), bytes(4))),
    Attack("NaN", VECTORS, file(tensor("F32", [1], 4), struct.pack("<f", float("nan")))),
    Attack("infinity", VECTORS, file(tensor("F64", [1], 8), struct.pack("<d", 1e300))),
    Attack("metadata of brackets", VECTORS, file(tensor("F32", [1], 4) | {"__metadata__": {"means": "[" * 100_000}}, bytes(4))),
    Attack("a program in a vector", VECTORS, file(tensor("F32", [1], 4) | {"__metadata__": {"programs": "{}"}}, bytes(4))),
)  # fmt: skip
NUMBERS = (
    Attack("no JSON", VECTORS, b"{"),
    Attack("brackets", VECTORS, b"[" * 500_000),
    Attack("NaN in JSON", VECTORS, b"[NaN]"),
    Attack("a number beyond fp64", VECTORS, b"[1e999]"),
    Attack("a number beyond fp32", VECTORS, b"[1e39]"),
    Attack("a number of 100,000 digits", VECTORS, b"[" + b"9" * 100_000 + b"]"),
    Attack("words", VECTORS, b'["1"]'),
    Attack("ragged rows", VECTORS, b"[[1],[1,2]]"),
    Attack("no rows", VECTORS, b"[]"),
    Attack("no UTF-8", VECTORS, b"\xff\xfe"),
    Attack("more than the limit of JSON", VECTORS, b"[" + b"0," * (1 << 19) + b"0]", (413,)),
    Attack("a program of brackets", PROGRAMS, b"[" * 500_000),
    Attack("a program of objects", PROGRAMS, b'{"edits":' * 100_000),
    Attack("a field twice", PROGRAMS, b'{"edits": [], "edits": []}'),
    Attack("an unknown field", PROGRAMS, b'{"edits": [], "code": "print()"}'),
    Attack("a field with half a character", PROGRAMS, b'{"edits": [], "\\ud800": 1}'),
    Attack("code", PROGRAMS, b'{"edits": [{"type": "apply", "fn": "os.system", "at": "embed"}]}'),
    Attack("a program of text", PROGRAMS, b'"edits"'),
    Attack("a program of nothing", PROGRAMS, b"null"),
    Attack("too many ops", PROGRAMS, json.dumps({"edits": [{"type": "zero", "at": "embed"}] * 65}).encode(), (413,)),
)  # fmt: skip
OBJECTS = (
    Attack("a list", "", b"[]"),
    Attack("a number", "", b"1e999"),
    Attack("an unknown field", "", b'{"code": "print()"}'),
    Attack("a name that climbs", "", b'{"run": "../../etc/passwd"}'),
    Attack("a name of zeros", "", b'{"run": "a\\u0000b"}'),
    Attack("a name of half a character", "", b'{"run": "\\ud800"}'),
    Attack("a name of a number", "", b'{"run": 7}'),
    Attack("NaN", "", b'{"edits": [{"type": "scale", "factor": NaN, "at": "embed"}]}'),
    Attack("infinity", "", b'{"edits": [{"type": "scale", "factor": 1e999, "at": "embed"}]}'),
    Attack("a whole number of 4,000 digits", "", b'{"edits": [{"type": "scale", "factor": ' + b"9" * 4000 + b', "at": "embed"}]}'),
    Attack("a seed of 2^70", "", b'{"edits": [{"type": "noise", "std": 1, "seed": ' + str(1 << 70).encode() + b', "at": "embed"}]}'),
    Attack("a layer of 10^30", "", b'{"edits": [{"type": "zero", "at": "mlp_out[1000000000000000000000000000000]"}]}'),
    Attack("a site of brackets", "", b'{"edits": [{"type": "zero", "at": "' + b"[" * 100_000 + b'"}]}'),
    Attack("a selection of brackets", "", b'{"edits": [{"type": "zero", "at": "embed", "tokens": "' + b"(" * 100_000 + b'"}]}'),
    Attack("a selection of ten thousand parts", "", b'{"edits": [{"type": "zero", "at": "embed", "tokens": "' + b" | ".join([b"prompt[0]"] * 10_000) + b'"}]}', (200, 400)),
    Attack("a span of backslashes", "", b'{"edits": [{"type": "zero", "at": "embed", "tokens": "span(\\"' + b"\\\\\\\\" * 20_000 + b'"}]}'),
    Attack("a vector that says too much", "", b'{"edits": [{"type": "add", "at": "embed", "value": {"type": "vector", "shape": [4611686018427387904], "data": ""}}]}'),
    Attack("a vector of no base64", "", b'{"edits": [{"type": "add", "at": "embed", "value": {"type": "vector", "shape": [1], "data": "!"}}]}'),
    Attack("a vector of another width", "", b'{"edits": [{"type": "add", "at": "embed", "value": [1, 2]}]}'),
    Attack("a value of brackets", "", b'{"edits": [{"type": "add", "at": "embed", "value": ' + b"[" * 500 + b"]" * 500 + b"}]}"),
    Attack("a run of another's", "", b'{"edits": [{"type": "add", "at": "embed", "value": {"type": "from", "run": "open-http-0"}}]}', (404,)),
    Attack("code", "", b'{"edits": [{"type": "apply", "fn": "os.system", "at": "embed"}]}'),
    Attack("too many ops", "", json.dumps({"edits": [{"type": "zero", "at": "embed"}] * 65}).encode(), (413,)),
    Attack("too many captures", "", json.dumps({"capture": [{"type": "capture", "at": "embed"}] * 33}).encode(), (413,)),
    Attack("more than the limit", "", b'{"run": "' + b"x" * (1 << 21) + b'"}', (413,)),
)  # fmt: skip
ENGINE: tuple[tuple[str, object], ...] = (  # routes of our client, and what is packed as msgpack there
    ("grade", {}),
    ("grade", {"jobs": []}),
    ("grade", {"jobs": [{}], "vectors": b"x"}),
    ("grade", {"jobs": [{"name": "OWNER-a-b", "prompt": [1], "suffixes": [[]], "terms": [], "programs": [None]}]}),
    ("grade", {"jobs": [{"name": "OWNER-a-b", "prompt": [1], "suffixes": [[]], "terms": [], "programs": [[b"", []]]}]}),
    ("tokenizer", {"method": "__class__", "args": []}),
    ("tokenizer", {"method": "encode", "args": []}),
    ("tokenizer", {"method": "encode", "args": [{"a": 1}]}),
    ("tokenizer", {"method": "encode", "args": ["\ud800".encode("utf-8", "surrogatepass")]}),
    ("tokenizer", {"method": "encode", "args": ["x", "y"]}),
    ("tokenizer", {"method": "decode", "args": [[1 << 62]]}),
    ("tokenizer", {"method": "decode", "args": [[-5]]}),
    ("tokenizer", {"method": "decode", "args": [["a"]]}),
    ("tokenizer", {"method": "token_strings", "args": [[10_000_000]]}),
    ("tokenizer", {"method": "token_strings", "args": [[-1, 1 << 40]]}),
    ("tokenizer", {"method": "settled", "args": [[99_999_999]]}),
    ("tokenizer", {"method": "settled", "args": ["abc"]}),
    ("tokenizer", {"method": "spell", "args": [[1, 2, 99_999_999], None]}),
    ("tokenizer", {"method": "spell", "args": [[1, 2], 7]}),
    ("tokenizer", {"method": "chat", "args": [[{"role": 7}]]}),
    ("tokenizer", {"method": "chat", "args": [[{"role": "user"}]]}),
    ("tokenizer", {"method": "chat", "args": [["x"]]}),
    ("tokenizer", {"method": "chat", "args": [{"a": "{{ 7 * 7 }}"}]}),
    ("fetch", {"wanted": [["nobody", 0, None]]}),
    ("fetch", {"wanted": [["OWNER-a-b", 0, None]]}),
    ("fetch", {"wanted": [["OWNER-a-b", -1, None]]}),
    ("fetch", {"wanted": [["OWNER-a-b", 0, 1 << 62]]}),
    ("fetch", {"wanted": [["OWNER-a-b", 0, -7]]}),
    ("fetch", {"wanted": []}),
    *(("lens", {"wanted": [[run, point, op]] * many, "top": top}) for run, point, op, many, top in (
        ("nobody", 0, None, 1, 5), ("OWNER-a-b", 0, None, 1, 5), ("OWNER-a-b", 0, None, 0, 5), ("OWNER-a-b", -1, None, 1, 5),
        ("OWNER-a-b", 1 << 62, None, 1, 5), ("OWNER-a-b", 0, 1 << 62, 1, 5), ("OWNER-a-b", 0, None, 1, 0),
        ("OWNER-a-b", 0, None, 1, 1 << 40), ("OWNER-a-b", 0, None, 5000, 128),
    )),
    ("free", {"release": ["nobody"]}),
    ("free", {"release": ["x" * 100_000]}),
    ("sampling", {"temperature": float("nan")}),
    ("sampling", {"extra_args": {"patchclamp": b"x"}}),
    ("sampling", {"temperature": 1 << 63}),
    ("sampling", {"stop": [7]}),
    ("sampling", {"logit_bias": {"1000000000000": 5}}),
    ("sampling", {"bad_words": ["\x00"]}),
    ("sampling", {"structured_outputs": {"regex": "(" * 100}}),
    ("run", {"requests": []}),
    ("run", {"requests": [{"run": "OWNER-a-b", "prompt_token_ids": [], "max_tokens": 1}]}),
    ("run", {"requests": [{"run": "OWNER-a-b", "prompt_token_ids": [1 << 40], "max_tokens": 1}]}),
    ("run", {"requests": [{"run": "OWNER-a-b", "prompt_token_ids": [-1], "max_tokens": 1}]}),
    ("run", {"requests": [{"run": "OWNER-a-b", "prompt_token_ids": [1], "max_tokens": 1 << 40}]}),
    ("run", {"requests": [{"run": "OWNER-a-b", "prompt_token_ids": [1], "max_tokens": 1, "logprobs": 1 << 40}]}),
    ("run", {"requests": [{"run": "OWNER-a-b", "prompt_token_ids": [1], "max_tokens": 1, "logprobs": -7}]}),
    ("run", {"requests": [{"run": "OWNER-a-b", "prompt_token_ids": [1], "max_tokens": 1, "score": [1 << 40]}]}),
    ("run", {"requests": [{"run": "OWNER-a-b", "prompt_token_ids": [1], "max_tokens": 1, "score": list(range(5000))}]}),
    ("run", {"requests": [{"run": "OWNER-a-b", "prompt_token_ids": [1], "max_tokens": 1, "carried": b"x"}]}),
    ("run", {"requests": [{"run": "OWNER-a-b", "prompt_token_ids": [1], "max_tokens": 1}] * 2}),
    ("run", {"requests": [{"run": "OWNER-a-b", "prompt_token_ids": [1], "max_tokens": 1}] * 600}),
    ("run", {"requests": [], "vectors": struct.pack("<Q", 1 << 62)}),
    ("run", {"requests": [], "vectors": file({"v:x": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}, bytes(4))}),
)  # fmt: skip
