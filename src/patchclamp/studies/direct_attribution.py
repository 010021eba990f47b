"""Direct logit attribution: what does each layer, head and neuron add to the answer's logit by itself?

The last stream is a sum of what the embedding, every attention and every MLP added. The final norm is frozen at the
scale it had in that run, and then the logits are a sum over the same parts. What a part does by way of later layers is
not in it.

    N prompts · D model width · L layers · C parts

Source: Elhage et al. 2021, "A mathematical framework for transformer circuits"; Wang et al. 2022 (arXiv:2211.00593),
section 3.1, with the norm's scale frozen as in its appendix A.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from patchclamp.errors import ModelError, ProgramError, unknown
from patchclamp.language import Site
from patchclamp.language import prompt as whole_prompt
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.studies.checkpoint import Checkpoint
from patchclamp.studies.checks import as_prompt, checked
from patchclamp.studies.columns import listed
from patchclamp.studies.direct_attribution_result import DirectAttribution
from patchclamp.studies.metric import single_token
from patchclamp.studies.norm import tolerance
from patchclamp.studies.readout import LAST, LOGITS, Unembedding, proved_unembedding
from patchclamp.studies.result import provenance
from patchclamp.studies.writing import WRITES, Word, proved_writer

if TYPE_CHECKING:
    import torch

BY = ("layer", "head", "neuron")
WITHIN: dict[str, Word] = {"head": "z", "neuron": "neurons"}


@checked
def direct_attribution(
    lm: LM,
    prompt: Any,
    *,
    answer: Any,
    foil: Any = None,
    by: Sequence[str] = BY,
    weights: Any = None,
) -> DirectAttribution:
    """What each part of the model adds to logit(answer) − logit(foil) at the end of a prompt, or of several.

    prompt: text or token ids, or a list of either
    answer, foil: one token each, as text or id, or a list of them, one a prompt; without a foil it is logit(answer)
    by: "layer" is always there; "head" and "neuron" read the matrices that these write with from the model's files
    weights: folder or hub id of the model's files, if not the model's own name

    Raises: `ModelError` if the files are not at hand, or are not the live model's; `TokensError` for an answer of
    several tokens; the error of any run.
    """
    import torch

    for i, one in enumerate(by):
        if one not in BY:
            raise unknown("part", str(one), BY, f"by[{i}]")
    checkpoint = Checkpoint(str(weights or lm.model.name))
    prompts: list[Any] = (
        [as_prompt(one, f"prompt[{i}]") for i, one in enumerate(prompt)]
        if listed(prompt) else [as_prompt(prompt, "prompt")]
    )  # fmt: skip
    if not prompts:
        raise ProgramError("at least one prompt is needed", "prompt")
    answers = _each(lm, answer, len(prompts), "answer")
    foils = [] if foil is None else _each(lm, foil, len(prompts), "foil")
    inner: list[Word] = [word for one, word in WITHIN.items() if one in by and word in lm.sites.names]
    read = [Site("embed"), Site("resid_pre", 0), *map(Site, ("attn_out", "mlp_out", *inner)), LAST]
    runs = lm.run(prompts, max_tokens=1, capture=[*(site @ whole_prompt[-1] for site in read), LOGITS])
    rows = _Rows(lm, runs)
    unembedding = proved_unembedding(lm, checkpoint, runs[0].prompt_token_ids)
    last_ND, parts = rows.at(LAST), _parts(rows, lm)
    difference = _Difference(unembedding, answers, foils)
    towards_ND = unembedding.norm.pulled(difference.directions_ND, last_ND)  # of the stream
    shares = {part: (rows_ND * towards_ND).sum(-1) for part, rows_ND in parts.items()} | {"bias": difference.biases_N}
    totals_N, shares_NC = (last_ND * towards_ND).sum(-1) + difference.biases_N, torch.stack(list(shares.values()), 1)
    heads, head_biases = _within("z", inner, rows, checkpoint, towards_ND)
    neurons, neuron_biases = _within("neurons", inner, rows, checkpoint, towards_ND)
    result = DirectAttribution(
        provenance=provenance(lm),
        prompts=tuple("".join(lm.tokenizer.token_strings(run.prompt_token_ids)) for run in runs),
        answers=tuple(lm.tokenizer.token_strings(answers)), foils=tuple(lm.tokenizer.token_strings(foils)),
        parts=tuple(shares), shares=shares_NC.numpy(), totals=totals_N.numpy(),
        logit_diffs=difference.of(unembedding.uncapped(rows.at(LOGITS))).numpy(),
        unexplained=(totals_N - shares_NC.sum(1)).numpy(),
        heads=heads, head_biases=head_biases, neurons=neurons, neuron_biases=neuron_biases,
    )  # fmt: skip
    for run in runs:
        run.close()
    return result


class _Rows:
    """What the runs captured at their prompts' ends, fp32 [N, W]."""

    def __init__(self, lm: LM, runs: list[Run]) -> None:
        self.lm, self._captured = lm, lm.fetch(runs, copy=False)

    def at(self, site: Site) -> torch.Tensor:
        import torch

        name = str(self.lm.sites.resolve(site)[0])
        return torch.cat([torch.as_tensor(of_run[name]).float().flatten(1) for of_run in self._captured])


class _Difference:
    """logit(answer) − logit(foil) of normed rows, as directions [N, D] and what biases add [N]."""

    def __init__(self, unembedding: Unembedding, answers: list[int], foils: list[int]) -> None:
        import torch

        self._answers, self._foils = answers, foils
        matrix_VD = unembedding.matrix_VD
        self.directions_ND = matrix_VD[answers] - (matrix_VD[foils] if foils else 0.0)
        self.biases_N = torch.zeros(len(answers))
        if unembedding.norm.bias is not None:
            self.biases_N = self.directions_ND @ unembedding.norm.bias
        if unembedding.bias_V is not None:
            bias_V = unembedding.bias_V
            self.biases_N = self.biases_N + bias_V[answers] - (bias_V[foils] if foils else 0.0)
        self.directions_ND, self.biases_N = self.directions_ND * unembedding.scale, self.biases_N * unembedding.scale

    def of(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """The difference in each row of logits."""
        rows = list(range(len(self._answers)))
        return logits_NV[rows, self._answers] - (logits_NV[rows, self._foils] if self._foils else 0.0)


def _parts(rows: _Rows, lm: LM) -> dict[str, torch.Tensor]:
    """What the embedding, positions, every attention and every MLP added to the last stream, [N, D] each.

    Raises: `ModelError` if that does not make up the stream.
    """
    parts = {"embed": rows.at(Site("embed"))}
    positions_ND = rows.at(Site("resid_pre", 0)) - parts["embed"]
    if positions_ND.any():
        parts["positions"] = positions_ND
    for layer in range(lm.model.layers):
        parts |= {f"{word}[{layer}]": rows.at(Site(word, layer)) for word in ("attn_out", "mlp_out")}
    last_ND = rows.at(LAST)
    gap = float((sum(parts.values()) - last_ND).norm() / last_ND.norm())
    if not gap <= tolerance(lm.model.dtype):
        raise ModelError(
            f"what the embedding, attention and MLPs of this model added is {gap:.2g} off its last stream: a part of "
            "it is not known, so no sum over its parts is its logit"
        )
    return parts


def _within(
    word: Word, asked: list[Word], rows: _Rows, checkpoint: Checkpoint, towards_ND: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """What each head or neuron of each layer adds, [N, L, heads or neurons], and what their biases add, [N, L]; NaN in
    layers that have none."""
    lm, shape = rows.lm, (len(towards_ND), rows.lm.model.layers)
    count, size = (lm.sites.parts(word) or (0, 1)) if word in asked else (0, 1)
    shares, rest = np.full((*shape, count), np.nan, np.float32), np.full(shape, np.nan, np.float32)
    for ref in lm.sites.resolve(Site(word)) if count else ():
        assert ref.layer is not None
        read_NW, written_ND = rows.at(Site(word, ref.layer)), rows.at(Site(WRITES[word], ref.layer))
        writer = proved_writer(lm, checkpoint, word, ref.layer, read_NW, written_ND)
        of_numbers = writer.shares(read_NW, towards_ND)
        shares[:, ref.layer] = of_numbers.reshape(-1, count, size).sum(-1).numpy()
        rest[:, ref.layer] = writer.rest(read_NW, towards_ND).numpy()
    return shares, rest


def _each(lm: LM, tokens: Any, count: int, path: str) -> list[int]:
    """The ids of one token for every prompt, or of one a prompt."""
    if not isinstance(tokens, (list, tuple)):
        return [single_token(lm, tokens, path)] * count
    if len(tokens) != count:
        raise ProgramError(f"{len(tokens)} tokens for {count} prompts: give one, or one a prompt", path)
    return [single_token(lm, token, f"{path}[{i}]") for i, token in enumerate(tokens)]
