"""Batches of the Transformers engine: their forward passes, and sampling from each step's logits.

`Passes` holds a batch's inputs: the padded prompts, then one token per request. `StepReadout` reads tokens and
log-probabilities from a step's logits, and `OutputWriter` collects them for one request. `Sampler` supports a subset of
vLLM's sampling parameters, by vLLM's names. `Generation` holds a batch from start to end.

B requests · T tokens of the longest prompt · V vocabulary
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from patchclamp.engines.base import Answer, Part, Request, Tokenizer, check_sampling
from patchclamp.engines.tokenizer import complete_text
from patchclamp.errors import PatchclampError, RunError, UnsupportedSite
from patchclamp.kernels.transfer import Arriving, to_device
from patchclamp.plan import Batch
from patchclamp.plan.cuts import Cut

PROMPT_ROWS = 256  # a prompt's rows that are unembedded at a time
SAME_LOGITS = 0.02  # tolerance, relative to the largest logit; rounding to bfloat16 accounts for a fifth of it
UNSEEDED = -1  # means no seed, as in vLLM
MIN_TEMPERATURE = 0.01  # lower temperatures above 0 are raised to this, as in vLLM
NAMES = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos")


class Sampler:
    """Picks tokens, greedily unless a temperature is set; stops at an EOS token, stop token or stop string."""

    def __init__(self, sampling: dict[str, Any], eos: set[int]) -> None:
        temperature = float(sampling.get("temperature", 0.0))
        self.temperature: float = max(temperature, MIN_TEMPERATURE) if temperature > 0 else 0.0
        self.top_k: int = int(sampling.get("top_k") or 0)
        self.top_p: float = float(sampling.get("top_p", 1.0))
        self.min_p: float = float(sampling.get("min_p", 0.0))
        stop = sampling.get("stop") or []
        self.stop: list[str] = [stop] if isinstance(stop, str) else list(stop)
        self.ends: set[int] = set(sampling.get("stop_token_ids") or ()) | (set() if sampling.get("ignore_eos") else eos)
        self._seed = sampling.get("seed")

    @functools.cached_property
    def generator(self) -> torch.Generator:
        """The request's random generator."""
        generator = torch.Generator()
        if self._seed in (None, UNSEEDED):
            generator.seed()
        else:
            generator.manual_seed(int(self._seed))
        return generator

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @staticmethod
    def check(sampling: dict[str, Any]) -> None:
        """Raise `UnknownName` for an unsupported parameter, `ProgramError` for an invalid value."""
        check_sampling(sampling, NAMES, "Transformers")

    def pick(self, logits_V: torch.Tensor) -> int:
        """Choose the next token."""
        if self.is_greedy:
            return int(logits_V.argmax())
        return int(torch.multinomial(self.probabilities(logits_V), 1, generator=self.generator))

    def probabilities(self, logits_V: torch.Tensor) -> torch.Tensor:
        """Return the sampling probabilities [V] after min_p, top_k and top_p, in vLLM's order."""
        probs_V = (logits_V.cpu().float() / self.temperature).softmax(-1)
        probs_V = probs_V * (probs_V >= self.min_p * probs_V.max())
        if 0 < self.top_k < len(probs_V):
            probs_V = probs_V * (probs_V >= probs_V.topk(self.top_k).values[-1])
        ranked, order = (probs_V / probs_V.sum()).sort(descending=True)
        keep = ranked.cumsum(-1) - ranked < self.top_p
        return torch.zeros_like(probs_V).scatter_(0, order, ranked * keep)

    def finish(self, ids: list[int], max_tokens: int, text: Callable[[], str]) -> str | None:
        """Return the finish reason after these generated tokens; None to continue. `text` decodes them."""
        if ids[-1] in self.ends or (self.stop and any(word in text() for word in self.stop)):
            return "stop"
        return "length" if len(ids) >= max_tokens else None

    def safe(self, text: str) -> str:
        """Return the text without a suffix that may be the start of a stop string."""
        held_back = (n for word in self.stop for n in range(1, len(word)) if text.endswith(word[:n]))
        return text[: len(text) - max(held_back, default=0)]

    def cut(self, text: str) -> str:
        """Return the text before the first stop string."""
        return text[: min((text.index(word) for word in self.stop if word in text), default=len(text))]


class OutputWriter:
    """Collects one request's tokens, passes new ones to its listener, and decides when the request has finished."""

    def __init__(self, request: Request, tokenizer: Tokenizer, eos: set[int]) -> None:
        self.request, self.tokenizer = request, tokenizer
        self.sampler: Sampler = Sampler(request.sampling, eos)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[dict[int, float]] = []
        self.prompt_logprobs: list[float] = []
        self.prompt_top_logprobs: list[dict[int, float]] = []
        self.scores: dict[int, float] = {}
        self.reason: str | None = None
        self.error: PatchclampError | None = None
        self._sent = ""  # text already passed to the listener

    @property
    def done(self) -> bool:
        return self.reason is not None or self.error is not None

    @property
    def scored(self) -> Sequence[int]:
        """The token ids to grade in this step; empty after the first generated token."""
        return () if self.ids else self.request.score

    @property
    def wants_logprobs(self) -> bool:
        return self.request.logprobs is not None or bool(self.scored)

    def take(self, token: int, values: Sequence[float], logprobs_V: torch.Tensor | None) -> None:
        """Append the next token. `values`: log-probabilities of the token and of `scored`, empty if not requested;
        `logprobs_V`: log-probabilities of the whole vocabulary, or None."""
        if self.scored:
            self.scores = dict(zip(self.scored, values[1:], strict=False))
        self.ids.append(token)
        if self.request.logprobs is not None:
            self.logprobs.append(values[0])
        if self.request.logprobs:
            assert logprobs_V is not None
            top = logprobs_V.topk(self.request.logprobs)
            self.top_logprobs.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        self.reason = self.sampler.finish(self.ids, self.request.max_tokens, self._text)
        if self.request.listener is not None:
            self.request.listener(Part(self._new_text(), [token], self.logprobs[-1:]))

    def take_prompt(
        self, hidden_TD: torch.Tensor, own_logits_V: torch.Tensor, unembed: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Compute the prompt tokens' log-probabilities from the unembedding's inputs at the preceding tokens. Raises
        `UnsupportedSite` if `unembed` does not reproduce the model's own logits after the prompt."""
        top, ids = self.request.prompt_logprobs or 0, self.request.prompt_token_ids[1:]
        logits_V = unembed(hidden_TD[len(ids) : len(ids) + 1])[0].float()
        if float((logits_V - own_logits_V).abs().max()) > SAME_LOGITS * float(own_logits_V.abs().max()):
            raise UnsupportedSite(
                "prompt_logprobs is not available: the model transforms its logits after the unembedding"
            )
        for begin in range(0, len(ids), PROMPT_ROWS):
            some = ids[begin : begin + PROMPT_ROWS]
            logprobs_NV = unembed(hidden_TD[begin : begin + len(some)]).float().log_softmax(-1)
            self.prompt_logprobs += logprobs_NV[range(len(some)), some].tolist()
            best = logprobs_NV.topk(top)
            rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            self.prompt_top_logprobs += [dict(zip(*row, strict=True)) for row in rows if top]

    def _new_text(self) -> str:
        """Return the text that was not yet passed to the listener and that no later token can change."""
        text = self._stopped_text() if self.done else self.sampler.safe(self.tokenizer.settled(self.ids))
        if not text.startswith(self._sent):
            if self.done:
                self.error = RunError(
                    f"the tokenizer changed text that was already streamed: expected a continuation of {self._sent!r}, "
                    f"got {text!r}; run this prompt without streaming"
                )
            return ""
        sent, self._sent = self._sent, text
        return text[len(sent) :]

    def _text(self) -> str:
        return complete_text(self.tokenizer.decode, self.ids)

    def _stopped_text(self) -> str:
        """Return the text without what ended it: a stop string, EOS token or stop token. As in vLLM."""
        ended = self.reason == "stop" and self.ids[-1] in self.sampler.ends
        return self.sampler.cut(complete_text(self.tokenizer.decode, self.ids[:-1] if ended else self.ids))

    def answer(self, computed_from: Cut | None) -> Answer | PatchclampError:
        if self.error is not None:
            return self.error
        logprobs = None if self.request.logprobs is None else self.logprobs
        return Answer(
            self.ids, self._stopped_text, logprobs, self.scores, self.reason, 0, self.top_logprobs, computed_from,
            prompt_logprobs=None if self.request.prompt_logprobs is None else self.prompt_logprobs,
            prompt_top_logprobs=self.prompt_top_logprobs,
        )  # fmt: skip


class StepReadout:
    """The values read from a step's fp32 logits [B, V] for unfinished requests, copied to the host asynchronously."""

    def __init__(self, writers: Sequence[OutputWriter], logits_BV: torch.Tensor) -> None:
        self._rows = [(b, writer) for b, writer in enumerate(writers) if not writer.done]
        device = logits_BV.device
        token_B = logits_BV.argmax(-1)
        picked = {b: writer.sampler.pick(logits_BV[b]) for b, writer in self._rows if not writer.sampler.is_greedy}
        if picked:
            token_B[to_device(np.array(list(picked)), device)] = to_device(np.array(list(picked.values())), device)
        self._tokens, self._values = Arriving(token_B), None
        self._logprobs_BV: torch.Tensor | None = None
        if any(writer.wants_logprobs for _, writer in self._rows):
            logprobs_BV = logits_BV.log_softmax(-1)
            self._logprobs_BV = logprobs_BV if any(writer.request.logprobs for _, writer in self._rows) else None
            scored = {b: writer.scored for b, writer in self._rows}
            columns = np.zeros((len(writers), max(map(len, scored.values()))), np.int64)
            for b, ids in scored.items():
                columns[b, : len(ids)] = list(ids)
            columns_BK = torch.cat((token_B[:, None], to_device(columns, device)), 1)
            self._values = Arriving(logprobs_BV.gather(1, columns_BK))

    def take(self) -> None:
        """Append the next token to every unfinished request."""
        tokens = self._tokens.result().tolist()
        values = None if self._values is None else self._values.result().tolist()
        for b, writer in self._rows:
            if not writer.done:
                logprobs_V = None if self._logprobs_BV is None else self._logprobs_BV[b]
                writer.take(tokens[b], [] if values is None else values[b], logprobs_V)

    @property
    def has_arrived(self) -> bool:
        """True if the step has been computed."""
        return (self._values or self._tokens).has_arrived

    def wait(self) -> None:
        """Block until the step has been computed."""
        (self._values or self._tokens).result()


class Passes:
    """The padded inputs of the current forward pass: first the prompts, then one token per request.

    reads_prompts: True to keep the first pass's unembedding inputs, [B, T, D], as `hidden_BTD`, and the logits after
        the prompts as `logits_BV`
    """

    hidden_BTD: torch.Tensor
    logits_BV: torch.Tensor

    def __init__(
        self, prompts: Sequence[Sequence[int]], pads_left: bool, device: str, reads_prompts: bool = False
    ) -> None:
        length = np.array([len(prompt) for prompt in prompts])
        widest = int(length.max())
        self.start = widest - length if pads_left else np.zeros(len(prompts), np.int64)
        ids, mask, positions = np.zeros((3, len(prompts), widest), np.int64)
        for b, prompt in enumerate(prompts):
            row = slice(self.start[b], self.start[b] + len(prompt))
            ids[b, row], mask[b, row], positions[b, row] = prompt, 1, np.arange(len(prompt))
        self.ids_BT, self.mask_BT, self.positions_BT = to_device(np.stack((ids, mask, positions)), device)
        self.cache: Any = None
        last = self.start + length - 1
        self.keep: int = int(widest - last.min())
        self.last_row: torch.Tensor = to_device(last - (widest - self.keep), device)
        self._first, self._count = np.zeros(len(prompts), np.int64), length
        self.reads_prompts: bool = reads_prompts

    def batch(self, slots: np.ndarray) -> Batch:
        widest = self.ids_BT.shape[1]
        row = np.arange(len(slots)) * widest + self.start
        return Batch(slots, row, self._first, self._count, len(slots) * widest)

    def run(self, net: Any) -> torch.Tensor:
        """Run the model on the current inputs; return the logits to sample from, [B, V]."""
        if self.reads_prompts:
            self.reads_prompts = False
            with self._reading(net):
                logits_BV = self.run(net)
            self.logits_BV = logits_BV.clone()  # a program may edit the returned ones
            return logits_BV
        name = cache_name(type(net))
        # with states cached, a model without keys takes one token and no mask: the first Mamba would repeat the token
        # along a longer mask
        has_states = name == "cache_params" and self.cache is not None
        out = net(
            input_ids=self.ids_BT, attention_mask=None if has_states else self.mask_BT, position_ids=self.positions_BT,
            use_cache=True, logits_to_keep=self.keep, **{name: self.cache},
        )  # fmt: skip
        self.cache = out[name]
        logits_BKV = out.logits[:, -self.keep :]  # some classes ignore `logits_to_keep`
        return logits_BKV[torch.arange(len(self.ids_BT), device=logits_BKV.device), self.last_row].contiguous()

    @contextlib.contextmanager
    def _reading(self, net: Any) -> Iterator[None]:
        """Inside the context, store the unembedding's inputs at all positions, but unembed only the last `keep`."""
        keep, self.keep = self.keep, self.ids_BT.shape[1]

        def take(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            [self.hidden_BTD] = args
            self.keep = keep
            return (args[0][:, -keep:],)

        hook = net.get_output_embeddings().register_forward_pre_hook(take)
        try:
            yield
        finally:
            hook.remove()

    def advance(self, tokens: list[int]) -> None:
        """Make the sampled tokens the next inputs."""
        self._first = self._first + self._count
        self._count = np.ones_like(self._count)
        self.start = np.zeros_like(self.start)
        device = self.ids_BT.device
        self.ids_BT: torch.Tensor = to_device(np.array(tokens), device)[:, None]
        self.positions_BT: torch.Tensor = to_device(self._first, device)[:, None]
        self.mask_BT: torch.Tensor = torch.nn.functional.pad(self.mask_BT, (0, 1), value=1)
        self.keep, self.last_row = 1, torch.zeros(len(tokens), dtype=torch.long, device=device)


@functools.cache
def cache_name(kind: type) -> str:
    """Return the name of the cache argument: "cache_params" for a model class that caches only recurrent states."""
    return "cache_params" if "cache_params" in inspect.signature(kind.forward).parameters else "past_key_values"


class Generation:
    """A batch of requests, including any that have already failed.

    errors: the error of each request, if any
    computed_from: the cut where the first step begins; None to compute everything
    readout: the values read from the last step's logits
    has_failed: True if an error ended the whole batch
    """

    def __init__(
        self, requests: Sequence[Request], futures: Sequence[Future[Answer]], errors: Sequence[Exception | None]
    ) -> None:
        self.requests, self.futures, self.errors = requests, futures, list(errors)
        self.writers: list[OutputWriter] = []
        self.computed_from: Cut | None = None
        self.passes: Passes | None = None
        self.readout: StepReadout | None = None
        self.has_failed: bool = False

    @property
    def ready(self) -> list[int]:
        """The indices of the requests that have not failed."""
        return [i for i, error in enumerate(self.errors) if error is None]

    def start(self, tokenizer: Tokenizer, eos: set[int]) -> list[Request]:
        """Create output writers for the ready requests, and return these requests."""
        requests = [self.requests[i] for i in self.ready]
        self.writers = [OutputWriter(request, tokenizer, eos) for request in requests]
        return requests

    @property
    def may_wait(self) -> bool:
        """True if finishing can be deferred: the only step is in flight, and its readout needs no more device work."""
        return self.readout is not None and not self.readout.has_arrived and all(
            writer.sampler.is_greedy and writer.request.max_tokens == 1 and not writer.request.logprobs
            and writer.request.listener is None for writer in self.writers
        )  # fmt: skip

    def fail(self, error: Exception) -> None:
        """End all ready requests with an error."""
        self.has_failed = True
        for i in self.ready:
            self.errors[i] = error

    def answers(self) -> list[Answer | Exception]:
        """Return each request's answer or error."""
        answers = iter([writer.answer(self.computed_from) for writer in self.writers])
        return [error or next(answers, RunError("the request was not run")) for error in self.errors]
