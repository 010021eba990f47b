"""The site table of an engine's model: its family's, or one made of its modules where those are Transformers' own."""

from __future__ import annotations

from typing import Any

import msgspec

from patchclamp.engines.vllm.compat import backend, configuration
from patchclamp.engines.vllm.found import found_family
from patchclamp.errors import ModelError
from patchclamp.sites import Family, SiteMap, family_of, has_table, sizes_of, tables
from patchclamp.sites.untabled import check_stream, no_text_model, transformers_places, untabled


def site_map(vllm_config: Any) -> SiteMap:
    """The site map of an engine's model; the same in the front end and in every worker. A table that was found in
    vLLM's class is read from our part of the configuration, and not looked for again."""
    table = (configuration.enabled(vllm_config) or {}).get("table")
    return _map_of(vllm_config, msgspec.json.decode(table, type=Family)) if table else find_sites(vllm_config)


def find_sites(vllm_config: Any) -> SiteMap:
    """The site map of an engine's model, from a table or from the model's class.

    Raises: `ModelError`, with what to do, for a model that has none.
    """
    return _map_of(vllm_config, _family(vllm_config, configuration.model_facts(vllm_config)))


def carried(sites: SiteMap) -> str:
    """The table of a map, as a configuration carries it; "" if it stands in `sites.tables`."""
    return "" if sites.family.tabled else msgspec.json.encode(sites.family).decode()


def _map_of(vllm_config: Any, family: Family) -> SiteMap:
    facts = configuration.model_facts(vllm_config)
    return SiteMap(family, sizes_of(facts["config"], facts["d_vocab"]), facts["tensor_parallel"], facts["stages"])


def _advice(vllm_config: Any, facts: dict[str, Any]) -> str:
    """What to do about a class of vLLM's in which no table is found: only what was tried is promised."""
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
    """The site table. Raises `ModelError`, with what to do, for a model that has none."""
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
    """The table that is found in vLLM's own class."""
    if backend.nested(vllm_config):
        raise no_text_model(facts["architectures"])
    check_stream(facts["config"])
    try:
        return found_family(vllm_config)
    except ModelError as error:
        raise ModelError(f"{error}. {_advice(vllm_config, facts)}") from None
