"""What a request for a sweep is, and how much of one a server takes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from patchclamp.engines.vllm.serve_limits import ServeLimits
from patchclamp.lm import LM
from patchclamp.serve.examples import SWEEPS
from patchclamp.serve.front import Front
from patchclamp.serve.schema import Closed
from patchclamp.studies import MeanOf, Resampled
from patchclamp.studies.patch_sweep import SweepPlan

MAX_SITES = 64
Prompt = Annotated[str | list[int], Field(description="text or token ids")]
Answer = Annotated[str | int | list[int], Field(description="text, a token id, or several")]
Selection = Annotated[str | int, Field(description="a selection of a prompt, or one position", examples=["prompt[-1]"])]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class MeanSource(Closed):
    """The mean over the positions of some prompts, or over those of a selection."""

    type: Literal["mean"]
    prompts: list[Prompt] = Field(min_length=1)
    tokens: Selection | None = None
    by_position: bool = Field(False, description="a mean for each position by itself")


class ResampledSource(Closed):
    """The row of a prompt drawn for each cell."""

    type: Literal["resampled"]
    prompts: list[Prompt] = Field(min_length=1)
    seed: int = Field(0, ge=0)
    draws: int = Field(1, ge=1, description="how many prompts are drawn for a cell, whose value is their mean")


class SweepRequest(BaseModel):
    """The arguments of `pc.studies.patch_sweep`."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": SWEEPS})
    clean: Prompt | list[Prompt] = Field(description="a prompt, or several, pair by pair")
    corrupt: Prompt | list[Prompt]
    answer: Answer | list[Answer] = Field(description="of several pairs one for all, or a list of them")
    foil: Answer | list[Answer | None] | None = None
    sites: list[str] = Field(["resid_pre"], min_length=1, max_length=MAX_SITES)
    layers: str | int | list[int] | None = Field(None, description='all; or some, such as "0:12"')
    positions: list[Selection] | dict[str, Selection | list[Selection]] | None = Field(
        None,
        description="selections of the corrupt prompt, or labels with a selection each, and of several pairs perhaps a "
        "list of them, one a pair; all aligned ones",
    )
    metric: str = Field("logit_diff", description="logit_diff, recovered, logprob or prob")
    direction: str = Field(
        "denoising", description="denoising, or noising: cells of the corrupt run into the clean one"
    )
    group: int | None = Field(None, description="so many heads, neurons or experts are one row: 1 for each head")
    window: int = Field(1, description="so many layers around a cell's are patched with it")
    source: Annotated[MeanSource | ResampledSource, Field(discriminator="type")] | str | None = Field(
        None, description="in place of the other prompt's values: zeros, bank:NAME, a mean, or prompts drawn at random"
    )
    alpha: Finite = Field(1.0, description="how much of the new value is mixed in")
    mask: list[Finite] | str | None = Field(
        None, description="in which columns of a row: a weight each, or the name of a vector that this API key has here"
    )
    zoom: int | None = Field(None, ge=1, description="start with blocks, and look into the best so many of each size")
    seed: int = Field(0, ge=0, description="of the confidence interval and the test over pairs")
    resume: str | None = Field(
        None, description="a name under which values are kept, from which the same request goes on", examples=["eiffel"]
    )

    def arguments(self) -> dict[str, Any]:
        """As `patch_sweep` takes them, but for `resume`."""
        given = self.model_dump(exclude={"source", "resume"})
        return given | {"source": self._source()}

    @property
    def prompts(self) -> int:
        """How many prompts are run without a patch."""
        of_source = 0 if isinstance(self.source, str | None) else len(self.source.prompts)
        return _count(self.clean) + _count(self.corrupt) + of_source

    def _source(self) -> Any:
        if isinstance(self.source, MeanSource):
            return MeanOf(self.source.prompts, self.source.tokens, self.source.by_position)
        if isinstance(self.source, ResampledSource):
            return Resampled(self.source.prompts, self.source.seed, self.source.draws)
        return self.source


def check_sweep(limits: ServeLimits, plan: SweepPlan) -> None:
    """Raises `TooLarge` for a sweep that is more than a server takes. The grid comes first: what else the plan knows
    takes as long as the grid is large."""
    limits.check("sweep_grid", plan.grid, "cells of the grid, in all pairs", "sites")
    limits.check("sweep_cells", plan.runs, "cells of the sweep, in all pairs, draws and tokens of answers", "sites")
    limits.check("run_bytes", plan.captured_bytes, "bytes that the prompts which are read may capture", "sites")


def owners_lm(front: Front, owner: str) -> LM:
    """An `LM` on the server's engine whose bank has what an owner has here, now."""
    lm = LM(front.lm.model.name, engine=front.engine)
    for name, entry in front.kept.owned(owner).items():
        lm.bank[name] = entry
    return lm


def _count(prompts: Any) -> int:
    """How many prompts these are: a list of numbers is one."""
    return 1 if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else len(prompts)
