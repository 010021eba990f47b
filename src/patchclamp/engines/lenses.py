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
MAX_SUMMARIZED = 1 << 24  # numbers of logits summarized at a time, by whole layers
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
        rows_ND = torch.cat(part).to(device, non_blocking=True).float()
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


LENS_VALUES = {
    "top_ids": np.int32, "top_probs": np.float32, "ranks": np.int32, "logprobs": np.float32, "kl": np.float32,
    "entropy": np.float32,
}  # fmt: skip


@torch.inference_mode()
def lens_values(logits_GPV: torch.Tensor, top: int, chosen: Sequence[int]) -> dict[str, np.ndarray]:
    """Summarize the next-token distributions of G − 1 layers at P positions. `logits_GPV` has the model's own logits,
    then each layer's. Returns the `top` likeliest tokens and their probabilities [G − 1, P, K], the ranks (0: the
    likeliest) and log-probabilities of the tokens `chosen` [G − 1, P, C], and KL(model ‖ layer) and entropy in nats
    [G − 1, P]."""
    found: list[list[torch.Tensor]] = [[] for _ in LENS_VALUES]
    logits_GPV, chosen_C = logits_GPV.float(), torch.tensor(chosen, dtype=torch.int64, device=logits_GPV.device)
    model_PV = logits_GPV[0] - logits_GPV[0].logsumexp(-1, keepdim=True)
    for logits_LPV in logits_GPV[1:].split(max(MAX_SUMMARIZED // logits_GPV[0].numel(), 1)):
        ids_LPK, top_LPK = likeliest(logits_LPV, min(top, logits_LPV.shape[-1]))
        ranks = [(logits_LPV > logits_LPV[..., token : token + 1]).sum(-1) for token in chosen]
        logprobs_LPV = logits_LPV - logits_LPV.logsumexp(-1, keepdim=True)
        gap_LPV = (model_PV - logprobs_LPV).masked_fill_(model_PV == -torch.inf, 0)  # 0 · log 0 is 0
        kl_LP = gap_LPV.mul_(model_PV.exp()).sum(-1)
        entropy_LP = -logprobs_LPV.exp().mul_(logprobs_LPV.masked_fill(logprobs_LPV == -torch.inf, 0)).sum(-1)
        values = (ids_LPK, top_LPK.exp(), torch.stack(ranks, -1) if ranks else ids_LPK[..., :0],
                  logprobs_LPV[..., chosen_C], kl_LP, entropy_LP)  # fmt: skip
        for of, value in zip(found, values, strict=True):
            of.append(value)
    joined = zip(LENS_VALUES.items(), found, strict=True)
    return {name: torch.cat(of).cpu().numpy().astype(dtype) for (name, dtype), of in joined}


@torch.inference_mode()
def read_streams(
    streams: Sequence[torch.Tensor], rows: Sequence[int], unembed: Unembed, top: int, chosen: Sequence[int],
    d_vocab: int, device: Any,
) -> dict[str, np.ndarray] | None:  # fmt: skip
    """Unembed rows of captured streams [T, D], first the final stream, and return their `lens_values`; None if this
    worker gets no logits."""
    parts, positions = [], max(MAX_LOGITS // 2 // d_vocab // len(streams), 1)
    for index in torch.tensor(rows).split(positions):
        rows_ND = torch.cat([stream[index] for stream in streams]).to(device).float()
        if (logits_NV := unembed(rows_ND)) is not None:  # every worker joins each product
            parts.append(lens_values(logits_NV.unflatten(0, (len(streams), -1)), top, chosen))
    return {name: np.concatenate([part[name] for part in parts], 1) for name in LENS_VALUES} if parts else None


def _parts(rows: Sequence[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """Yield the rows in order, in chunks of at most `size` rows; a chunk is a list of tensors."""
    part, count = list[torch.Tensor](), 0
    for piece in (piece for each in rows if len(each) for piece in (each.split(size) if len(each) > size else [each])):
        if count + len(piece) > size:
            yield part
            part, count = [], 0
        part.append(piece)
        count += len(piece)
    if part:
        yield part


def likeliest(logits_V: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and log-probabilities of the `top` largest logits, [..., K], of [..., V]. Only the chunks with the
    largest maxima are sorted, because they contain these logits."""
    chunks = logits_V.shape[-1] // CHUNK
    largest_C = logits_V[..., : chunks * CHUNK].unflatten(-1, (chunks, CHUNK)).amax(-1)
    chunk_K = largest_C.topk(min(top, chunks)).indices
    id_E = (chunk_K[..., None] * CHUNK + torch.arange(CHUNK, device=logits_V.device)).flatten(-2)
    last_E = torch.arange(chunks * CHUNK, logits_V.shape[-1], device=logits_V.device)
    id_E = torch.cat([id_E, last_E.expand(*id_E.shape[:-1], -1)], -1)
    best = logits_V.gather(-1, id_E).topk(top)
    return id_E.gather(-1, best.indices), best.values - logits_V.logsumexp(-1, keepdim=True)
