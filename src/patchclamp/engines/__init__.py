"""The engines, which run programs, and `open_engine`, which opens an engine with a model loaded.

One protocol (`base`) has implementations for vLLM, Transformers and HTTP, and a fake in `patchclamp.testing`.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from patchclamp.engines.base import Engine, VllmLLM
from patchclamp.engines.preflight import check_checkpoint, model_name
from patchclamp.errors import EngineError, ModelError, unknown

NAMES = ("vllm", "transformers", "fake")


def open_engine(
    model: str | VllmLLM, engine: str | Engine | None, options: dict[str, Any], probes: Sequence[Any] = ()
) -> Engine:
    """Open the named (or default) engine with `model` loaded; an engine object is returned unchanged."""
    if engine is not None and not isinstance(engine, str):
        if not hasattr(engine, "submit"):
            raise ModelError(f"expected an engine name or an engine, got {type(engine).__name__}", "engine")
        if given := [*options, *(["probes"] if probes and engine.monitors else [])]:
            raise EngineError(f"the engine is already loaded: omit {', '.join(given)}", given[0])
        if model not in ("", engine.model.name):
            raise ModelError(f"expected {engine.model.name!r}, the loaded model, got {model!r}", "model")
        return engine
    if not isinstance(model, str) and hasattr(model, "llm_engine"):
        return _of_llm(model, engine, {**options, **({"probes": probes} if probes else {})})
    model = model_name(model)
    if model.startswith(("http://", "https://")):
        return _open_server(model, engine, options)
    name = ("fake" if model == "fake" else default_engine()) if engine is None else engine
    if name not in NAMES:
        raise unknown("engine", name, NAMES, "engine")
    if name == "fake":
        from patchclamp.testing import FakeEngine

        return FakeEngine(**_checked(FakeEngine, options))
    path = resolve(model, options)
    if name == "vllm":
        from patchclamp.engines.vllm.sync_engine import VllmEngine

        return VllmEngine(path, **options, **({"probes": list(probes)} if probes else {}))
    from patchclamp.engines.transformers import TransformersEngine

    return TransformersEngine(path, **_checked(TransformersEngine, options))


def _of_llm(llm: VllmLLM, engine: str | None, options: dict[str, Any]) -> Engine:
    """Return the engine that runs programs on a `vllm.LLM`."""
    from patchclamp.engines.vllm.offline import offline_of

    if engine not in (None, "vllm") or options:
        given = next(iter(options), "engine")
        raise EngineError(f"a vllm.LLM already has an engine and options: omit {given}", given)
    return offline_of(llm.llm_engine)


def _open_server(url: str, engine: str | None, options: dict[str, Any]) -> Engine:
    if engine is not None:
        raise EngineError(f"{url} is a server with its own engine: omit engine={engine!r}", "engine")
    from patchclamp.engines.http import HttpEngine

    return HttpEngine(url, **_checked(HttpEngine, options))


def default_engine() -> str:
    """Return "vllm" if it is installed, else "transformers"."""
    for name in ("vllm", "transformers"):
        if importlib.util.find_spec(name) is not None:
            return name
    raise EngineError("no engine is installed: pip install 'patchclamp[vllm]' or 'patchclamp[transformers]'")


def resolve(model: str, options: Mapping[str, Any]) -> str:
    """Return a model's hub id or folder (created for "smollm2"). Raises `ModelError` if the model cannot be loaded."""
    if model != "smollm2":
        check_checkpoint(model, options)
        return model
    from patchclamp.engines.preflight import prepare

    return str(prepare())


def _checked(kind: type, options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` unchanged. Raises `UnknownName` for an option that the engine class does not accept."""
    names = _options(kind)
    for option in options:
        if option not in names:
            raise unknown("engine option", option, names, option)
    return options


def known_options(engine: str) -> list[str]:
    """Return the names of an engine's options. Raises `UnknownName` for an unknown engine."""
    if engine == "fake":
        from patchclamp.testing import FakeEngine

        return _options(FakeEngine)
    if engine == "transformers":
        from patchclamp.engines.transformers import TransformersEngine

        return _options(TransformersEngine)
    if engine == "vllm":
        from patchclamp.engines.vllm import sync_engine

        return sync_engine.known_options()
    raise unknown("engine", engine, NAMES, "engine")


def _options(kind: type) -> list[str]:
    return [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "name", "url")]
