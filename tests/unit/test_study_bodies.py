"""Fields of studies as they come from JSON: only a number is a number, and nothing is converted."""

from __future__ import annotations

import pytest

import patchclamp as pc
from patchclamp.studies import patch_sweep

ASKED = {"clean": [11, 12, 13], "corrupt": [11, 14, 13], "answer": 5, "foil": 6, "layers": 1}
WRONG = {  # by field: what it does not take
    "clean": [5, 1.5, True, None, [5.0], [True], ["a", 5.0], [[5, "6"]], [[True]], {"a": 1}],
    "corrupt": [5, [5.0, True], [5.0], [True], [["5"]], None],
    "answer": [True, 5.0, [True], [5.0], [[1.0]], None],
    "foil": [True, 5.0, [True], [[5.0]]],
    "sites": [[5], [True], None, [], ["resid_pro"]],
    "layers": [True, 1.0, [True, 1], [1.0], ["1"]],
    "positions": [[True], [1.0], {"a": True}, {"a": [1.0]}, {"a": [1, 2]}],
    "metric": [True, 1, None, "loss"],
    "direction": [True, 1, None, "forward"],
    "group": [True, "1", 1.0],
    "window": [True, "1", 1.0, None],
    "source": [True, 1, ["zeros"], {}, {"type": "file", "prompts": ["a"]}, {"type": "mean"},
               {"type": "mean", "prompts": ["a"], "file": "x"}, {"type": "mean", "prompts": [[5.0]]},
               {"type": "mean", "prompts": [[5]], "by_position": 1}, {"type": "resampled", "prompts": [[5]], "seed": "1"},
               {"type": "resampled", "prompts": [[5]], "draws": 0}, {"type": "resampled", "prompts": [[5]], "draws": True}],
    "alpha": ["0.5", True, None],
    "mask": [["1", True], [True], ["1"], [None], 1.0],
    "zoom": [True, "1", 1.0, 0],
    "seed": [True, "1", 1.0, -1, None],
}  # fmt: skip


@pytest.mark.parametrize(("field", "wrong"), [(field, wrong) for field, all_of in WRONG.items() for wrong in all_of])
def test_a_field_of_another_type_is_refused_with_its_path(lm, field, wrong):
    with pytest.raises(pc.PatchclampError) as caught:
        patch_sweep(lm, **ASKED | {field: wrong}, show_progress=False)
    assert (caught.value.path or "").startswith((field, "corrupt")), caught.value


def test_every_field_is_tried():
    assert WRONG.keys() == pc.studies.PatchSweep.fields().keys()


def test_a_source_of_json_is_the_object(lm):
    json = {"type": "mean", "prompts": [[11, 12, 15]], "tokens": -1}
    there, here = (patch_sweep(lm, **ASKED, source=source, show_progress=False)
                   for source in (json, pc.studies.MeanOf([[11, 12, 15]], -1)))  # fmt: skip
    assert (there.values == here.values).all()
    assert there.source == here.source
