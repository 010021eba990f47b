"""A run's captures as a file: safetensors with a tensor for each site that was asked for.

tensors     by site, as in "resid_post[3]", what `run[site]` gives, in the dtype of the capture; of a capture among
            the edits by its path, as in "edits[0] resid_post[3]"
metadata    `positions`: JSON, by tensor the position of each row; `prompt_token_ids` and `token_ids`: JSON
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from patchclamp.language import Capture
from patchclamp.run import Run


def captured_names(run: Run) -> list[str]:
    """What a run's file has."""
    return list(dict(_names(run)))


def captured_file(run: Run) -> bytes:
    """The file's bytes. Waits for the engine."""
    import safetensors.torch
    import torch

    names = dict(_names(run))
    tensors = {
        name: torch.as_tensor(run[key]).clone(memory_format=torch.contiguous_format) for name, key in names.items()
    }
    positions = json.dumps({name: run.positions(key) for name, key in names.items()})
    ids = {"prompt_token_ids": json.dumps(run.prompt_token_ids), "token_ids": json.dumps(run.token_ids)}
    return safetensors.torch.save(tensors, {"positions": positions, **ids})


def _names(run: Run) -> Iterator[tuple[str, str]]:
    """The name of each tensor, and what `run[...]` calls it."""
    for path, op in run.program.ops:
        if isinstance(op, Capture):
            among_edits = path.startswith("edits")
            refs = run.refs(op.at)
            for ref in refs:
                yield (f"{path} {ref}", path if len(refs) == 1 else ref) if among_edits else (ref, ref)
