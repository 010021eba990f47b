"""What a fuzz sweep was asked, checked before anything runs: the noise of a cell, its sampling, its first token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, unknown
from patchclamp.language import Capture, Noise, Op
from patchclamp.language.ops import MODES, as_capture, fuzz
from patchclamp.language.site import At, parse_edited_site
from patchclamp.language.tokens import prompt
from patchclamp.language.values import as_items
from patchclamp.lm import MAX_SCORES, is_token_id
from patchclamp.run import Run
from patchclamp.studies.inputs import Asked, as_floats, as_sites, as_text, check_whole
from patchclamp.studies.metric import log_softmax, with_rest


class Fuzz(msgspec.Struct, frozen=True):
    """The edits of a strength and a seed: at the embedding, as `language.ops` has them, or noise at some sites."""

    mode: str
    at: tuple[At, ...] | None
    relative: bool

    @classmethod
    def of(cls, mode: str, at: Any, relative: bool) -> Fuzz:
        if mode not in MODES:
            raise unknown("way to fuzz", str(mode), MODES, "mode")
        if at is None:
            if not relative:
                raise ProgramError("noise at the embedding is relative; for another, give at=['embed']", "relative")
            return cls(mode, None, True)
        if mode != "noise":
            raise ProgramError(f"{mode!r} is a way to fuzz the embedding: at= takes noise", "mode")
        sites = as_sites(at, "at")
        if not sites:
            raise ProgramError("at least one site is needed", "at")
        return cls(mode, tuple(_place(site, i) for i, site in enumerate(sites)), relative)

    def edits(self, strength: float, seed: int) -> list[Op]:
        """Noise; none at strength 0."""
        if self.at is None:
            seeded = {"fuzz_seed": seed} if self.mode == "noise" else {}
            return list(fuzz({"fuzz_strength": strength, "fuzz_mode": self.mode, **seeded}))
        if strength == 0:
            return []
        return [Noise(strength, at=site, seed=seed, relative=self.relative) for site in self.at]

    @property
    def words(self) -> str:
        """`noise at embed, times the row's root mean square`."""
        if self.mode == "scale":
            return "embeddings times 1 − strength"
        places = "embed" if self.at is None else ", ".join(map(str, self.at)).replace(" @ every", "")
        return f"noise at {places}" + (", times the row's root mean square" if self.relative else "")


def _place(site: Any, number: int) -> At:
    """Site and tokens of `at[number]`."""
    try:
        if isinstance(site, str):
            parse_edited_site(site.partition("@")[0])
        place = as_capture(site)
    except PatchclampError as error:
        raise error.under(f"at[{number}]") from None
    return place.at @ place.tokens


class Sampling(msgspec.Struct, frozen=True):
    """vLLM's parameters, one seed a run where tokens are drawn."""

    parameters: dict[str, Any]

    @classmethod
    def of(cls, sampling: Mapping[str, Any] | None) -> Sampling:
        if sampling is not None and not isinstance(sampling, Mapping):
            raise ProgramError(f"expected names and values, got {type(sampling).__name__}", "sampling")
        parameters = {name: getattr(value, "tolist", lambda v=value: v)() for name, value in (sampling or {}).items()}
        for name, instead in (("n", "seeds="), ("seed", "seeds="), ("extra_args", "strengths= and mode=")):
            if name in parameters:
                raise ProgramError(f"a fuzz sweep sets it for each cell: give {instead}", f"sampling.{name}")
        return cls(parameters)

    @property
    def drawn(self) -> bool:
        """Whether tokens are drawn, not taken greedily."""
        return bool(self.parameters.get("temperature"))

    def seeded(self, seed: int) -> dict[str, Any]:
        return {**self.parameters, "seed": seed} if self.drawn else self.parameters


class FirstToken:
    """How the distribution of the first token is read: all of it, its likeliest tokens, or not at all.

    words: for the result
    capture: of every run
    """

    def __init__(self, divergence: str | int) -> None:
        self.likeliest = 0
        if is_token_id(divergence):
            self.likeliest = int(divergence)
            if not 1 <= self.likeliest <= MAX_SCORES:
                raise ProgramError(f"from 1 to {MAX_SCORES} tokens, not {divergence}", "divergence")
        elif not isinstance(divergence, str) or divergence not in ("full", "none"):
            raise unknown("divergence", str(divergence), ("full", "none", "a number of tokens"), "divergence")
        self.full = divergence == "full"
        self.words = f"top {self.likeliest} and the rest" if self.likeliest else str(divergence)
        self.capture = [Capture("logits", prompt[-1])] if self.full else []
        self.scores: list[list[int]] = []

    def likeliest_calls(self, batches: Iterable[Sequence[Asked]]) -> Iterator[dict[str, Any]]:
        """The calls that find the likeliest tokens of batches of prompts."""
        for part in batches:
            yield {"prompt": [one.prompt for one in part], "max_tokens": 1, "logprobs": self.likeliest}

    def likeliest_of(self, runs: Sequence[Run]) -> list[list[int]]:
        """The tokens of each prompt that are likeliest without noise."""
        return [sorted(run.top_logprobs[0]) for run in runs]

    def score(self, number: int) -> list[int]:
        """The token ids that runs of a prompt score."""
        return self.scores[number] if self.scores else []

    def read(self, run: Run) -> np.ndarray:
        """Log-probabilities of the first token: [V], [k + 1], or [0]."""
        if self.full:
            return log_softmax(np.asarray(run["logits"])[0])
        return with_rest(list(run.scores.values())) if self.likeliest else np.zeros(0)


def strengths_of(strengths: Sequence[float] | None, default: tuple[float, ...]) -> tuple[float, ...]:
    """Strengths, ascending and different."""
    if strengths is None:
        return default
    numbers = as_floats(strengths, "strengths")
    if not numbers or list(numbers) != sorted(set(numbers)) or not 0 <= numbers[0] <= numbers[-1] < float("inf"):
        raise ProgramError(f"ascending numbers from 0 on are needed, none twice, not {numbers}", "strengths")
    return numbers


def seeds_of(seeds: Sequence[int]) -> tuple[int, ...]:
    """Seeds, all different."""
    numbers = tuple(check_whole(seed, f"seeds[{i}]") for i, seed in enumerate(as_items(seeds, "seeds")))
    if not 0 < len(set(numbers)) == len(numbers):
        raise ProgramError(f"expected at least one seed, and none twice, got {list(numbers)}", "seeds")
    return numbers


def pattern_of(refusal: str | None) -> re.Pattern[str] | None:
    """A regular expression, compiled."""
    try:
        return None if refusal is None else re.compile(as_text(refusal, "refusal"))
    except re.error as error:
        raise ProgramError(f"{refusal!r} is not a regular expression: {error}", "refusal") from None
