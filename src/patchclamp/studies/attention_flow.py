"""The flow of information through attention: rollout through all layers, and edges weighted by the heads' outputs.

Attention patterns alone overstate tokens with small value vectors, such as the first token. So an edge is weighted by
its term in the head's output, α · v W_O: by the norm of that term, or by its direct contribution to a logit.

Source: Abnar and Zuidema 2020 (arXiv:2005.00928), section 3, for the rollout; Kobayashi et al. 2020 (arXiv:2004.10102),
equation 5, for norms; Elhage et al. 2021, "A mathematical framework for transformer circuits", for contributions.

T tokens · Q queries · L layers · H heads · E head size · D model width · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from patchclamp.errors import CapacityError, ModelError, ProgramError
from patchclamp.language import Capture, Site, every, prompt
from patchclamp.language.structs import PublicStruct
from patchclamp.language.tokens import TokensLike
from patchclamp.lm import LM
from patchclamp.plots import AttentionMaps, GridPanel, TokenGrid, style
from patchclamp.run import Run
from patchclamp.studies import inputs
from patchclamp.studies.metric import single_token
from patchclamp.studies.readout import LAST, proved_projection, proved_unembedding, relative_gap, tolerance
from patchclamp.studies.study import Study, StudyResult, progress, provenance

if TYPE_CHECKING:
    import pandas
    import torch

MAX_BYTES = 1 << 28  # limit on the patterns in one call, and on a result
SHOWN = 12  # heads in a picture of many
READ = ("v", "z", "attn_out")  # sites needed for edges, besides the pattern


def by_layer(
    lm: LM, prompts: Sequence[list[int]], layers: Sequence[int], tokens: TokensLike, also: Sequence[str] = ()
) -> Iterator[tuple[int, list[Run]]]:
    """Yield each layer and its runs, one per prompt: patterns captured at the query tokens `tokens`, plus the sites
    `also`. Each call of `lm.run` captures as many layers as fit in `MAX_BYTES`; its runs are then closed."""
    size = 4 * lm.sites.sizes.heads * sum(len(ids) ** 2 for ids in prompts)
    together = max(MAX_BYTES // size, 1)
    for first in range(0, len(layers), together):
        some = layers[first : first + together]
        captures = [
            capture for layer in some
            for capture in (Capture(Site("pattern", layer), tokens), *(Site(name, layer) @ prompt for name in also))
        ]  # fmt: skip
        runs = lm.run(list(prompts), max_tokens=1, capture=captures)
        yield from ((layer, runs) for layer in some)
        for run in runs:
            run.close()


class AttentionRolloutResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """`rollout` [T, T]: weight of each prompt token (columns) in each token's state (rows), after the last of `layers`.
    Rows sum to 1."""

    prompt_tokens: tuple[str, ...]
    layers: tuple[int, ...]
    rollout: np.ndarray

    def picture(self) -> AttentionMaps:
        """Return plot data: the rollout as a heatmap, and as weights on the prompt's tokens."""
        return AttentionMaps(
            title=f"Attention rollout through layers {style.positions(self.layers)}", provenance=self.provenance.where,
            explained=("Each row is a token, each column the share of an earlier one in it: the product over layers of "
                       "half the mean pattern and half the token itself."),
            tokens=self.prompt_tokens, queries=tuple(range(len(self.prompt_tokens))), names=("rollout",),
            maps=self.rollout[None],
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<AttentionRolloutResult {list(self.rollout.shape)} through {len(self.layers)} layers>"


class AttentionRollout(Study):
    """Multiply the head-averaged attention A of all layers, each mixed with the residual connection: 0.5 · A + 0.5 · I.

    Raises: `UnsupportedSite` where patterns are not available, and the error of any run.
    """

    command = "rollout"
    positional = 1

    prompt: inputs.Prompt
    """Prompt, as text or token ids."""
    layers: inputs.Layers = None
    """Layers to include; by default all layers with attention."""

    def _run(self, lm: LM, *, show_progress: inputs.Progress = None) -> AttentionRolloutResult:
        words, layers = inputs.words_of(lm, self.prompt, "prompt"), inputs.layers_of(lm, "pattern", self.layers)
        identity = np.eye(len(words.ids), dtype=np.float32)
        rollout = identity
        with progress("rolling out", len(layers), show_progress, "layers") as advance:
            for layer, [run] in by_layer(lm, [list(words.ids)], layers, prompt):
                mean = run.attention[f"pattern[{layer}]"].values.mean(1)
                mean = mean / mean.sum(-1, keepdims=True)  # an attention sink takes part of each row
                rollout = (0.5 * mean + 0.5 * identity) @ rollout
                advance(1)
        return AttentionRolloutResult(
            provenance=provenance(lm), prompt_tokens=words.tokens, layers=tuple(layers), rollout=rollout
        )


attention_rollout: Callable[..., AttentionRolloutResult] = AttentionRollout.short_form("attention_rollout")


class AttentionEdge(PublicStruct, frozen=True):
    """An edge from the token at `query` to the token at `key`, in head `z[layer, head]`."""

    head: str
    query: int
    key: int
    value: float


class AttentionEdgesResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """Edges from the tokens at `positions` to all tokens, in the heads of `layers`.

    `lengths` [L, H, Q, T]: α ‖v W_O‖, the norm of the edge's term in the head's output, before any post-attention norm.
    `shares` [L, H, Q, T]: the edge's direct contribution to the logit of `answer` at the query, minus that to the logit
    of `foil`; [0, H, Q, T] without an answer. The sum over keys is the head's direct logit attribution.
    """

    prompt_tokens: tuple[str, ...]
    positions: tuple[int, ...]
    layers: tuple[int, ...]
    answer: str | None
    foil: str | None
    lengths: np.ndarray
    shares: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """The weights used to rank edges, [L, H, Q, T]: `shares`, or `lengths` if there is no answer."""
        return self.lengths if self.answer is None else self.shares

    def best(self, count: int = 10) -> list[AttentionEdge]:
        """Return the edges with the largest absolute `values`, largest first."""
        order = np.argsort(-np.abs(self.values), axis=None, kind="stable")[:count]
        places = zip(*(axis.tolist() for axis in np.unravel_index(order, self.values.shape)), strict=True)
        return [AttentionEdge(f"z[{self.layers[at[0]]}, {at[1]}]", self.positions[at[2]], at[3], float(self.values[at]))
                for at in places]  # fmt: skip

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per nonzero edge: layer, head, query, key, length and share."""
        import pandas

        l, h, q, t = at = np.nonzero(self.lengths)  # noqa: E741
        columns = {"layer": np.array(self.layers)[l], "head": h, "query": np.array(self.positions)[q], "key": t,
                   "length": self.lengths[at]}  # fmt: skip
        return pandas.DataFrame(columns if self.answer is None else columns | {"share": self.shares[at]})

    def picture(self, layer: int | None = None) -> AttentionMaps | TokenGrid:
        """Return plot data for one layer's heads, by default for the heads with the largest edges: a row of tokens per
        head if there is one query, otherwise a heatmap per head."""
        heads = np.abs(self.values).max((2, 3))
        order = np.argsort(-heads, axis=None, kind="stable")[:SHOWN]
        if layer is not None:
            if layer not in self.layers:
                raise ProgramError(f"expected one of the layers {list(self.layers)}, got {layer!r:.100}", "layer")
            order = np.arange(heads.shape[1]) + self.layers.index(layer) * heads.shape[1]
        maps = self.values.reshape(-1, *self.values.shape[2:])[order]
        names = tuple(f"z[{self.layers[n // heads.shape[1]]}, {n % heads.shape[1]}]" for n in order.tolist())
        title, where = "Attention weighted by values", self.provenance.where
        told = "the length of what the head writes for it, α ‖v W_O‖"
        if self.answer is not None:
            foil = "" if self.foil is None else f" − {style.quoted(self.foil)}"
            title = f"Contributions of attention edges to the logit of {style.quoted(self.answer)}{foil}"
            told = "its share of the logit after the query, with the final norm's scale frozen"
        explained = f"Each cell is an attention edge, from a query to a key: {told}."
        if len(self.positions) != 1:
            return AttentionMaps(
                title=title, explained=explained, provenance=where, tokens=self.prompt_tokens, queries=self.positions,
                names=names, maps=maps, signed=self.answer is not None,
            )  # fmt: skip
        panel = GridPanel(
            name=f"from {style.quoted(self.prompt_tokens[self.positions[0]])}", row_name="head", column_name="token",
            rows=names[::-1], columns=tuple(map(style.visible, self.prompt_tokens)), values=maps[::-1, 0],
            centre=None if self.answer is None else 0.0,
        )  # fmt: skip
        table = [(one.head, style.visible(self.prompt_tokens[one.key]), style.number(one.value)) for one in self.best()]
        return TokenGrid(title=title, explained=explained, provenance=where, panels=(panel,),
                         prompt=self.prompt_tokens, table=(("head", "token", "value"), *table))  # fmt: skip

    def __repr__(self) -> str:
        best = ", ".join(f"{one.head} {one.query} → {one.key} {one.value:.3f}" for one in self.best(3))
        return f"<AttentionEdgesResult {list(self.lengths.shape)}: {best}>"


class AttentionEdges(Study):
    """Weight each attention edge by the norm of its term in the head's output, and by its contribution to a logit.

    Raises: `ModelError` if a head's output is not its values weighted by its pattern, or a part of the model cannot be
    reproduced from its weights; `CapacityError` for more than 2²⁶ edges; and the error of any run.
    """

    command = "attention-edges"
    positional = 1

    prompt: inputs.Prompt
    """Prompt, as text or token ids."""
    answer: inputs.Answer = None
    """Token, as text or id, whose logit is attributed to edges."""
    foil: inputs.Answer = None
    """Token to compare the answer with."""
    layers: inputs.Layers = None
    """Layers to include; by default all layers with attention."""
    tokens: inputs.Selected | None = None
    """Query tokens; by default the last token if there is an answer, otherwise all."""

    def _run(self, lm: LM, *, show_progress: inputs.Progress = None) -> AttentionEdgesResult:
        import torch

        if self.answer is None and self.foil is not None:
            raise ProgramError("a foil requires an answer", "foil")
        words, layers = inputs.words_of(lm, self.prompt, "prompt"), inputs.layers_of(lm, "pattern", self.layers)
        chosen = prompt if self.answer is None else prompt[-1]
        queries = inputs.chosen_positions(lm, words, chosen if self.tokens is None else self.tokens, "tokens")
        compared = [single_token(lm, token, path) for token, path in ((self.answer, "answer"), (self.foil, "foil"))
                    if token is not None]  # fmt: skip
        heads, ids, rows = lm.sites.sizes.heads, list(words.ids), list(queries)
        if (count := len(layers) * heads * len(rows) * len(ids)) > MAX_BYTES // 4:
            raise CapacityError(f"expected at most {MAX_BYTES // 4:,} edges, got {count:,}: select fewer layers or "
                                "tokens", "tokens")  # fmt: skip
        lengths, shares = list[np.ndarray](), list[np.ndarray]()
        with progress("weighing edges", len(layers), show_progress, "layers") as advance:
            towards_QD = _towards(lm, ids, compared, rows) if compared else None
            for layer, [run] in by_layer(lm, [ids], layers, every[queries], READ):
                v_TGE, z_THE, out_TD = (torch.as_tensor(run[Site(name, layer)]).float() for name in READ)
                v_THE = v_TGE.repeat_interleave(heads // v_TGE.shape[1], 1)
                pattern_QHT = torch.from_numpy(run.attention[f"pattern[{layer}]"].values)
                gap = relative_gap(torch.einsum("qht,the->qhe", pattern_QHT, v_THE), z_THE[rows])
                if not gap <= tolerance(lm.model.dtype):
                    raise ModelError(f"z[{layer}] does not equal pattern × values (relative error {gap:.2g})")
                writer = proved_projection(lm, "z", layer, z_THE.flatten(1), out_TD)
                pattern_HQT = pattern_QHT.transpose(0, 1)
                matrix_HED = writer.matrix_WD.reshape(heads, -1, writer.matrix_WD.shape[1]) * writer.factor
                lengths_HT = torch.stack([(v_THE[:, h] @ matrix_HED[h]).norm(dim=-1) for h in range(heads)])
                lengths.append((pattern_HQT * lengths_HT[:, None]).numpy())
                if towards_QD is not None:
                    towards_QHE = writer.towards(z_THE[rows].flatten(1), towards_QD).unflatten(1, (heads, -1))
                    shares.append((pattern_HQT * torch.einsum("qhe,the->hqt", towards_QHE, v_THE)).numpy())
                advance(1)
        strings = [*lm.tokenizer.token_strings(compared), None, None]
        return AttentionEdgesResult(
            provenance=provenance(lm), prompt_tokens=words.tokens, positions=queries, layers=tuple(layers),
            answer=strings[0], foil=strings[1], lengths=np.stack(lengths),
            shares=np.stack(shares) if shares else np.zeros((0, heads, len(rows), len(ids)), np.float32),
        )  # fmt: skip


attention_edges: Callable[..., AttentionEdgesResult] = AttentionEdges.short_form("attention_edges")


def _towards(lm: LM, ids: list[int], compared: list[int], rows: list[int]) -> torch.Tensor:
    """Return the gradient [Q, D] of the logit of `compared[0]`, minus the logit of `compared[1]` if given, with respect
    to each query's final stream, with the final norm's scale frozen."""
    import torch

    unembedding = proved_unembedding(lm, ids)
    run = lm.run(ids, max_tokens=1, capture=[LAST @ every[tuple(rows)]])
    last_QD = torch.as_tensor(run[LAST]).float()
    run.close()
    answer_D, *foil_D = unembedding.matrix_VD[compared]
    direction_D = (answer_D - foil_D[0] if foil_D else answer_D) * unembedding.scale
    return unembedding.norm.pulled(direction_D.expand_as(last_QD), last_QD)
