"""The state space of the first Mamba in plain PyTorch, in the place of kernels that vLLM's CPU build does not have.

N requests · T tokens of the step · D channels · S numbers of a channel's state
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import silu, softplus


@contextmanager
def plain_scan() -> Iterator[None]:
    """A context in which vLLM's mixers of the first Mamba run on a CPU."""
    where = "vllm.model_executor.layers.mamba.mamba_mixer."
    with mock.patch(where + "selective_scan_fn", _scan), mock.patch(where + "selective_state_update", _update):
        yield


def _scan(
    x_DT: torch.Tensor, states: torch.Tensor, delta_DT: torch.Tensor, a_DS: torch.Tensor, b: torch.Tensor,
    c: torch.Tensor, d_D: torch.Tensor, gate_DT: torch.Tensor, bias_D: torch.Tensor, *, query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor, has_initial_state: torch.Tensor, **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """Prompts, or parts of them, one after the other."""
    made, b_ST, c_ST = torch.empty_like(x_DT), b.squeeze(0), c.squeeze(0)
    for n, (begin, end) in enumerate(itertools.pairwise(query_start_loc.tolist())):
        state = states[int(cache_indices[n])]
        if not bool(has_initial_state[n]):
            state.zero_()
        for t in range(begin, end):
            made[:, t] = _step(state, x_DT[:, t], delta_DT[:, t] + bias_D, a_DS, b_ST[:, t], c_ST[:, t], d_D)
    return made * silu(gate_DT)


def _update(
    states: torch.Tensor, x_ND: torch.Tensor, delta_ND: torch.Tensor, a_DS: torch.Tensor, b_NS: torch.Tensor,
    c_NS: torch.Tensor, d_D: torch.Tensor, bias_D: torch.Tensor, *, z: torch.Tensor, state_batch_indices: torch.Tensor,
    out: torch.Tensor, **rest: Any,
) -> None:  # fmt: skip
    """One token of each request."""
    for n, index in enumerate(state_batch_indices.flatten().tolist()[: len(x_ND)]):
        out[n] = _step(states[index], x_ND[n], delta_ND[n] + bias_D, a_DS, b_NS[n], c_NS[n], d_D) * silu(z[n])


def _step(
    state_DS: torch.Tensor, x_D: torch.Tensor, delta_D: torch.Tensor, a_DS: torch.Tensor, b_S: torch.Tensor,
    c_S: torch.Tensor, d_D: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """h' = exp(Δ A) h + Δ B x and y = C h' + D x; the state is written (Gu and Dao, Mamba, equation 2)."""
    step_D = softplus(delta_D)
    state_DS.mul_(torch.exp(step_D[:, None] * a_DS)).add_((step_D * x_D)[:, None] * b_S)
    return state_DS @ c_S + d_D * x_D
