"""What the engines without a sampler of their own draw tokens from."""

import numpy as np
import pytest
import torch

from patchclamp.engines.sampling import Sampler
from patchclamp.lm import _seeded


def drawn_from(logits: list[float], **sampling: float) -> list[float]:
    return Sampler({"temperature": 1.0, **sampling}, set()).probabilities(torch.tensor(logits)).tolist()


def test_each_bound_acts_on_what_the_last_one_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    rest = [0.4, 0.3, 0.2, 0.1]
    assert drawn_from(logits) == pytest.approx(rest)
    kept = np.array(drawn_from(logits, top_k=2, top_p=0.5))  # 4/7 of what top_k leaves is more than a half
    assert (kept > 0).tolist() == [True, False, False, False]
    kept = np.array(drawn_from(logits, min_p=0.6, top_p=0.5))
    assert (kept > 0).tolist() == [True, False, False, False]
    kept = np.array(drawn_from(logits, top_p=0.5))  # of all, 0.4 is less
    assert (kept > 0).tolist() == [True, True, False, False]
    assert (np.array(drawn_from(logits, top_k=-1)) > 0).all()
    assert (np.array(drawn_from(logits, top_k=9)) > 0).all()
    assert (np.array(drawn_from([1.0, 1.0, 0.0], top_k=1)) > 0).tolist() == [True, True, False]  # a tie


def test_values_that_mean_none():
    sampler = Sampler({"temperature": 1e-9, "top_k": None, "seed": -1}, set())
    assert (sampler.temperature, sampler.top_k) == (0.01, 0)
    assert Sampler({"temperature": 0}, set()).pick(torch.tensor([0.0, 2.0, 1.0]), 0) == 1


def test_each_of_several_runs_has_a_seed_of_its_own():
    for seed in (11, np.int64(11)):
        found = [_seeded({"seed": seed}, number)["seed"] for number in range(3)]
        assert found == [11, 12, 13]
        assert {type(one) for one in found} == {int}
    assert [_seeded({"seed": -1}, number) for number in range(3)] == [{"seed": -1}] * 3  # none, as for vLLM
    assert _seeded({}, 2) == {}
