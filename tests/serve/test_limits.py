"""Limits of a server are read when it starts, and change nothing in what vLLM compiles. Its numerics do."""

from __future__ import annotations

import pytest
from vllm.engine.arg_utils import EngineArgs

from patchclamp.engines.vllm.compat.configuration import KEY, is_uniform
from patchclamp.engines.vllm.server import serving
from patchclamp.errors import EngineError, UnknownName


def config(model, **parts):
    arguments = EngineArgs(model=model, dtype="float32", max_model_len=512, additional_config={KEY: parts})
    first, second = arguments.create_engine_config(), arguments.create_engine_config()
    assert serving(first) == serving(second)
    return first


def test_limits_are_no_part_of_the_key_of_the_compile_cache(model):
    plain, tight = config(model), config(model, serve={"body_bytes": 5, "run_ttl_s": 1.5})
    assert (serving(tight).body_bytes, serving(tight).run_ttl_s) == (5, 1.5)
    assert serving(plain).body_bytes == 1 << 26
    assert tight.compute_hash() == plain.compute_hash()
    assert config(model, limits={"max_records": 1 << 10}).compute_hash() != plain.compute_hash()


def test_numerics_are_stocks_unless_asked_for_and_part_of_the_key(model):
    plain, stock, uniform = config(model), config(model, numerics="stock"), config(model, numerics="uniform")
    assert [is_uniform(each) for each in (plain, stock, uniform)] == [False, False, True]
    assert plain.compute_hash() == stock.compute_hash() != uniform.compute_hash()


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        ({"serve": {"body": 5}}, EngineError, "unknown field `body`"),
        ({"serve": {"body_bytes": "many"}}, EngineError, "Expected `int`"),
        ({"serve": {"run_ttl_s": 0}}, EngineError, "run_ttl_s"),
        ({"numerics": "stok"}, UnknownName, "'stok' .did you mean 'stock'"),
        ({"server": {}}, UnknownName, "did you mean 'serve'"),
    ],
)
def test_limits_that_are_none_are_refused_at_the_start(model, parts, error, text):
    with pytest.raises(error, match=text):
        config(model, **parts)
