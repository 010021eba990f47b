"""The site table of an engine's model: its family's table, or one derived from its modules.

Without a family table, a table is derived from Transformers' own class if vLLM's Transformers backend runs the model.
For vLLM's own class, a dry run without data finds the table once, and the result is cached on disk. The run needs
process groups, a configuration and step sizes, all global in vLLM, so it uses a separate process:

    python -m patchclamp.engines.vllm.compat.architecture < pickled VllmConfig > JSON of `TraceResult`

Weights are not read: large tensors are on the meta device from the start, small ones move to it once the model is
created.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import math
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from patchclamp.engines.preflight import cache_folder
from patchclamp.engines.vllm.compat import configuration
from patchclamp.engines.vllm.compat.seams import forwards, version
from patchclamp.errors import ModelError, Packed, pack, unpack
from patchclamp.sites import LENS, Family, SiteMap, Sizes, family_of, has_table, sizes_of, tables
from patchclamp.sites.untabled import (
    NotFound,
    Places,
    Record,
    T,
    check_stream,
    family_of_places,
    no_text_model,
    places,
    record_of,
    refuse,
    transformers_places,
    untabled,
)
from patchclamp.store.system import write_whole
from patchclamp.version import __version__

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LIMIT_S = 600
LARGE = 1 << 12  # numbers in a tensor; larger ones are created without data
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full)
USE_TRANSFORMERS = 'With model_impl="transformers" vLLM runs Transformers\' own class, whose modules give a site table'


def site_map(vllm_config: VllmConfig) -> SiteMap:
    """Return the site map of an engine's model, which is the same in the front end and every worker. A derived table is
    read from patchclamp's section of the configuration, not derived again."""
    table = (configuration.enabled(vllm_config) or {}).get("table")
    return _map_of(vllm_config, msgspec.json.decode(table, type=Family)) if table else find_sites(vllm_config)


def find_sites(vllm_config: VllmConfig) -> SiteMap:
    """Find the site map of an engine's model, from a table or from the model's class, or raise `ModelError` with
    advice."""
    return _map_of(vllm_config, _family(vllm_config, configuration.model_facts(vllm_config)))


def carried(sites: SiteMap) -> str:
    """Encode a site map's table for the configuration; "" if the table is one of `sites.tables`."""
    return "" if sites.family.tabled else msgspec.json.encode(sites.family).decode()


def _map_of(vllm_config: VllmConfig, family: Family) -> SiteMap:
    facts = configuration.model_facts(vllm_config)
    sites = SiteMap(family, sizes_of(facts["config"], facts["d_vocab"]), facts["tensor_parallel"], facts["stages"])
    sites.no_attention = configuration.unread_attention(vllm_config, facts["config"])
    if vllm_config.lora_config is not None:  # adapters apply only to rows of sampled tokens
        sites.withdrawn[LENS] = "lenses are not supported with adapters: start the engine without enable_lora"
    return sites


def _family(vllm_config: VllmConfig, facts: dict[str, Any]) -> Family:
    """Return the model's site table. Raises `ModelError`, with advice, for a model without one."""
    architectures, config = facts["architectures"], facts["config"]
    # the decoder may be one part of the model, beside a tower for images or sound
    is_nested = vllm_config.model_config.hf_config is not config
    if not vllm_config.model_config.using_transformers_backend():
        try:
            family = family_of(architectures, config)
        except ModelError as no_table:
            error = no_table
            if not tables.is_listed(architectures):
                if is_nested:
                    raise no_text_model(architectures) from None
                check_stream(config)
                try:
                    return found_family(vllm_config)
                except ModelError as not_found:
                    error = not_found
            raise ModelError(f"{error}. {_advice(vllm_config, facts)}") from None
        if family.backend:
            raise ModelError(
                f"the site table of {family.name} models requires vLLM's Transformers backend. {USE_TRANSFORMERS}"
            )
        factor = getattr(config, family.divided_by, None) if family.divided_by else None
        if facts["dtype"] == "float16" and factor not in (None, 1):
            raise ModelError(
                f"float16 is not supported for {family.name} models, as vLLM divides their stream by "
                f'{family.divided_by} ({factor}); use dtype="bfloat16"'
            )
        return family
    if has_table(architectures, config):
        family = family_of(architectures, config)
        if family.backend:
            return family
    if is_nested:
        raise no_text_model(architectures)
    with outside(vllm_config):
        return untabled(config, facts["trust_remote_code"])


def _advice(vllm_config: VllmConfig, facts: dict[str, Any]) -> str:
    """Return advice for a vLLM class without a table. It suggests only options that were verified for this config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as classes

    kind: Any = classes.get(type(facts["config"]), None)
    if kind is not None and not getattr(kind, "_supports_attention_backend", False):
        return f'vLLM does not support Transformers\' own {kind.__name__} either; engine="transformers" may'
    try:
        with outside(vllm_config):
            transformers_places(facts["config"], facts["trust_remote_code"])
    except ModelError as error:
        return f"With Transformers' own class: {error}"
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        return f"Transformers cannot create a model from this config to derive a site table ({why})"
    return USE_TRANSFORMERS


# -- vLLM's Transformers backend


@contextmanager
def outside(vllm_config: VllmConfig) -> Iterator[None]:
    """Inside the context, create models of decorated classes (`share`) without compiling them."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(_uncompiled(vllm_config)):
        yield


def share(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    """Make the classes of an engine's model usable in this process as if undecorated.

    The backend decorates Transformers' class for `torch.compile` until the process ends. Without `share`, existing
    models of that class stop working, and none can be created outside an engine.
    """
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    for decorated in {type(module) for module in model.modules()}:
        is_theirs = TorchCompileWithNoGuardsWrapper in decorated.__bases__
        if is_theirs and not decorated.__module__.startswith("vllm.") and "do_not_compile" not in vars(decorated):
            kind: Any = decorated
            kind.do_not_compile = True  # an engine's own model has this attribute, False, on the instance
            kind.__init__ = _made_anywhere(kind.__init__, _uncompiled(vllm_config))


def _made_anywhere(init: Any, uncompiled: VllmConfig) -> Any:
    """Wrap a decorated class's `__init__` to use the configuration `uncompiled` outside an engine."""
    from vllm.config import get_current_vllm_config_or_none

    @forwards(init)
    def __init__(self: Any, *args: Any, vllm_config: VllmConfig | None = None, **kwargs: Any) -> None:
        init(self, *args, vllm_config=vllm_config or get_current_vllm_config_or_none() or uncompiled, **kwargs)

    return __init__


def _uncompiled(vllm_config: VllmConfig) -> VllmConfig:
    """Copy a configuration, without compilation and without the engine's layers."""
    from vllm.config import CompilationMode

    uncompiled = copy.copy(vllm_config)
    uncompiled.compilation_config = copy.copy(vllm_config.compilation_config)
    uncompiled.compilation_config.mode = CompilationMode.NONE
    uncompiled.compilation_config.static_forward_context = {}
    return uncompiled


# -- vLLM's own class


def found_family(vllm_config: VllmConfig) -> Family:
    """Find the table of a model's vLLM class in a separate process. The table also covers Transformers' class if its
    sites can be derived. Raises `ModelError` if no stream is found in vLLM's class."""
    facts = configuration.model_facts(vllm_config)
    config = facts["config"]
    own = _kept(vllm_config)
    try:
        with outside(vllm_config):
            theirs, _ = transformers_places(config, facts["trust_remote_code"])
    except Exception:  # Transformers has no such class, or no stream is found in it: use vLLM's alone
        theirs = None
    sizes = sizes_of(config, facts["d_vocab"])
    return family_of_places(f"{config.model_type} (vLLM's class)", config, theirs, own, sizes)


def _kept(vllm_config: VllmConfig) -> Places:
    """Return the sites found in vLLM's class, from the disk cache if the config and versions match."""
    path = cache_folder() / "tables" / f"{_key(vllm_config)}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Places)
    except (OSError, msgspec.DecodeError):
        traced = _traced_places(vllm_config)
        with contextlib.suppress(OSError):  # a cache
            write_whole(path, msgspec.json.encode(traced))
        return traced


def _key(vllm_config: VllmConfig) -> str:
    """Return a table's cache key: a hash of the model's config and of the code that builds and reads the model."""
    import transformers

    config = configuration.model_facts(vllm_config)["config"]
    versions = (version(), torch.__version__, transformers.__version__, __version__, _code())
    facts = (config.to_json_string(use_diff=False), getattr(config, "_commit_hash", None), versions)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


@functools.cache
def _code() -> str:
    """Return a hash of the code that finds tables."""
    root = Path(__file__).parents[3]
    files = [*sorted((root / "sites").glob("*.py")), Path(__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class TraceResult(msgspec.Struct):
    """The sites found in vLLM's class, or the error."""

    places: Places | None = None
    error: Packed | None = None


def _traced_places(vllm_config: VllmConfig) -> Places:
    """Run this module in a subprocess, and return the sites that it found or raise its error."""
    command = [sys.executable, "-m", __name__]
    variables = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    ran = subprocess.run(command, input=pickle.dumps(vllm_config), capture_output=True, timeout=LIMIT_S, env=variables)
    try:
        result = msgspec.json.decode(ran.stdout, type=TraceResult)
    except msgspec.DecodeError:
        last = ran.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ModelError(f"the process that traces vLLM's class exited with code {ran.returncode}: {last}") from None
    if result.places is None:
        assert result.error is not None
        raise unpack(result.error)
    return result.places


def main() -> None:
    """Write the result to the original standard output; redirect vLLM's own output to standard error."""
    results = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        from transformers.dynamic_module_utils import init_hf_modules
        from vllm.plugins import load_general_plugins

        init_hf_modules()  # the config's class may come from the checkpoint
        load_general_plugins()  # they may register model classes
        result = TraceResult(_traced(pickle.load(sys.stdin.buffer)))
    except Exception as error:
        result = TraceResult(error=pack(error))
    os.write(results, msgspec.json.encode(result))


def _traced(vllm_config: VllmConfig) -> Places:
    """Find the sites by running vLLM's class. Raises `ModelError` if it cannot be run or has no stream."""
    model_config = vllm_config.model_config
    sizes = sizes_of(model_config.hf_text_config, model_config.get_vocab_size())
    model: Any = None
    try:
        with _alone(_plain(vllm_config)) as plain:
            model = _without_data(plain)
            record = _run(model, plain, sizes)
        return places(type(model).__name__, record, sizes, T)
    except NotFound as why:
        raise refuse(f"vLLM's {type(model).__name__}", str(why)) from None
    except Exception as error:
        name = type(model).__name__ if model is not None else ", ".join(model_config.architectures)
        raise refuse(f"vLLM's {name}", f"a dry run without weights failed: {type(error).__name__}: {error}") from error


def _plain(vllm_config: VllmConfig) -> VllmConfig:
    """Return a configuration of the same model on one worker, unquantized, with every op in plain PyTorch."""
    plain = _uncompiled(vllm_config)
    plain.quant_config = None
    plain.compilation_config.custom_ops = ["none"]
    parallel_config = plain.parallel_config = copy.copy(vllm_config.parallel_config)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "world_size"):
        setattr(parallel_config, name, 1)
    parallel_config.enable_expert_parallel = False
    return plain


@contextmanager
def _alone(plain: VllmConfig) -> Iterator[VllmConfig]:
    """Set up a process group of one, and make `plain` vLLM's current configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(plain):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        dtype: Any = plain.model_config.dtype
        torch.set_default_dtype(dtype)
        yield plain


class _Large(TorchFunctionMode):
    """Creates large tensors on the meta device. Small tensors may be read while a model is created."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in FACTORIES:
            size = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
            if math.prod(int(number) for number in size if isinstance(number, int)) > LARGE:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _without_data(plain: VllmConfig) -> Any:
    """Create a model of vLLM's own class on the meta device."""
    from vllm.model_executor.model_loader.utils import initialize_model

    with _Large():
        model = initialize_model(plain)
    model = model.to("meta").eval()
    for linear in model.modules():
        for key, value in list(vars(linear).items()):
            if torch.is_tensor(value):  # neither a parameter nor a buffer
                setattr(linear, key, value.to("meta"))
        if hasattr(linear, "quant_method") and hasattr(linear, "weight"):
            vars(linear)["cpu_linear"] = torch.nn.functional.linear  # on a CPU, vLLM sets it after loading weights
    return model


def _run(model: Any, plain: VllmConfig, sizes: Sizes) -> Record:
    """Run a step of T tokens without attention metadata, as in vLLM's memory profiling; return its record."""
    from vllm.forward_context import set_forward_context

    torch.is_autocast_enabled = lambda *arguments: False  # the meta device has no autocast
    torch.amp.autocast = lambda *arguments, **options: contextlib.nullcontext()  # type: ignore[misc,assignment]
    with set_forward_context(None, plain, num_tokens=T), torch.no_grad(), torch.device("meta"):
        ids, positions = (torch.zeros(T, dtype=torch.long) for _ in range(2))
        given = {"input_ids": ids, "positions": positions, "intermediate_tensors": None, "inputs_embeds": None}
        return record_of(model, sizes, ids, lambda: model(**given))


if __name__ == "__main__":
    main()
