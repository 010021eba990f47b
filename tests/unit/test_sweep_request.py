"""Bodies of sweeps: only a number is a number, and nothing is converted."""

from __future__ import annotations

import inspect

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from patchclamp.serve import routes, schema
from patchclamp.serve.routes import MeanSource, ResampledSource, SweepRequest

ASKED = {"clean": "a b", "corrupt": [5, 6], "answer": " Paris"}
WRONG = {  # by field: what it does not take
    "clean": [5, 1.5, True, None, [5.0], [True], ["a", 5.0], [[5, "6"]], [[True]], b"a", {"a": 1}],
    "corrupt": [5, [5.0, True], [5.0], [True], [["5"]], None],
    "answer": [True, 5.0, [True], [5.0], [[1.0]], None],
    "foil": [True, 5.0, [True], [[5.0]]],
    "sites": ["resid_pre", [5], [True], None, ()],
    "layers": [True, 1.0, [True, 1], [1.0], ["1"]],
    "positions": [[True], [1.0], {"a": True}, {"a": [1.0]}, {1: 2}, "prompt[-1]", 5],
    "metric": [True, 1, None],
    "direction": [True, 1, None],
    "group": [True, "1", 1.0],
    "window": [True, "1", 1.0, None],
    "source": [True, 1, ["zeros"]],
    "alpha": ["0.5", True, None, float("nan"), float("inf")],
    "mask": [["1", True], [True], ["1"], [None], [float("nan")], 1.0],
    "zoom": [True, "1", 1.0, 0],
    "seed": [True, "1", 1.0, -1, None],
    "resume": [True, 1, ["a"]],
}
WRONG_SOURCES = {
    "prompts": ["a", [5], [[5.0]], [[True]], [["5"]], [], [True], None],
    "tokens": [True, 1.0, [1]],
    "by_position": [1, 0, "true", "yes", None],
    "seed": [True, "1", 1.0, -1, None],
    "draws": [True, "1", 1.0, 0, None],
}


def paths(caught) -> list[object]:
    return [error["loc"][0] for error in caught.value.errors()]


@pytest.mark.parametrize(("field", "wrong"), [(field, wrong) for field, all_of in WRONG.items() for wrong in all_of])
def test_a_field_of_another_type_is_refused_with_its_path(field, wrong):
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(SweepRequest).validate_python(ASKED | {field: wrong})
    assert set(paths(caught)) == {field}


@pytest.mark.parametrize("source", [MeanSource, ResampledSource])
def test_so_is_a_field_of_a_source(source):
    kind = {"type": "mean" if source is MeanSource else "resampled"}
    for field in source.model_fields.keys() - {"type"}:
        for wrong in WRONG_SOURCES[field]:
            with pytest.raises(ValidationError) as caught:
                TypeAdapter(SweepRequest).validate_python(
                    ASKED | {"source": kind | {"prompts": ["a"]} | {field: wrong}}
                )
            assert {error["loc"][:3] for error in caught.value.errors()} == {("source", kind["type"], field)} or (
                set(paths(caught)) == {"source"}
            )


def test_every_field_is_tried():
    assert WRONG.keys() == SweepRequest.model_fields.keys()
    assert WRONG_SOURCES.keys() == (MeanSource.model_fields.keys() | ResampledSource.model_fields.keys()) - {"type"}


def test_what_is_right_is_taken_as_it_is():
    body = ASKED | {
        "clean": ["a", [5, 6]], "corrupt": [[5, 6], "b"], "answer": [5, " b"], "foil": [None, [1, 2]], "layers": [1, 2],
        "positions": {"a": [1, "prompt[2]"], "b": -1}, "alpha": 1, "mask": [1, 0.5], "zoom": 2, "group": 1, "window": 3,
        "source": {"type": "mean", "prompts": ["a", [5]], "tokens": -1, "by_position": True}, "seed": 7,
    }  # fmt: skip
    made = TypeAdapter(SweepRequest).validate_python(body)
    assert made.model_dump(exclude_unset=True) == body


def test_every_body_that_is_read_by_pydantic_is_strict():
    models = [
        model
        for module in (routes, schema)
        for _, model in inspect.getmembers(module, inspect.isclass)
        if issubclass(model, BaseModel) and model.model_config.get("extra") == "forbid"
    ]
    assert SweepRequest in models
    assert all(model.model_config.get("strict") for model in models)
