"""What vLLM loads of us: in every process the wrappers of its own code, in API servers that name us our routes too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from patchclamp.errors import SeamMoved, unknown
from patchclamp.language import ops

NAMES = ("patchclamp", *ops.NAMES)  # the words of `extra_args` that are ours
MAX_TYPOS = 2  # single-character edits that turn a word into one of ours


def is_ours(word: str) -> bool:
    """True for a word of `extra_args` that is ours, begins as ours do, or is one of ours with a typo."""
    if word in NAMES or word.lower().startswith(("fuzz_", "patchclamp")):
        return True
    return any(abs(len(word) - len(name)) <= MAX_TYPOS and _edits(word.lower(), name) <= MAX_TYPOS for name in NAMES)


def check_words(extra: dict[str, Any]) -> None:
    """Raise `UnknownName` for a word that is meant for us and is none of ours."""
    for word in extra:
        if word not in NAMES and is_ours(word):
            raise unknown("extra argument", word[:64], NAMES, f"vllm_xargs.{word[:64]}")


def _edits(word: str, name: str) -> int:
    """The Levenshtein distance of two words."""
    row = list(range(len(name) + 1))
    for i, letter in enumerate(word, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(name, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (letter != other))
    return row[-1]


def register() -> None:
    """Entry point of `vllm.general_plugins`: programs act in engines that ask for us, and in no others."""
    from patchclamp.engines.vllm import plugin
    from patchclamp.engines.vllm.compat import front

    plugin.register()
    try:
        front.on_generate(_edited, is_ours)
    except SeamMoved as moved:
        plugin.problem = plugin.problem or moved


def _edited(client: Any, stock: Any, prompt: Any, params: Any, request_id: str, **others: Any) -> AsyncIterator[Any]:
    from patchclamp.serve.carry import edited

    return edited(client, stock, prompt, params, request_id, **others)


class Endpoints:
    """Entry point of `vllm.endpoint_plugins`: our routes, in servers whose engine is ours."""

    name = "patchclamp"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        from patchclamp.serve.app import attach

        attach(app)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        from patchclamp.serve.app import start

        await start(engine_client, state, args)
