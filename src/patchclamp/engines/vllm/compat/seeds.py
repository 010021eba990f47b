"""Seeded requests on the CPU whose prompts are computed in chunks.

vLLM draws a token for every chunk of a prompt, and takes that back by the offset of the request's generator.  A CPU's
generator has no offset, and the error would end the engine.
"""

from __future__ import annotations

from typing import Any

import torch

from patchclamp.engines.vllm.compat.seams import forwards


class _Rewound(torch.Generator):
    """A generator that returns to its state at the beginning of the step, whatever offset is set."""

    def keep(self) -> None:
        self._at_step = self.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        self.set_state(self._at_step)


def rewind(runner: Any) -> None:
    """Has a V1 runner on a CPU give such requests generators that can be rewound; they draw the same numbers."""
    prepare = runner._prepare_inputs

    @forwards(prepare)
    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        for row, generator in batch.generators.items():
            if not isinstance(generator, _Rewound):
                rewound = _Rewound()
                rewound.set_state(generator.get_state())
                batch.generators[row] = runner.requests[batch.req_ids[row]].generator = rewound
            batch.generators[row].keep()
        return prepare(*args, **kwargs)

    runner._prepare_inputs = prepare_inputs
