"""Clones on the fake engine: what is done to one is what is done to a tensor, row by row, and it is written as one is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import patchclamp as pc

EIFFEL, CITY = "The Eiffel Tower is in", "The Colosseum is in the city of"
D, T = 16, 6  # width of the fake model, tokens of `EIFFEL`


@pytest.fixture
def v():
    return torch.from_numpy(np.random.default_rng(0).standard_normal(D).astype(np.float32))


def one_row(h, v):
    h[0] = 0
    h[-1] += v
    return h


def several_rows(h, v):
    h[1:] *= 2
    h[[2, 0]] = torch.stack([v, -v])
    return h


def all_rows(h, v):
    h += v
    h /= 2
    h[:] -= v
    return h


def a_buffer(h, v):
    """The numbers are those of the line, whatever the buffer has later."""
    buffer = torch.zeros(D)
    for i in range(2):
        buffer[:] = i + 1
        h[i] = buffer
        h[i] += buffer
        h *= buffer[0]
    return h


def a_row_of_a_row(h, v):
    h[2] = h[0] * 2 - v
    return h


def a_copy_of_a_copy(h, v):
    """A change of one copy is none of the other's."""
    h[0] += v
    other = h.clone()
    other[1] = 0
    h[2] = 0
    return h


def the_copy_of_a_copy(h, v):
    h[0] += v
    other = h.clone()
    h[0] = 0
    other[1] = 0
    return other


@pytest.mark.parametrize("key", [slice(None), slice(1, 4), slice(-3, None), [4, 1, 2], slice(None, None, 2)], ids=str)
@pytest.mark.parametrize(
    "change", [one_row, several_rows, all_rows, a_buffer, a_row_of_a_row, a_copy_of_a_copy, the_copy_of_a_copy]
)
def test_a_clone_is_changed_as_a_tensor_is(lm, v, key, change):
    with lm.trace(EIFFEL) as t:
        before = t.layers[1].output.save()
        t.layers[1].output[key] = change(t.layers[1].output[key].clone(), v)
        after, onwards = t.layers[1].output.save(), t.layers[2].input.save()
    expected = before.clone()
    expected[key] = change(expected[key].clone(), v)
    torch.testing.assert_close(after, expected)
    assert torch.equal(onwards, after)
    assert not torch.equal(after, before)


def test_names_with_and_without_a_batch_axis_go_together(lm, v):
    with lm.trace(EIFFEL) as t:
        before = t.layers[0].output.save()
        h = t.layers_output[0].clone()
        h[:, 1] = v[None]
        h[:, 2:4] += torch.stack([v, -v])[None]
        t.layers[0].output = h
        g = t.layers[1].output[-2:].clone()
        g[0] = v
        t.layers_output[1][:, -2:] = g
        first, second = t.layers[0].output.save(), t.layers_output[1].save()
    torch.testing.assert_close(first[1:4], torch.stack([v, before[2] + v, before[3] - v]))
    assert torch.equal(first[[0, 4, 5]], before[[0, 4, 5]])
    assert torch.equal(second[0, -2], v)
    assert not torch.equal(second[0, -1], v)


def test_a_clone_goes_to_another_place_row_by_row(lm, v):
    """Another layer, other tokens, and a longer prompt, in which the rows have other positions."""
    with lm.trace() as t:
        a, b = t.invoke(EIFFEL), t.invoke(CITY)
        h = a.layers[0].output[1:4].clone()
        h[0] = v
        h[-1] *= 3
        a.layers[1].output[2:5] = h
        b.layers[1].output[-3:] = h
        source = a.layers[0].output[1:4].save()
        near, far, plain = a.layers[1].output.save(), b.layers[1].output.save(), t.invoke(CITY).layers[1].output.save()
    expected = torch.stack([v, source[1], 3 * source[2]])
    torch.testing.assert_close(near[2:5], expected)
    torch.testing.assert_close(far[-3:], expected)
    assert torch.equal(far[:-3], plain[:-3])
    assert len(plain) > T


def test_heads_of_a_clone(lm):
    with lm.trace(EIFFEL) as t:
        before = t.layers[1].attn.z.save()
        h = t.layers[1].attn.z.clone()
        h[1][-1] = 0
        h[0, 0] *= 2
        h[0][1:3] += torch.ones(8)
        t.layers[1].attn.z = h
        one = t.layers[2].attn.z[0][2:].clone()
        one[0] = torch.ones(8)
        t.layers[2].attn.z[0][2:] = one
        after, row = t.layers[1].attn.z.save(), t.layers[2].attn.z[2, 0].save()
    expected = before.clone()
    expected[-1, 1] = 0
    expected[0, 0] *= 2
    expected[1:3, 0] += 1
    torch.testing.assert_close(after, expected)
    assert torch.equal(row, torch.ones(8))


def test_selections_choose_within_a_clone(lm, v):
    with lm.trace(EIFFEL, max_tokens=3) as t:
        before = t.all().layers[0].output.save()
        h = t.layers[0].output[1:4].clone()
        h[pc.span("Tower")] = v
        t.layers[0].output[1:4] = h
        g = t.layers[1].output.clone()
        g[pc.generated | pc.prompt[2]] = 0  # of the prompt alone, which is what the clone has
        t.layers[1].output = g
        after, second = t.all().layers[0].output.save(), t.all().layers[1].output.save()
    assert torch.equal(after[3], v)
    assert torch.equal(after[:3], before[:3])
    assert (second == 0).all(-1).nonzero().flatten().tolist() == [2]


def test_generated_tokens_of_a_clone(lm, v):
    with lm.trace(EIFFEL, max_tokens=4, sampling={"ignore_eos": True}) as t:
        h = t.generated.layers[1].output.clone()
        h[1] = v
        t.generated.layers[1].output = h
        rows, third = t.generated.layers[1].output.save(), t.generated[2].layers[1].output.save()
    assert torch.equal(rows[1], v)
    assert torch.equal(rows[2], third)
    assert not torch.equal(rows[2], v)


WRONG = {  # what is done, and what is said of it, at that line
    "a row that is not there": (lambda h: h.__setitem__(99, 0), pc.TokensError, "position 99"),
    "a row of a vector that is too short": (lambda h: h.__setitem__(0, torch.ones(3)), pc.ShapeError, "width 16"),
    "too few rows": (lambda h: h.__setitem__(slice(0, 3), torch.ones(2, D)), pc.ShapeError, r"\(3\), got 2"),
    "text": (lambda h: h.__setitem__(0, "x"), pc.ProgramError, "expected a number or a vector"),
    "a part of a part": (lambda h: h[2:4].__setitem__(0, 0), pc.ProgramError, "brackets"),
    "no mask": (lambda h: h.__imul__(1e-5 * torch.ones(D)), pc.ProgramError, "mask"),
    "a product": (lambda h: h.__imul__(h), pc.ProgramError, "times another"),
    "a number by number": (lambda h: h.__itruediv__(0), pc.ProgramError, "by zero"),
    "a changed part read": (lambda h: (h.__setitem__(0, 0), h[1] * 2), pc.ProgramError, "index first"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_a_clone_is_said_at_its_line(lm, what):
    change, kind, text = WRONG[what]
    with lm.trace(EIFFEL) as t:
        h = t.layers[1].output.clone()
        with pytest.raises(kind, match=text) as raised:
            change(h)
        t.layers[0].output.save()
    assert type(raised.value) is kind
    assert raised.value.path is None
    assert all(isinstance(op, pc.Capture) for op in t.run.program.edits)


def test_rows_of_a_part_are_numbered_from_its_first(lm):
    with lm.trace(EIFFEL, max_tokens=3) as t:
        h = t.layers[1].output[1:4].clone()
        with pytest.raises(pc.TokensError, match=r"row 3 is out of range .* 3 rows"):
            h[3] = 0
        with pytest.raises(pc.TokensError, match="none of the 3 rows"):
            h[3:] = 0
        h[2] = 0
        with pytest.raises(pc.ShapeError, match=r"has 3, .* has 2"):
            t.layers[2].output[0:2] = h
        with pytest.raises(pc.ShapeError, match=r"token\(3\)"):
            t.layers[2].output[pc.token(3)] = h
        t.layers[1].output.save()
    assert all(isinstance(op, pc.Capture) for op in t.run.program.edits)
