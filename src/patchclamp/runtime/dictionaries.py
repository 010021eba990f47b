"""Attached SAEs on one worker's device: full encoders, for `Features` and for edits that need whole rows.

N rows · D width · F features · O width of the output · K requested features
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from patchclamp.errors import CapacityError, MissingSource, unknown
from patchclamp.language.dictionaries import PRECISIONS, FeatureReader
from patchclamp.language.sae import EPSILON, SAE, SHAPES
from patchclamp.language.values import POOLS
from patchclamp.plan.bound import BoundOp, Encoded, Keep
from patchclamp.runtime.attention import AttentionReading

MATRICES = ("encoder", "decoder", "skip")  # arrays that may have the model's dtype
MAX_VALUES, MAX_ROWS = 1 << 25, 1 << 11  # features, and rows, computed at a time


def dtype_of_precision(precision: str, model: torch.dtype) -> torch.dtype:
    """Return the dtype of an SAE's matrices: fp32, or the model's."""
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS, "precision")
    return torch.float32 if precision == "float32" else model


class DeviceSAE:
    """An SAE on a device: `SAE.encode` and `SAE.decode` in PyTorch. Matrix products accumulate in fp32. All arrays
    except the matrices are fp32."""

    def __init__(self, sae: SAE, arrays: dict[str, torch.Tensor]) -> None:
        self.k: int | None = sae.k
        self.normalize: str = sae.normalize
        self.content: str = sae.content
        self.features: int = sae.n_features
        self.width: int = sae.width
        self._arrays = arrays

    @staticmethod
    def _product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Return rows · matrixᵀ, in fp32."""
        if matrix.dtype == torch.float32:
            return rows @ matrix.T
        if rows.is_cuda:
            return torch.mm(rows.to(matrix.dtype), matrix.T, out_dtype=torch.float32)
        return rows.to(matrix.dtype).float() @ matrix.T.float()

    def moments(self, rows_ND: torch.Tensor) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        """Return each row's offset and divisor under `normalize`, [N, 1] or constants."""
        if self.normalize == "none":
            return 0.0, 1.0
        if self.normalize == "layer_norm":
            return rows_ND.mean(1, keepdim=True), rows_ND.std(1, keepdim=True)
        return 0.0, rows_ND.square().mean(1, keepdim=True).sqrt().clamp(min=torch.finfo(torch.float32).tiny)

    def encode(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """Return the feature activations of fp32 rows, [N, F]."""
        of, (mean, scale) = self._arrays, self.moments(rows_ND)
        if self.normalize != "none":
            rows_ND = (rows_ND - mean) / (scale + (EPSILON if self.normalize == "layer_norm" else 0.0))
        pre_NF = self._product(rows_ND, of["encoder"]) + of["encoder_bias"]
        values_NF = of["gain"] * pre_NF + of["offset"] if "gain" in of else pre_NF
        values_NF = torch.where(pre_NF <= of.get("threshold", 0.0), 0.0, values_NF.relu())  # keeps NaN
        if self.k is None:
            return values_NF
        best = values_NF.topk(self.k)
        return (0 * values_NF).scatter_(1, best.indices, best.values)  # keeps NaN

    def decode(self, values_NF: torch.Tensor, rows_ND: torch.Tensor) -> torch.Tensor:
        """Return the SAE's output, [N, O], from the feature activations of `rows_ND`."""
        of, (mean, scale) = self._arrays, self.moments(rows_ND)
        out_NO = (self._product(values_NF, of["decoder"].T) + of["decoder_bias"]) * scale + mean
        return out_NO + self._product(rows_ND, of["skip"]) if "skip" in of else out_NO

    def changed(self, edit: Encoded, rows_ND: torch.Tensor) -> torch.Tensor:
        """Return the change in the SAE's output, [N, O], when `edit` changes the features of `rows_ND`."""
        ids = list(edit.ids)
        values_NK = self.encode(rows_ND)[:, ids]
        offset, slope, otherwise = torch.tensor(edit.gates, device=rows_ND.device).T
        gates_NK = torch.where(values_NK > 0, offset + slope * values_NK, otherwise)
        return gates_NK @ self._arrays["decoder"][ids].float() * self.moments(rows_ND)[1]

    def edited(self, edit: Encoded, rows_ND: torch.Tensor) -> torch.Tensor:
        """Return the rows that replace h or, if `edit` names features, the rows to add to h."""
        return self.changed(edit, rows_ND) if edit.ids else self.decode(self.encode(rows_ND), rows_ND)


class Reading:
    """Reads SAE features: each row's `top` largest, or the features whose ids the reader lists.

    number: the reading's index among the readings in use
    """

    number: int
    sae: DeviceSAE
    top: int

    def __init__(self, number: int, sae: DeviceSAE, reader: FeatureReader, top: int, device: torch.device) -> None:
        self.number, self.sae, self.top, self._first = number, sae, top, reader.first
        self.numbers: int = 2 * top
        self._ids = None if reader.ids is None else torch.tensor(reader.ids, device=device)

    def read(self, rows_NW: torch.Tensor) -> torch.Tensor:
        """Return each row's feature values followed by their ids (int32 bits), [N, 2K]."""
        sae, found = self.sae, list[torch.Tensor]()
        for part_NW in rows_NW.split(min(MAX_ROWS, max(MAX_VALUES // sae.features, 1))):
            values_NF = sae.encode(part_NW[:, self._first : self._first + sae.width].float())
            if self._ids is None:
                values_NK, ids_NK = values_NF.topk(self.top)
            else:
                values_NK, ids_NK = values_NF[:, self._ids], self._ids.expand(len(values_NF), -1)
            found.append(torch.cat([values_NK, ids_NK.int().view(torch.float32)], 1))
        return torch.cat(found)


class Dictionaries:
    """One worker's SAEs, by name. `size`: bytes reserved for them; 0: memory is allocated when an SAE is attached."""

    def __init__(self, device: torch.device, size: int = 0) -> None:
        self._device, self._size = device, size
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        # each SAE's part of the memory; a run in flight may still use a detached SAE
        self._used: weakref.WeakKeyDictionary[DeviceSAE, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._of: dict[str, DeviceSAE] = {}
        # the readings of admitted programs
        self._readings: weakref.WeakValueDictionary[Any, Reading | AttentionReading] = weakref.WeakValueDictionary()
        self._numbered: weakref.WeakValueDictionary[int, Reading | AttentionReading] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._of)

    def attach(self, name: str, sae: SAE, dtype: torch.dtype) -> int:
        """Copy an SAE to the device, with matrices in `dtype`. Returns the bytes allocated outside the reserved memory.
        Raises `CapacityError` if it does not fit."""
        self.detach(name)
        arrays = {part: getattr(sae, part) for part in SHAPES if getattr(sae, part) is not None}
        dtypes = {part: dtype if part in MATRICES else torch.float32 for part in arrays}
        sizes = {part: -(-array.size * dtypes[part].itemsize // 256) * 256 for part, array in arrays.items()}
        begin, needed = self._place(sum(sizes.values())), sum(sizes.values())
        on_device: dict[str, torch.Tensor] = {}
        try:
            for part, array in arrays.items():
                if self._size:
                    room = self._memory[begin : begin + array.size * dtypes[part].itemsize].view(dtypes[part])
                    begin += sizes[part]
                else:
                    room = torch.empty(array.size, dtype=dtypes[part], device=self._device)
                on_device[part] = room.view(array.shape).copy_(torch.from_numpy(np.array(array)))
        except torch.OutOfMemoryError:
            raise CapacityError(f"the SAE needs {needed:,} bytes: reserve them at startup with sae_bytes") from None
        self._of[name] = attached = DeviceSAE(sae, on_device)
        if self._size:
            self._used[attached] = begin - needed, begin
        return 0 if self._size else needed

    def _place(self, needed: int) -> int:
        """Return the offset of the first gap of `needed` bytes in the reserved memory; else raise `CapacityError`."""
        begin = 0
        for first, end in sorted(self._used.values()):
            if first - begin >= needed:
                break
            begin = end
        if self._size and begin + needed > self._size:
            used = sum(end - first for first, end in self._used.values())
            raise CapacityError(
                f"the SAE needs {needed:,} bytes, but sae_bytes={self._size:,} has {self._size - used:,} left"
            )
        return begin

    def detach(self, name: str) -> None:
        """Remove an SAE. Its memory is freed once no run uses it."""
        self._of.pop(name, None)

    def of(self, name: str, content: str = "") -> DeviceSAE:
        """Return the SAE with a name. Raises `MissingSource` if it was detached or replaced by different content."""
        found = self._of.get(name)
        if found is None or content not in ("", found.content):
            raise MissingSource(f"the SAE {name!r} was detached")
        return found

    def reading(self, keep: Keep) -> Reading | AttentionReading:
        """Return the reading for a capture of features or attention, shared by programs with equal readers. Raises
        `MissingSource` for a detached SAE."""
        reader, known = keep.reader, self._readings.get((keep.reader, keep.top))
        sae = self.of(reader.name, reader.content) if isinstance(reader, FeatureReader) else None
        if known is not None and (sae is None or (isinstance(known, Reading) and known.sae is sae)):
            return known  # an SAE may be attached again, in another dtype
        used = set(self._numbered)
        number = next(i for i in itertools.count(len(POOLS) + 1) if i not in used)
        if isinstance(reader, FeatureReader):
            assert sae is not None
            made = Reading(number, sae, reader, keep.top, self._device)
        else:
            assert reader is not None
            made = AttentionReading(number, reader, keep.top)
        self._readings[reader, keep.top] = self._numbered[number] = made
        return made

    def numbers_of(self, number: int) -> int:
        """Return the number of values that a reading keeps per row."""
        return self._numbered[number].numbers

    def numbered(self, number: int) -> Reading | AttentionReading:
        """Return the reading with index `number`."""
        return self._numbered[number]

    def code_of(self, ops: Sequence[BoundOp]) -> dict[int, Callable[..., torch.Tensor]]:
        """Return the function of each `Encoded` op, by op index. Raises `MissingSource` for a detached SAE."""
        code: dict[int, Callable[..., torch.Tensor]] = {}
        held: _Held | None = None
        for i, action in enumerate(op.action for op in ops):
            if isinstance(action, Encoded):
                sae = self.of(action.name, action.content)
                if action.reads:
                    held = _Held(sae, action)
                    code[i] = held.read
                else:
                    code[i] = held.write if held is not None else _Held(sae, action).edit
                    held = None
        return code


class _Held:
    """An SAE edit. A transcoder's edit reads a row at one site, and writes the same token's row at a later site of the
    step. A kernel calls each method once per position range."""

    def __init__(self, sae: DeviceSAE, action: Encoded) -> None:
        self._sae, self._action = sae, action
        self._held: dict[int, torch.Tensor] = {}  # rows to write, by position

    def edit(self, rows_ND: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        new_ND = self._sae.edited(self._action, rows_ND)
        return rows_ND + new_ND if self._action.ids else new_ND

    def read(self, rows_ND: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._held.update(zip(positions.tolist(), self._sae.edited(self._action, rows_ND), strict=True))
        return rows_ND

    def write(self, rows_NO: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        new_NO = torch.stack([self._held.pop(position) for position in positions.tolist()])
        return rows_NO + new_NO if self._action.ids else new_NO
