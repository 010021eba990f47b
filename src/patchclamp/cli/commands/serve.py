"""`patchclamp serve`: vLLM's OpenAI server, with programs in its requests."""

from __future__ import annotations

import typer

from patchclamp.cli.arguments import Model


def serve(model: Model, context: typer.Context) -> None:
    """Start vLLM's OpenAI server with patchclamp on. Every option of `vllm serve` goes on to it.

    Clients that know nothing of patchclamp notice nothing; others give a `patchclamp` object with ordinary requests.
    """
    from patchclamp.engines.open import resolve
    from patchclamp.engines.preflight import model_name
    from patchclamp.engines.vllm.launch import run_server

    words = dict(zip(context.args, [*context.args[1:], ""], strict=True))
    given = {name.lstrip("-").replace("-", "_"): value if same else words[word] or word for word in context.args
             if word[:2] == "--" for name, same, value in [word.partition("=")]}  # fmt: skip
    run_server(resolve(model_name(model), given), context.args)


serve.context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}
