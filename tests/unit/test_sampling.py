"""What the engines without a sampler of their own draw tokens from."""

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.call import plain, seeded
from patchclamp.engines.generation import Sampler


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
    assert Sampler({"temperature": 0}, set()).pick(torch.tensor([0.0, 2.0, 1.0])) == 1


def test_each_of_several_runs_has_a_seed_of_its_own():
    for seed in (11, np.int64(11)):
        found = [seeded(plain({"seed": seed}), number)["seed"] for number in range(3)]
        assert found == [11, 12, 13]
        assert {type(one) for one in found} == {int}
    assert [seeded({"seed": -1}, number) for number in range(3)] == [{"seed": -1}] * 3  # none, as for vLLM
    assert seeded({}, 2) == {}
    with pytest.raises(pc.ProgramError, match=r"sampling.seed: .*-3"):
        seeded({"seed": -3}, 2)
    for seed, number in ((1.5, 0), ("a", 0), (True, 0), (2**70, 0), (2**63 - 1, 1), (-(2**63) - 1, 0)):
        with pytest.raises(pc.ProgramError, match=r"sampling.seed: .*64-bit"):
            seeded({"seed": seed}, number)


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"top_k": -5}, "top_k: .*0 or -1"), ({"top_k": True}, "top_k: "),
        ({"stop_token_ids": ["a"]}, "stop_token_ids: expected a list of token ids"), ({"stop_token_ids": 5}, "a list of token ids"),
        ({"stop": [""]}, "stop: .*non-empty"), ({"stop": 5}, "stop: "),
        ({"ignore_eos": "no"}, "ignore_eos: expected True or False"), ({"top_p": "a"}, "top_p: expected a number from"),
        ({"temperature": float("nan")}, "temperature: expected a number from"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(sampling, text):
    with pytest.raises(pc.ProgramError, match=text):
        Sampler.check(sampling)


def test_what_means_something_is_not():
    Sampler.check({"top_k": -1, "stop": "end", "stop_token_ids": (3, 5), "ignore_eos": True, "seed": 4, "top_p": 1})
