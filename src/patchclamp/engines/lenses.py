"""Lenses outside the forward pass: captured rows pass through the live model's own final norm and unembedding.

N rows · D model width · V vocabulary · K likeliest tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from patchclamp.errors import ProgramError
from patchclamp.language.ops import Translator
from patchclamp.runtime.taps import find
from patchclamp.sites import SiteMap

MAX_ROWS = 1 << 11  # rows unembedded together
MAX_LOGITS = 1 << 27  # numbers of logits computed at a time
CHUNK = 512  # logits per chunk of a row; `likeliest` first computes each chunk's maximum

Unembed = Callable[[torch.Tensor], "torch.Tensor | None"]  # rows [N, D] in fp32 on the device to logits [N, V]


class LastNorm(NamedTuple):
    """A model's final norm, whose input is the final stream.

    factor: stream rows are the module's input times this factor
    pair: True if the module takes its input as two summands, the hidden state and the residual
    """

    module: Any
    factor: float
    pair: bool

    @classmethod
    def of(cls, net: torch.nn.Module, sites: SiteMap, engine: Literal["transformers", "vllm"]) -> LastNorm:
        """Find the model's final norm with the site table."""
        tap = next(tap for point, tap in sites.taps(engine) if point.kind == "stream_end")
        return cls(find(net, tap.module), sites.sizes.factor(tap.scale), tap.residual is not None)

    def __call__(self, rows_ND: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Normalize rows; return them in the model's dtype."""
        rows_ND = rows_ND / self.factor
        rounded = rows_ND.to(dtype)
        rest = [(rows_ND - rounded.float()).to(dtype)] if self.pair else []  # as precise as the stream itself
        normed = self.module(*rest, rounded)
        return normed[0] if isinstance(normed, tuple) else normed


def translation(translator: Translator | None, device: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a translator as a function on fp32 rows [N, D] on `device`; the identity if it is None."""
    if translator is None:
        return lambda rows_ND: rows_ND
    matrix_DD = torch.tensor(translator.matrix.array(), device=device)
    bias_D = 0.0 if translator.bias is None else torch.tensor(translator.bias.array(), device=device)
    return lambda rows_ND: rows_ND @ matrix_DD.T + bias_D


@torch.inference_mode()
def top_tokens(
    rows: Sequence[torch.Tensor], unembed: Unembed, top: int, sites: SiteMap, device: Any,
    translator: Translator | None,
) -> tuple[np.ndarray, np.ndarray] | None:  # fmt: skip
    """Return all rows' top token ids and log-probabilities [N, K], concatenated; None if this worker gets no logits."""
    if any(each.shape[1] != sites.d_model for each in rows):
        raise ProgramError(f"a lens requires rows as wide as the stream ({sites.d_model})")
    translate, is_here = translation(translator, device), True
    ids, logprobs = list[torch.Tensor](), list[torch.Tensor]()  # on the device, so that parts do not wait
    for part in _parts(rows, min(MAX_ROWS, max(MAX_LOGITS // sites.d_vocab, 1))):
        rows_ND = torch.cat([each.to(device, non_blocking=True).float() for each in part])
        logits_NV = unembed(translate(rows_ND))
        if logits_NV is None:  # another worker has them; this one takes part in every product
            is_here = False
            continue
        best, logprob_NK = likeliest(logits_NV.float(), top)
        ids.append(best.int())
        logprobs.append(logprob_NK)
    if not is_here:
        return None
    if not ids:
        return np.zeros((0, top), np.int32), np.zeros((0, top), np.float32)
    return torch.cat(ids).cpu().numpy(), torch.cat(logprobs).cpu().numpy()


def _parts(rows: Sequence[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """Yield the rows in order, in chunks of at most `size` rows; a chunk is a list of tensors."""
    part, count = list[torch.Tensor](), 0
    for piece in (piece for each in rows for piece in each.split(size) if len(piece)):
        if count + len(piece) > size:
            yield part
            part, count = [], 0
        part.append(piece)
        count += len(piece)
    if part:
        yield part


def likeliest(logits_NV: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and log-probabilities of the `top` largest logits, [N, K]. Only the chunks with the largest maxima
    are sorted, because they contain these logits."""
    chunks = logits_NV.shape[1] // CHUNK
    largest_NC = logits_NV[:, : chunks * CHUNK].unflatten(1, (chunks, CHUNK)).amax(-1)
    chunk_NK = largest_NC.topk(min(top, chunks)).indices
    id_NE = (chunk_NK[..., None] * CHUNK + torch.arange(CHUNK, device=logits_NV.device)).flatten(1)
    last_E = torch.arange(chunks * CHUNK, logits_NV.shape[1], device=logits_NV.device)
    id_NE = torch.cat([id_NE, last_E.expand(len(id_NE), -1)], 1)
    best = logits_NV.gather(1, id_NE).topk(top)
    return id_NE.gather(1, best.indices), best.values - logits_NV.logsumexp(-1, keepdim=True)
