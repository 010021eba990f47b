"""`Apply` without a model: what a function may take, and what the fake engine tells it."""

from __future__ import annotations

import functools

import pytest
import torch

import patchclamp as pc

AT = pc.resid_post[1]


def test_a_function_says_by_its_parameters_what_it_is_told():
    """A default is the caller's own, whatever its name; what cannot be looked into gets the rows alone."""
    scale = 2.0
    for fn in (torch.relu, torch.nn.ReLU(), lambda h, scale=scale: h * scale, lambda h, site=3: h, lambda *h: h[0]):
        assert pc.Apply(fn, AT).wanted_arguments() == ()
    assert pc.Apply(lambda h, site, *, positions: h, AT).wanted_arguments() == ("site", "positions")
    assert pc.Apply(functools.partial(lambda k, h, positions: h, 3), AT).wanted_arguments() == ("positions",)


@pytest.mark.parametrize(("fn", "taken"), [
    (lambda h, where: h, "h, where"), (lambda h, x, *, positions: h, "h, x, positions"), (lambda: 0, "none"),
    (lambda *, positions: 0, "positions"), (lambda h, positions, /: h, "h, positions"), (lambda h, *, k: h, "h, k"),
])  # fmt: skip
def test_what_is_no_function_of_rows_is_told_where_it_is_written(fn, taken):
    with pytest.raises(pc.ProgramError) as caught:
        pc.Apply(fn, AT)
    assert caught.value.path == "fn"
    assert f"{taken}: " in str(caught.value)


@pytest.mark.parametrize("chunk", [None, 3])
def test_the_fake_tells_positions_and_site(chunk):
    seen = []

    def fn(h, positions, *, site):
        seen.extend((site, int(position)) for position in positions)
        return h + positions[:, None]

    with pc.LM("fake", chunk=chunk, allow_code=True) as lm:
        asked = {"max_tokens": 4, "sampling": {"ignore_eos": True}, "capture": ["resid_pre[2]"]}
        plain = lm.run([5, 6, 7, 8], **asked)
        run = lm.run([5, 6, 7, 8], edits=[pc.Apply(fn, "resid_post[1]", pc.prompt[1:] | pc.generated[1])], **asked)
        before, after = (torch.as_tensor(each["resid_pre[2]"])[:4] for each in (plain, run))
    assert seen == [("resid_post[1]", position) for position in (1, 2, 3, 5)]
    torch.testing.assert_close(after, before + torch.tensor([0.0, 1.0, 2.0, 3.0])[:, None])


def test_the_fake_does_not_call_code_that_has_failed_again():
    calls = []

    def fn(h):
        calls.append(len(h))
        raise ValueError("once")

    with pc.LM("fake", allow_code=True) as lm, pytest.raises(pc.RunError, match="Apply raised ValueError: once"):
        lm.run([5, 6, 7, 8], max_tokens=4, edits=[pc.Apply(fn, pc.resid_post)])
    assert len(calls) == 1
