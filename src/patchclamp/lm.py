"""`pc.LM`: a model on an engine, and `Run`: what came of one request."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from patchclamp.engines.base import Answer, Engine, Request
from patchclamp.engines.open import open_engine
from patchclamp.errors import EngineError, MissingSource, PatchclampError, ProgramError, TokensError
from patchclamp.plan import CAPTURE, Bound, Prompt, bind
from patchclamp.proofs import ensure_proved
from patchclamp.spec import At, Op, Program, Site
from patchclamp.spec.fuzz import fuzz
from patchclamp.spec.ops import DTYPES
from patchclamp.spec.site import site as read_site
from patchclamp.spec.tokens import Tokens
from patchclamp.spec.tokens import tokens as as_tokens
from patchclamp.store.named import NamedBank

MOST_SCORES = 128  # token ids graded in one run: what vLLM's sampler takes


class LM:
    """A language model. `model` is a hub id, a folder, or "smollm2", the small real model of the demo extra.

    `engine`: "vllm" (where it is installed, the default), "transformers", or "fake"; `options` are the engine's own,
    by its own names (vLLM's engine arguments; for Transformers see `TransformersEngine`). `prove`: a site is offered
    only once it has been proved on this live model (a few seconds on a CPU, remembered for the model and versions).

    Raises: `ModelError` for a model without a site table, `EngineError` if the engine does not start,
    `UnknownName` for an option it does not have.
    """

    def __init__(self, model: str, engine: str | Engine | None = None, *, prove: bool = True, **options: Any) -> None:
        self.engine: Engine = open_engine(model, engine, options)
        self.bank = NamedBank()
        self._runs: weakref.WeakValueDictionary[str, Run] = weakref.WeakValueDictionary()
        self._close = weakref.finalize(self, self.engine.close) if self.engine is not engine else self.engine.close
        if prove:
            try:
                ensure_proved(self)
            except BaseException:
                self.close()
                raise

    @property
    def model(self):
        """Facts of the model: name, engine, layers, d_model, d_vocab, dtype, max_model_len."""
        return self.engine.model

    @property
    def sites(self):
        """The model's site map."""
        return self.engine.sites

    @property
    def tokenizer(self):
        return self.engine.tokenizer

    def run(
        self,
        prompt: str | Sequence[Any] | None = None,
        *,
        messages: list[Any] | None = None,
        max_tokens: int = 16,
        edits: Any = (),
        capture: Any = (),
        sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        score: Sequence[Any] = (),
    ) -> Any:
        """Runs one prompt (returns a `Run`) or a list of them as one batch (returns a list of `Run`).

        `prompt`: text or token ids, or a list of either; `messages`: a chat instead. `edits` and `capture`: one program
        for all prompts, or a list of lists, one a prompt. `sampling`: vLLM's names, greedy if not given, or a list of
        such, one a prompt; its `extra_args` may have `fuzz_strength`, `fuzz_seed` and `fuzz_mode` (`spec.fuzz`), which
        act after the edits. `score`: token ids whose log-probability as the next token after the prompt is wanted
        (`run.scores`), or a list of such lists.

        One prompt raises its error; of a list every `Run` comes back, with `error` set on those that failed. Errors in
        the programs themselves are raised before anything runs.
        """
        prompts, many = self._prompts(prompt, messages)
        each = (_each(edits, len(prompts), "edits"), _each(capture, len(prompts), "capture"))
        programs = [Program.of(*parts) for parts in zip(*each, strict=True)]
        samplings = [dict(one) for one in self._samplings(sampling, len(prompts))]
        fuzzes = [_fuzz(one.pop("extra_args", None)) for one in samplings]
        programs = [msgspec.structs.replace(program, edits=program.edits + fuzz) if fuzz else program
                    for program, fuzz in zip(programs, fuzzes, strict=True)]  # fmt: skip
        for one in samplings if isinstance(sampling, (list, tuple)) else samplings[:1]:
            self.engine.check_sampling(one)
        scores = _each(score, len(prompts), "score")
        keys = [secrets.token_hex(8) for _ in prompts]
        requests = [
            self._request(*given, max_tokens, many and i)
            for i, given in enumerate(zip(keys, prompts, programs, scores, samplings, strict=True))
        ]
        futures = self.engine.submit(requests)
        try:
            answers = [_wait(future) for future in futures]
        except BaseException:
            self.engine.abort(keys)  # interrupted: nothing goes on computing or keeps captures
            raise
        runs = [Run(self, *made) for made in zip(requests, programs, answers, strict=True)]
        for run in runs:
            self._runs[run.key] = run
        if not many and runs[0].error is not None:
            raise runs[0].error
        return runs if many else runs[0]

    def tokens(self, text: str) -> list[int]:
        """Token ids of a prompt's text, with the tokenizer's special tokens."""
        return self.tokenizer.encode(text)

    def close(self) -> None:
        """Stops the engine. An `LM` that is dropped is closed too, unless it was given an engine object."""
        self._close()

    def sleep(self, level: int = 1) -> None:
        """Gives the GPU memory of weights and cache back until `wake`; captures and vectors stay.

        Raises `EngineError` where the engine cannot: other engines than vLLM, levels above 1 (they throw the weights
        away), engines started without `enable_sleep_mode=True`, and while runs are under way.
        """
        self._sleeper("sleep")(level)

    def wake(self) -> None:
        """Takes the memory again and brings the weights back. An engine that is awake stays so."""
        self._sleeper("wake")()

    def _sleeper(self, verb: str) -> Any:
        found = getattr(self.engine, verb, None)
        if found is None:
            raise EngineError(f"the {self.model.engine} engine does not sleep; vLLM on a GPU does")
        return found

    def __enter__(self) -> LM:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        m = self.model
        return f"<LM {m.name} on {m.engine} {m.version}, {m.layers} layers, {m.dtype}>"

    def _prompts(self, prompt: Any, messages: Any) -> tuple[list[tuple[list[int], str | None]], bool]:
        """(ids, text) of every prompt, and whether many were given."""
        if (prompt is None) == (messages is None):
            raise ProgramError("give either a prompt or messages")
        if messages is not None:
            many = isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], (list, tuple))
            return [(self._chat(chat), None) for chat in (messages if many else [messages])], many
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # a NumPy array or a tensor of ids
        if not isinstance(prompt, (str, list, tuple)):
            raise ProgramError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}", "prompt")
        many = not isinstance(prompt, str) and not (len(prompt) > 0 and isinstance(prompt[0], (int, np.integer)))
        given = prompt if many else [prompt]
        made = [self._prompt(one, f"prompt[{i}]" if many else "prompt") for i, one in enumerate(given)]
        return made, many

    def _samplings(self, given: Any, prompts: int) -> Sequence[Mapping[str, Any]]:
        many = list(given) if isinstance(given, (list, tuple)) else [given or {}] * prompts
        if len(many) != prompts or not all(isinstance(one, Mapping) for one in many):
            raise ProgramError(f"names and values are needed, or a list of {prompts} of them, one a prompt", "sampling")
        return many

    def _chat(self, messages: Any) -> list[int]:
        try:
            return self.tokenizer.chat(list(messages))
        except PatchclampError:
            raise
        except Exception as error:
            raise ProgramError(f"not a chat of role and content: {type(error).__name__}: {error}", "messages") from None

    def _prompt(self, prompt: Any, path: str) -> tuple[list[int], str | None]:
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if isinstance(prompt, str):
            try:
                ids, text = self.tokenizer.encode(prompt), prompt
            except (TypeError, ValueError) as error:
                raise ProgramError(f"this text cannot be tokenised: {error}", path) from None
        elif isinstance(prompt, (list, tuple)) and all(_is_id(i) for i in prompt):
            ids, text = [int(i) for i in prompt], None
        else:
            raise ProgramError("a prompt is text or a list of token ids", path)
        if not ids:
            raise TokensError("an empty prompt has no position to run", path)
        outside = [i for i in ids if not 0 <= i < self.model.d_vocab]
        if outside:
            raise TokensError(f"token id {outside[0]} is outside the vocabulary of {self.model.d_vocab}", path)
        return ids, text

    def _request(
        self,
        key: str,
        prompt: tuple[list[int], str | None],
        program: Program,
        score: Any,
        sampling: dict[str, Any],
        max_tokens: int,
        number: int | bool,
    ) -> Request:
        ids, text = prompt
        if not _is_id(max_tokens) or max_tokens < 1:
            raise ProgramError(f"at least one token must be generated, not {max_tokens!r}", "max_tokens")
        if len(ids) + max_tokens > self.model.max_model_len:
            raise TokensError(
                f"{len(ids)} prompt tokens and max_tokens={max_tokens} exceed max_model_len={self.model.max_model_len}"
            )
        max_tokens, score = int(max_tokens), list(score)
        outside = [i for i in score if not _is_id(i) or not 0 <= i < self.model.d_vocab]
        if len(set(score)) > MOST_SCORES:
            raise ProgramError(f"at most {MOST_SCORES} tokens can be scored, not {len(set(score))}", "score")
        if outside:
            raise TokensError(f"{outside[0]!r} is not a token id below {self.model.d_vocab}", "score")
        vectors: dict[str, np.ndarray] = {}
        spelled = Prompt(ids, lambda: self.tokenizer.spell(ids, text))
        try:
            known = (self.sites, self._source, self.bank, vectors)
            bound = bind(program, key, spelled, max_tokens, *known) if program else None
        except PatchclampError as error:
            raise error if number is False else error.under(f"prompt {number}") from None
        return Request(key, ids, max_tokens, bound, vectors, sampling, tuple(int(i) for i in score))

    def _source(self, run: str) -> Run:
        found = self._runs.get(run)
        if found is None:
            raise MissingSource(f"run {run} is not here: it was closed or dropped, or ran on another LM")
        if found.error is not None:
            raise MissingSource(f"run {run} failed: {found.error}")
        if found.closed:
            raise MissingSource(f"run {run} was closed")
        return found


class Run:
    """One executed request: its text and tokens, log-probabilities, captures, and the error it met.

    `prompt_token_ids` and `token_ids` (generated) are lists; `logprobs` has a float for each generated token; `scores`
    maps each token id of `score=` to its log-probability as the next token. Captures stay with the worker until the run
    is dropped or `close`d; `run[site]` fetches them, once.
    """

    def __init__(self, lm: LM, request: Request, program: Program, answer: Answer | PatchclampError) -> None:
        self.key, self.prompt_token_ids, self.program = request.run, request.prompt_token_ids, program
        self.error: PatchclampError | None = None if isinstance(answer, Answer) else answer
        self.closed = False
        self._lm, self._answer = lm, answer
        self._bound: Bound | None = request.bound
        self._fetched: dict[tuple[int, int | None], tuple[np.ndarray, Any]] = {}
        self._release = weakref.finalize(self, lm.engine.release, [self.key])
        self._release.atexit = False
        if not program:
            self._release.detach()

    @property
    def answer(self) -> Answer:
        if isinstance(self._answer, PatchclampError):
            raise self._answer
        return self._answer

    @property
    def text(self) -> str:
        """The generated text."""
        return self.answer.text

    @property
    def token_ids(self) -> list[int]:
        return self.answer.token_ids

    @property
    def logprobs(self) -> list[float]:
        return self.answer.logprobs

    @property
    def scores(self) -> dict[int, float]:
        return self.answer.scores

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were read from the engine's prefix cache instead of computed."""
        return self.answer.cached_tokens

    @property
    def finish_reason(self) -> str | None:
        return self.answer.finish_reason

    def __getitem__(self, site: Site | str) -> Any:
        """What was captured at one site: a CPU tensor [T, W] of the asked positions, in the capture's dtype.

        A site captured twice gives the union of positions; where both have one, the later in the program's order. A
        path such as "edits[0]" gives what that `Capture` kept, at its own place in the order.

        Raises `MissingSource` if it was not captured, and the run's own error if it failed.
        """
        return self._fetch(site)[1]

    def positions(self, site: Site | str) -> list[int]:
        """The positions that label the rows of `run[site]`."""
        return [int(position) for position in self._fetch(site)[0]]

    @property
    def sites(self) -> list[str]:
        """Every captured site, as text."""
        bound = self._bound
        points = bound.captured() if bound is not None else {}
        return [str(place) for place in self._lm.sites.places() if place.point in points]

    def close(self) -> None:
        """Lets the captures go now."""
        self.closed = True
        self._release()

    def places(self, site: Site | str) -> list[tuple[str, str]]:
        """The places that a site names, each by its label in the bank's means and as `run[...]` takes it."""
        places = self._lm.sites.resolve(read_site(site))
        return [(self._lm.sites.label(place.point), str(place)) for place in places]

    # -- as a source for `From`

    def positions_of(self, point: int) -> np.ndarray:
        captured = self._bound.captured() if self._bound is not None else {}
        return captured.get(point, np.zeros(0, np.int64))[: self._length(captured.get(point))]

    def select(self, tokens: Tokens | str) -> np.ndarray:
        prompt = Prompt(self.prompt_token_ids, lambda: self._lm.tokenizer.spell(self.prompt_token_ids, None))
        return prompt.select(as_tokens(tokens), self._positions)

    @property
    def _positions(self) -> int:
        """How many positions have activations: the last sampled token was never an input."""
        return len(self.prompt_token_ids) + len(self.token_ids) - 1

    def _length(self, positions: np.ndarray | None) -> int:
        return 0 if positions is None else int(np.searchsorted(positions, self._positions))

    def _fetch(self, site: Site | str) -> tuple[np.ndarray, Any]:
        self.answer  # noqa: B018  raises the run's own error
        point, op = self._named(site)
        if (point, op) not in self._fetched:
            self._fetched[point, op] = self._read(point, op, str(site))
        return self._fetched[point, op]

    def _named(self, site: Site | str) -> tuple[int, int | None]:
        """The point that a site names or an op's path captured at, and the op."""
        for ordinal, op in enumerate(self._bound.ops if self._bound is not None else ()):
            if site == op.path and op.kind == CAPTURE:
                return self._one_point(next(kept.at for path, kept in self.program.ops if path == site)), ordinal  # type: ignore[attr-defined]
        return self._one_point(read_site(site)), None

    def _one_point(self, site: Site) -> int:
        places = self._lm.sites.resolve(site)
        if len(places) > 1:
            raise ProgramError(f"run[...] takes one layer: {site} names {len(places)}, as in run[pc.{places[0]}]")
        return places[0].point

    def _read(self, point: int, ordinal: int | None, name: str) -> tuple[np.ndarray, Any]:
        ops = self._bound.ops if self._bound is not None else ()
        mine = [o for i, o in enumerate(ops) if o.kind == CAPTURE and point in o.points and ordinal in (None, i)]
        if not mine:
            raise MissingSource(f"{name} was not captured; this run has: {', '.join(self.sites) or 'no captures'}")
        if self.closed:
            raise MissingSource(f"run {self.key} was closed before {name} was read")
        wanted = Bound(self.key, len(self.prompt_token_ids), tuple(mine)).captured()[point]
        wanted = wanted[: self._length(wanted)]
        found, rows = self._lm.engine.fetch(self.key, point, ordinal)
        kept = np.searchsorted(found, self._positions)
        found, rows = found[:kept], rows[:kept]
        if not np.array_equal(found, wanted):
            raise PatchclampError(f"{name}: {len(wanted)} positions were asked for and {len(found)} were captured")
        dtypes = {DTYPES[int(op.x)] for op in mine}
        return found, rows if dtypes == {"float32"} or len(dtypes) > 1 else _cast(rows, dtypes.pop())

    def __reduce__(self):
        raise ProgramError("a Run belongs to its engine and cannot be copied or pickled; take its tensors instead")

    def __repr__(self) -> str:
        if self.error is not None:
            return f"<Run {self.key}: {type(self.error).__name__}: {self.error}>"
        return f"<Run {self.key}: {len(self.prompt_token_ids)} + {len(self.token_ids)} tokens, {self.text!r}>"


def _fuzz(extra: Any) -> tuple[Op, ...]:
    if extra is not None and not isinstance(extra, Mapping):
        raise ProgramError(f"names and values are needed, not {type(extra).__name__}", "sampling.extra_args")
    try:
        return fuzz(dict(extra or {}))
    except PatchclampError as error:
        raise error.under("sampling.extra_args") from None


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _cast(rows: Any, dtype: str) -> Any:
    import torch

    return torch.as_tensor(rows).to(getattr(torch, dtype))


def _each(given: Any, prompts: int, name: str) -> Iterable[Any]:
    """One program for all prompts, or a list of lists, one a prompt."""
    if given is not None and not isinstance(given, (str, Site, At, Op, list, tuple)):
        try:
            given = list(given)
        except TypeError:
            raise ProgramError(f"a list is needed, not {type(given).__name__}", name) from None
    if isinstance(given, (list, tuple)) and any(isinstance(item, (list, tuple)) for item in given):
        if not all(isinstance(item, (list, tuple)) for item in given):
            raise ProgramError("either one list for all prompts, or a list of lists, one a prompt", name)
        if len(given) != prompts:
            raise ProgramError(f"{len(given)} lists for {prompts} prompts", name)
        return given
    return [given] * prompts


def _wait(future: Any) -> Answer | PatchclampError:
    try:
        return future.result()
    except PatchclampError as error:
        return error
