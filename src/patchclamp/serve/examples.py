"""The examples of the server's OpenAPI page. `tests/serve/test_openapi.py` runs every one."""

from __future__ import annotations

from typing import Any

Example = tuple[str, dict[str, Any]]  # what it shows, and a body without its model
NOISE = {"type": "noise", "at": "embed", "std": 0.2, "relative": True, "seed": 3}
SCALE = {"type": "scale", "at": "attn_out[2]", "factor": 0.5, "tokens": "prompt[-1]"}
LAST = {"type": "capture", "at": "resid_post[2]", "tokens": "prompt[-1]"}
PATCH = {
    "type": "replace", "at": "resid_post[2]", "tokens": "prompt[-1]",
    "value": {"type": "from", "run": "italy", "site": "resid_post[2]", "position": "prompt[-1]"},
}  # fmt: skip
FRANCE = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
ITALY = {"prompt": "The capital of Italy is", "max_tokens": 1, "temperature": 0}
COLOUR = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 4, "temperature": 0}

EXAMPLES: dict[str, dict[str, Example]] = {  # by path
    "/v1/completions": {
        "edit": ("An edit and a capture", {**FRANCE, "patchclamp": {"edits": [SCALE], "capture": [LAST]}}),
        "keep": ("A run that is kept under a name", {**ITALY, "patchclamp": {"capture": [LAST], "run": "italy"}}),
        "patch": ("An activation patch from that run", {**FRANCE, "patchclamp": {"edits": [PATCH]}}),
        "fuzz": ("Fuzzing, by scalars alone", {**FRANCE, "vllm_xargs": {"fuzz_strength": 0.2, "fuzz_seed": 3}}),
        "stream": ("A stream, which ends with the patchclamp object", {
            **FRANCE, "stream": True, "patchclamp": {"edits": [NOISE]}}),
    },
    "/v1/chat/completions": {
        "compare": ("A chat with noise, and the unedited answer", {
            **COLOUR, "patchclamp": {"edits": [NOISE], "compare": True}}),
    },
}  # fmt: skip
PROGRAM = {"edits": [SCALE, NOISE]}
VECTOR = [0.25, -1.0, 0.5, 2.0]
SWEEPS: list[Any] = [
    {"clean": "The Eiffel Tower is in", "corrupt": "The Colosseum is in", "answer": " Paris", "foil": " Rome",
     "sites": ["resid_pre"], "layers": "0:4"},
    {"clean": ["The Eiffel Tower is in", "The Louvre is in"], "corrupt": ["The Colosseum is in", "The Forum is in"],
     "answer": " Paris", "foil": " Rome", "sites": ["z"], "group": 1, "layers": "2:4",
     "positions": {"end": "prompt[-1]"},
     "source": {"type": "mean", "prompts": ["The Big Ben is in", "The Kremlin is in"], "tokens": "prompt[-1]"}},
    {"clean": "The Eiffel Tower is in", "corrupt": "The Colosseum is in", "answer": " Paris", "foil": " Rome",
     "zoom": 2, "resume": "eiffel"},
]  # fmt: skip
