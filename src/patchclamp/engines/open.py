"""Which engine carries a model, and which model a name means."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

from patchclamp.engines.base import Engine
from patchclamp.engines.preflight import check_checkpoint, model_name
from patchclamp.errors import EngineError, ModelError, unknown

NAMES = ("vllm", "transformers", "fake")


def open_engine(model: str, engine: str | Engine | None, options: dict[str, Any]) -> Engine:
    """The engine that `engine` names (or the default) with `model` loaded; an engine object is returned as it is."""
    if engine is not None and not isinstance(engine, str):
        if not hasattr(engine, "submit"):
            raise ModelError(f"expected an engine's name or an engine, got {type(engine).__name__}", "engine")
        return engine
    model = model_name(model)
    if model.startswith(("http://", "https://")):
        return _open_server(model, engine, options)
    name = ("fake" if model == "fake" else default_engine()) if engine is None else engine
    if name not in NAMES:
        raise unknown("engine", name, NAMES, "engine")
    if name == "fake":
        from patchclamp.engines.fake import FakeEngine

        return FakeEngine(**_checked(FakeEngine, options))
    path = resolve(model, options)
    if name == "vllm":
        from patchclamp.engines.vllm.frontend import VllmEngine

        return VllmEngine(path, **options)
    from patchclamp.engines.transformers import TransformersEngine

    return TransformersEngine(path, **_checked(TransformersEngine, options))


def _open_server(url: str, engine: str | None, options: dict[str, Any]) -> Engine:
    if engine is not None:
        raise EngineError(f"{url} is a server, which has its engine: leave engine={engine!r} out", "engine")
    from patchclamp.engines.http import HttpEngine

    return HttpEngine(url, **_checked(HttpEngine, options))


def default_engine() -> str:
    """vLLM where it is installed, else Transformers."""
    for name in ("vllm", "transformers"):
        if importlib.util.find_spec(name) is not None:
            return name
    raise EngineError("no engine is installed: pip install 'patchclamp[vllm]' or 'patchclamp[transformers]'")


def resolve(model: str, options: Mapping[str, Any]) -> str:
    """The folder or hub id of a model; "smollm2" is prepared on first use. Raises `ModelError` for one that an engine
    with these options could not load."""
    if model != "smollm2":
        check_checkpoint(model, options)
        return model
    from patchclamp.engines.preflight import prepare

    return str(prepare())


def _checked(kind: type, options: dict[str, Any]) -> dict[str, Any]:
    """The options. Raises `UnknownName` for one that an engine's class does not take."""
    names = _options(kind)
    for option in options:
        if option not in names:
            raise unknown("engine option", option, names, option)
    return options


def known_options(engine: str) -> list[str]:
    """The names of the options that an engine takes. Raises `UnknownName` for an engine that there is not."""
    if engine == "fake":
        from patchclamp.engines.fake import FakeEngine

        return _options(FakeEngine)
    if engine == "transformers":
        from patchclamp.engines.transformers import TransformersEngine

        return _options(TransformersEngine)
    if engine == "vllm":
        from patchclamp.engines.vllm import frontend

        return frontend.known_options()
    raise unknown("engine", engine, NAMES, "engine")


def _options(kind: type) -> list[str]:
    return [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "name", "url")]
