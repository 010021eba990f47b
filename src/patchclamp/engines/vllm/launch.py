"""Starts vLLM's own server command with patchclamp enabled."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import entry_points

from patchclamp.engines.vllm.compat import configuration
from patchclamp.engines.vllm.compat.configuration import KEY, MEGA
from patchclamp.engines.vllm.plugin import CAUSES
from patchclamp.errors import EngineError, PatchclampError, ProgramError, describe_error

CONFIG = "--additional-config"
FIX = "set the cache's size with --kv-cache-memory-bytes, or shorten --max-model-len"
GROUPS = ("general", "platform", "io_processor", "stat_logger", "endpoint")  # of plugins, by vLLM's names


def run_server(model: str, options: Sequence[str]) -> None:
    """Run `vllm serve MODEL OPTIONS` in this process, with patchclamp in its engine and our routes in its API servers.

    Raises `EngineError` with vLLM's Rust front end, which has fixed routes, and if the server stops with an error.
    Raises `ProgramError` for an `--additional-config` that is not a JSON object.
    """
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise EngineError(
            "vLLM's Rust front end has fixed routes: unset VLLM_USE_RUST_FRONTEND; with it, only vllm_xargs carry "
            "programs, in a server started by `vllm serve --additional-config '{\"patchclamp\": {}}'`"
        )
    os.environ.update(environment())
    # not vLLM's `main`: it looks up the version of the package "vllm", and the CPU build has another name
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="patchclamp")
    [command] = cmd_init()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    sys.argv = [
        "patchclamp",
        "serve",
        model,
        *with_config(options),
        *_cache_size(options),
    ]  # vLLM's parser reads it, too
    args = parser.parse_args(sys.argv[1:])
    assert args is not None
    configure_logging_from_args(args)
    command.validate(args)
    with tempfile.NamedTemporaryFile("r", prefix="patchclamp-start-") as causes:
        os.environ[CAUSES] = causes.name
        try:
            command.cmd(args)
        except PatchclampError:
            raise
        except Exception as error:
            cause = causes.readline().strip() or describe_error(error)
            fix = FIX if "memory" in cause.lower() or "cache" in cause.lower() else "the log above has the traceback"
            raise EngineError(f"the server stopped: {cause} ({fix})") from error


def _cache_size(options: Sequence[str]) -> list[str]:
    """Return the option for a cache that fits a CPU's memory; none on a GPU or if a size is given."""
    names = [word.partition("=")[0].lstrip("-").replace("-", "_") for word in options]
    if "config" in names:  # the file may set it
        return []
    arguments = dict.fromkeys(names)
    configuration.spare_memory(arguments)
    size = arguments.get("kv_cache_memory_bytes")
    return ["--kv-cache-memory-bytes", str(size)] if size is not None else []


def environment() -> dict[str, str]:
    """Return a server's environment variables. They name our plugin, and all others that vLLM would load anyway."""
    import torch

    named = os.environ.get("VLLM_PLUGINS")
    if named is None:
        installed = [point.name for kind in GROUPS for point in entry_points(group=f"vllm.{kind}_plugins")]
        # vLLM loads endpoint plugins only if they are named; name no others
        others = {point.name for point in entry_points(group="vllm.endpoint_plugins")}
        names = [name for name in dict.fromkeys(installed) if name not in others]
    else:
        names = [name for name in named.split(",") if name]
    variables = {"VLLM_PLUGINS": ",".join(dict.fromkeys([*names, KEY])), MEGA: "0"}
    if not torch.cuda.is_available():
        variables["VLLM_USE_AOT_COMPILE"] = os.environ.get("VLLM_USE_AOT_COMPILE", "0")
    return variables


def with_config(options: Sequence[str]) -> list[str]:
    """Return vLLM's options with our part in `--additional-config`."""
    rest, config = [], {}
    words = iter(options)
    for word in words:
        name, _, value = word.partition("=")
        if name.replace("_", "-") != CONFIG:
            rest.append(word)
            continue
        text = value or next(words, "")
        try:
            config = json.loads(text)
        except ValueError as error:
            raise ProgramError(f"not JSON: {error}", CONFIG) from None
        if not isinstance(config, dict):
            raise ProgramError(f"expected an object, got {text}", CONFIG)
    return [*rest, CONFIG, json.dumps({KEY: {}, **config})]
