"""Python's garbage collector goes through all objects less often while calls are under way, and as usual afterwards."""

from __future__ import annotations

import gc

import pytest

import patchclamp as pc
from patchclamp.engines import base


@pytest.fixture(autouse=True)
def usual():
    before = gc.get_threshold()
    gc.set_threshold(600, 11, 12)
    yield
    gc.set_threshold(*before)


def test_all_objects_are_gone_through_rarely_until_the_last_call_has_ended():
    first, second = base.rarely(), base.rarely()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold() == (600, 11, base.YOUNG)
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (600, 11, base.YOUNG)
    with pytest.raises(KeyError), base.rarely():
        raise KeyError
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (600, 11, 12)


def test_what_somebody_sets_meanwhile_stays():
    with base.rarely():
        gc.set_threshold(500, 10, 30)
    assert gc.get_threshold() == (500, 10, 30)
    gc.set_threshold(500, 10, 1000)
    with base.rarely():
        assert gc.get_threshold() == (500, 10, 1000)
    assert gc.get_threshold() == (500, 10, 1000)


def test_calls_that_fail_leave_it_as_it_was():
    with pc.LM("fake:tiny", engine="fake") as lm:
        seen = []
        lm.run([[1, 2, 3]] * 2, max_tokens=1)
        with pytest.raises(pc.PatchclampError):
            lm.run([[1, 2, 3]], edits=[pc.Zero(pc.resid_post[99])])
        submit = lm.engine.submit
        lm.engine.submit = lambda requests: (seen.append(gc.get_threshold()), submit(requests))[1]
        lm.run([1, 2, 3], max_tokens=1)
    assert seen == [(600, 11, base.YOUNG)]
    assert gc.get_threshold() == (600, 11, 12)
