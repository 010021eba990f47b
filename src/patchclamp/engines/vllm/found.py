"""The site table of vLLM's own class of a model, where we have none: found once, and kept on disk."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from patchclamp import __version__
from patchclamp.engines.smollm2 import cache_folder
from patchclamp.engines.vllm.compat import backend, blueprint, configuration, seams
from patchclamp.errors import ModelError, unpack
from patchclamp.sites import Family, sizes_of
from patchclamp.sites.untabled import Places, family_of_places, transformers_places
from patchclamp.store.whole_file import write_whole

LIMIT_S = 600


def found_family(vllm_config: Any) -> Family:
    """The table of vLLM's class of a model, found in a process of its own, beside Transformers' class, where that
    gives one. Raises `ModelError` if vLLM's class has no stream that can be found."""
    facts = configuration.model_facts(vllm_config)
    config = facts["config"]
    sizes = sizes_of(config, facts["d_vocab"])
    own = _kept(vllm_config)
    try:
        with backend.outside(vllm_config):
            theirs, _ = transformers_places(config, facts["trust_remote_code"])
    except Exception:  # Transformers has no such class, or no stream is found in it: vLLM's stands alone
        theirs = None
    return family_of_places(f"{config.model_type} (vLLM's class)", config, theirs, own, sizes)


def _kept(vllm_config: Any) -> Places:
    """What was found in vLLM's class: now, or by an earlier start with the same config and versions."""
    path = cache_folder() / "tables" / f"{_key(vllm_config)}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Places)
    except (OSError, msgspec.DecodeError):
        places = _traced_places(vllm_config)
        write_whole(path, msgspec.json.encode(places))
        return places


def _traced_places(vllm_config: Any) -> Places:
    """Runs `blueprint` and reads its answer."""
    command = [sys.executable, "-m", blueprint.__name__]
    variables = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    ran = subprocess.run(command, input=pickle.dumps(vllm_config), capture_output=True, timeout=LIMIT_S, env=variables)
    try:
        answer = msgspec.json.decode(ran.stdout, type=blueprint.Answer)
    except msgspec.DecodeError:
        last = ran.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ModelError(f"the process that looks at vLLM's class ended with {ran.returncode}: {last}") from None
    if answer.places is None:
        assert answer.error is not None
        raise unpack(answer.error)
    return answer.places


def _key(vllm_config: Any) -> str:
    """What a table depends on: the model's config, and the code that makes and reads the model."""
    import torch
    import transformers

    config = configuration.model_facts(vllm_config)["config"]
    versions = (seams.version(), torch.__version__, transformers.__version__, __version__, _code())
    facts = (config.to_json_string(use_diff=False), getattr(config, "_commit_hash", None), versions)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


@functools.cache
def _code() -> str:
    """A hash of our code that finds tables."""
    root = Path(__file__).parents[2]
    files = [*sorted((root / "sites").glob("*.py")), Path(blueprint.__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
