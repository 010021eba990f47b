"""Exporters: a harvest as other tools take activations."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from patchclamp.errors import ProgramError
from patchclamp.studies.harvest.documents import needed
from patchclamp.studies.harvest.dtypes import as_float32

if TYPE_CHECKING:
    import torch

    from patchclamp.studies.harvest.reader import Harvested


def to_saelens(
    data: Harvested, folder: str | Path, *, hook_name: str, context_size: int, site: str | None = None
) -> int:
    """Writes a site's rows as the cached activations of SAELens, in float32. Returns how many rows were left out.

    SAELens reads blocks of `context_size` rows with their token ids (`cached_activations_path`, checked with SAELens
    6.54). A block here is so many shuffled rows, and no document: SAELens shuffles no further than its buffer. What
    does not fill a block at the end is left out.
    """
    datasets = needed("datasets")
    if not isinstance(context_size, int) or not 1 <= context_size <= len(data):
        raise ProgramError(f"a block has 1 to {len(data)} rows, not {context_size!r}", "context_size")
    width = data.width(site)
    features = {hook_name: datasets.Array2D((context_size, width), "float32")}
    if not data.manifest.recipe.sums:  # a sum has no token
        features["token_ids"] = datasets.Sequence(datasets.Value("int32"), length=context_size)
    with tempfile.TemporaryDirectory(dir=Path(folder).parent) as beside:
        made = datasets.Dataset.from_generator(
            _blocks, features=datasets.Features(features), cache_dir=beside,
            gen_kwargs={"folder": str(data.folder), "interleave": data.interleave, "site": site, "size": context_size,
                        "names": tuple(features)},
        )  # fmt: skip
        made.save_to_disk(str(folder))
    return len(data) % context_size


def _blocks(
    folder: str, interleave: bool, site: str | None, size: int, names: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Blocks of `size` rows in the order of reading, across the ends of pieces."""
    from patchclamp.studies.harvest.reader import Harvested

    data = Harvested(folder, interleave)
    name = data.sites[0] if site is None else site
    rows, ids = np.zeros((0, data.width(site)), np.float32), np.zeros(0, object)
    for piece in data.order.read(data.columns_with_index([name])):
        rows = np.concatenate([rows, as_float32(piece[name], data.dtype)])
        ids = np.concatenate([ids, piece["token"]])
        whole = len(rows) // size * size
        for first in range(0, whole, size):
            yield dict(zip(names, (rows[first : first + size], ids[first : first + size].tolist()), strict=False))
        rows, ids = rows[whole:], ids[whole:]


class ActivationBuffer:
    """A site's rows as `trainSAE(data=…)` of dictionary_learning takes them, in place of its own buffer (checked with
    version 0.1.0): each `next` is a batch [out_batch_size, D], float32 unless another dtype is given.

    The rows come in their stored order, which is shuffled, and begin again at the end unless `repeat` is off. What does
    not fill a batch at the end comes with the beginning of the next round, and without `repeat` not at all.
    """

    def __init__(
        self, data: Harvested, *, site: str | None = None, out_batch_size: int = 8192, device: str = "cpu",
        dtype: torch.dtype | None = None, repeat: bool = True,
    ) -> None:  # fmt: skip
        import torch

        if not 1 <= out_batch_size <= len(data):
            raise ProgramError(f"a batch has 1 to {len(data)} rows, not {out_batch_size!r}", "out_batch_size")
        self.d_submodule, self.out_batch_size, self.device = data.width(site), out_batch_size, device
        self.config = {"harvest": data.folder.name, "site": site or data.sites[0], "out_batch_size": out_batch_size,
                       "device": device}  # fmt: skip
        self._dtype = dtype or torch.float32
        self._batches = iter(data.batches(out_batch_size, site, repeat))

    def __iter__(self) -> ActivationBuffer:
        return self

    def __next__(self) -> torch.Tensor:
        batch = next(self._batches)
        if len(batch) < self.out_batch_size:
            raise StopIteration
        assert not isinstance(batch, dict)
        return batch.to(self.device, self._dtype)
