"""The site table of an engine's model: its family's, or one derived from its modules.

Without a family table, one is derived from Transformers' own class if vLLM's Transformers backend runs the model. For
vLLM's own class, it is found once by tracing, and cached on disk.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from patchclamp.engines.preflight import cache_folder
from patchclamp.engines.vllm.compat import backend, blueprint, configuration, seams
from patchclamp.errors import ModelError, unpack
from patchclamp.sites import Family, SiteMap, family_of, has_table, sizes_of, tables
from patchclamp.sites.untabled import (
    Places,
    check_stream,
    family_of_places,
    no_text_model,
    transformers_places,
    untabled,
)
from patchclamp.store.system import write_whole
from patchclamp.version import __version__

LIMIT_S = 600


def found_family(vllm_config: Any) -> Family:
    """Find the table of vLLM's class of a model, by a run in a separate process. It includes the places in
    Transformers' class, if these can be derived. Raises `ModelError` if no stream is found in vLLM's class."""
    facts = configuration.model_facts(vllm_config)
    config = facts["config"]
    sizes = sizes_of(config, facts["d_vocab"])
    own = _kept(vllm_config)
    try:
        with backend.outside(vllm_config):
            theirs, _ = transformers_places(config, facts["trust_remote_code"])
    except Exception:  # Transformers has no such class, or no stream is found in it: use vLLM's alone
        theirs = None
    return family_of_places(f"{config.model_type} (vLLM's class)", config, theirs, own, sizes)


def _kept(vllm_config: Any) -> Places:
    """Return the places in vLLM's class, from the disk cache if the config and versions match."""
    path = cache_folder() / "tables" / f"{_key(vllm_config)}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Places)
    except (OSError, msgspec.DecodeError):
        places = _traced_places(vllm_config)
        with contextlib.suppress(OSError):
            write_whole(path, msgspec.json.encode(places))
        return places


def _traced_places(vllm_config: Any) -> Places:
    """Run `blueprint` in a subprocess and read its answer."""
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
    """Return a table's cache key: a hash of the model's config, and of the code that builds and reads the model."""
    import torch
    import transformers

    config = configuration.model_facts(vllm_config)["config"]
    versions = (seams.version(), torch.__version__, transformers.__version__, __version__, _code())
    facts = (config.to_json_string(use_diff=False), getattr(config, "_commit_hash", None), versions)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


@functools.cache
def _code() -> str:
    """Return a hash of our code that finds tables."""
    root = Path(__file__).parents[2]
    files = [*sorted((root / "sites").glob("*.py")), Path(blueprint.__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def site_map(vllm_config: Any) -> SiteMap:
    """Return the site map of an engine's model, which is the same in the front end and in every worker. A derived table
    is read from our part of the configuration instead of being derived again."""
    table = (configuration.enabled(vllm_config) or {}).get("table")
    return _map_of(vllm_config, msgspec.json.decode(table, type=Family)) if table else find_sites(vllm_config)


def find_sites(vllm_config: Any) -> SiteMap:
    """Find the site map of an engine's model, from a table or from the model's class. Raises `ModelError`, with advice,
    for a model without one."""
    return _map_of(vllm_config, _family(vllm_config, configuration.model_facts(vllm_config)))


def carried(sites: SiteMap) -> str:
    """Encode a map's table for the configuration; "" if it is one of `sites.tables`."""
    return "" if sites.family.tabled else msgspec.json.encode(sites.family).decode()


def _map_of(vllm_config: Any, family: Family) -> SiteMap:
    facts = configuration.model_facts(vllm_config)
    return SiteMap(family, sizes_of(facts["config"], facts["d_vocab"]), facts["tensor_parallel"], facts["stages"])


def _advice(vllm_config: Any, facts: dict[str, Any]) -> str:
    """Return advice for a vLLM class without a table. It only suggests what was verified for this config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as classes

    kind: Any = classes.get(type(facts["config"]), None)
    if kind is not None and not getattr(kind, "_supports_attention_backend", False):
        return f'vLLM does not run Transformers\' own {kind.__name__} either; engine="transformers" may'
    try:
        with backend.outside(vllm_config):
            transformers_places(facts["config"], facts["trust_remote_code"])
    except ModelError as error:
        return f"With Transformers' own class: {error}"
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        return f"Transformers makes no model of this config, from which one could be had ({why})"
    return _use_transformers_class()


def _use_transformers_class() -> str:
    return (
        'model_impl="transformers" has vLLM run Transformers\' own class, for which a table can be made of its modules'
    )


def _family(vllm_config: Any, facts: dict[str, Any]) -> Family:
    """Return the site table. Raises `ModelError`, with advice, for a model without one."""
    architectures, config = facts["architectures"], facts["config"]
    if not backend.used(vllm_config):
        try:
            family = family_of(architectures, config)
        except ModelError as error:
            if tables.is_listed(architectures):
                raise ModelError(f"{error}. {_advice(vllm_config, facts)}") from None
            return _found(vllm_config, facts)
        if family.backend:
            raise ModelError(
                f"the table of {family.name} models is for vLLM's Transformers backend. {_use_transformers_class()}"
            )
        factor = getattr(config, family.divided_by, None) if family.divided_by else None
        if facts["dtype"] == "float16" and factor not in (None, 1):
            raise ModelError(
                f"in float16 vLLM divides the stream of {family.name} models by {family.divided_by} ({factor}), and "
                'no site is that; use dtype="bfloat16"'
            )
        return family
    if has_table(architectures, config):
        family = family_of(architectures, config)
        if family.backend:
            return family
    if backend.nested(vllm_config):
        raise no_text_model(architectures)
    with backend.outside(vllm_config):
        return untabled(config, facts["trust_remote_code"])


def _found(vllm_config: Any, facts: dict[str, Any]) -> Family:
    """Find the table in vLLM's own class."""
    if backend.nested(vllm_config):
        raise no_text_model(facts["architectures"])
    check_stream(facts["config"])
    try:
        return found_family(vllm_config)
    except ModelError as error:
        raise ModelError(f"{error}. {_advice(vllm_config, facts)}") from None
