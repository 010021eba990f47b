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

    given = {word.lstrip("-").partition("=")[0].replace("-", "_"): word for word in context.args if word[:2] == "--"}
    loading = {"load_format": ""} if "load_format" in given else {}
    run_server(resolve(model_name(model), {**given, **loading, "revision": None}), context.args)


serve.context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}
