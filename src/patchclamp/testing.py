"""The fake engine: the complete `Engine` protocol in NumPy, with its own tokenizer, for tests and docs.

A tiny Llama with random weights, fp32, seeded. Every row is computed on its own, with a fixed order of sums, so a
request's bits do not depend on its batch or on how its prompt is chunked. Programs run through the planner and the
reference kernel. This engine's behaviour is the reference for other engines.

    R rows of a step · N requests of a step · D model width · H heads · E head size · M MLP width · V vocabulary
    T positions so far
"""

from __future__ import annotations

import functools
import math
import re
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from patchclamp.engines.base import (
    Answer,
    Engine,
    Model,
    Part,
    Request,
    Tokenizer,
    TopTokens,
    Wanted,
    check_sampling,
    only_uniform,
    settle,
)
from patchclamp.engines.grading import log_softmax
from patchclamp.engines.tokenizer import Turn, find_turns
from patchclamp.errors import (
    EngineError,
    MissingSource,
    PatchclampError,
    ProgramError,
    TokensError,
    as_patchclamp_error,
    not_finite,
)
from patchclamp.kernels import reference
from patchclamp.kernels.code import call, check_outside
from patchclamp.language.ops import Translator
from patchclamp.language.values import POOLS
from patchclamp.plan import CAPTURE, STORE, Batch, BoundProgram, ProgramTable, StepPlan, make_plan
from patchclamp.plan.bind import Code
from patchclamp.plan.bound import is_loaded
from patchclamp.plan.room import stored_rows
from patchclamp.plan.table import records_of
from patchclamp.sites import SiteMap, Sizes
from patchclamp.sites.tables import LLAMA
from patchclamp.store.tensors import PROBE
from patchclamp.version import __version__

BOS, EOS = 0, 1
SPECIAL = ("<s>", "</s>")
LETTERS = tuple(" abcdefghijklmnopqrstuvwxyz.,?!':\n")
WORDS = (
    "The", "the", "hello", "user", "assistant", " Paris", " Rome", " Berlin", " France", " Italy", " Germany",
    " Eiffel", " Tower", " Colosseum", " capital", " city", " of", " is", " in", " on", " the", " a", " and", " world",
    " cat", " dog", " sat", " not",
)  # fmt: skip


class FakeTokenizer:
    """Words with a leading space, and single characters; the longest match wins. Any text can be encoded.

    A character outside the vocabulary becomes one of the letter tokens, by its hash; `spell` still returns its offsets.
    A smaller vocabulary has fewer words; a larger vocabulary has tokens that no text encodes to.
    """

    def __init__(self, d_vocab: int) -> None:
        texts = [*SPECIAL, *LETTERS, *WORDS][:d_vocab]
        self._texts = texts + [f"<{i}>" for i in range(len(texts), d_vocab)]
        self._letters = min(len(LETTERS), d_vocab - len(SPECIAL))
        self._ids = {text: i for i, text in enumerate(texts) if i >= len(SPECIAL)}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._next = re.compile("|".join([*map(re.escape, longest_first), "."]), re.DOTALL)

    def encode(self, text: str) -> list[int]:
        return [BOS, *self.bare(text)]

    def bare(self, text: str) -> list[int]:
        return [self._ids.get(word, len(SPECIAL) + zlib.crc32(word.encode("utf-8", "surrogatepass")) % self._letters)
                for word in self._next.findall(text)]  # fmt: skip

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        return "".join(self._texts[i] for i in ids if i >= len(SPECIAL))

    settled = decode

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [self._texts[i] for i in ids]

    def spell(self, ids: Sequence[int], text: str | None) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of ids (`text`, if it encodes to them) and each token's offsets, empty for special tokens."""
        ids = list(ids)
        bare = [i for i in ids if i >= len(SPECIAL)]
        matches = text is not None and ids in (self.encode(text), self.bare(text))
        words = self._next.findall(text) if text is not None and matches else [self._texts[i] for i in bare]
        widths, begin, offsets = iter(words), 0, []
        for i in ids:
            end = begin + (len(next(widths)) if i >= len(SPECIAL) else 0)
            offsets.append((begin, end))
            begin = end
        return "".join(words), offsets

    def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise ProgramError("expected a message with text in 'role' and 'content'", f"messages[{i}]")
        return self.encode(_rendered(messages, options))

    def turns(self, ids: Sequence[int], messages: list[dict[str, Any]], options: dict[str, Any]) -> list[Turn]:
        return find_turns(lambda chat: _rendered(chat, options), lambda text: self.spell(ids, text), messages)


def _rendered(messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """Return the text of a chat."""
    text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    return text.removesuffix("\n") if options.get("continue_final_message") else f"{text}assistant:"


SAMPLING = ("temperature", "ignore_eos")
TAPPED = {  # the points of a Llama that `_Net` has
    "stream", "attn_in", "q", "k", "v", "z", "attn_out", "mid", "mlp_in", "neurons", "mlp_out", "stream_end",
    "final_norm", "logits",
}  # fmt: skip
FAMILY = msgspec.structs.replace(LLAMA, points={name: kind for name, kind in LLAMA.points.items() if name in TAPPED})

Tap = Callable[[str, int | None, np.ndarray], None]


class FakeEngine(Engine):
    """A seeded random decoder of `layers` layers; `submit` executes runs synchronously, one batch at a time.

    `chunk`: the number of prompt tokens per step (default: all); `numerics`: only "uniform".
    """

    def __init__(
        self,
        *,
        layers: int = 3,
        d_model: int = 16,
        d_vocab: int = 64,
        heads: int = 2,
        max_model_len: int = 128,
        seed: int = 0,
        chunk: int | None = None,
        numerics: str = "uniform",
    ) -> None:
        only_uniform(numerics, "fake")
        _check_sizes(layers, d_model, d_vocab, heads, max_model_len, chunk)
        self.model = Model("fake", "fake", __version__, FAMILY.name, layers, d_model, d_vocab, "float32", max_model_len)
        self.sites = SiteMap(FAMILY, Sizes(layers, d_model, d_vocab, heads, heads, d_model // heads, 2 * d_model))
        self.sites.no_attention = "the fake engine computes no attention"
        self.tokenizer: Tokenizer = FakeTokenizer(d_vocab)
        self._net = _Net(layers, d_model, d_vocab, heads, max_model_len, seed)
        self._chunk = chunk or max_model_len
        self._captured: dict[str, list[_CapturedRows]] = {}
        self._programs = self._planned = 0
        self._lock = threading.RLock()
        self._open = True

    def submit(self, requests: list[Request]) -> list[Future[Answer]]:
        check_outside()
        with self._lock, np.errstate(all="ignore"):
            self._check_open()
            answers = self._serve(requests)
        futures: list[Future[Answer]] = [Future() for _ in requests]
        for future, answer in zip(futures, answers, strict=True):
            settle(future, answer)
        return futures

    def fetch(self, run: str, point: int, op: int | None = None, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return ascending positions and fp32 rows. If two ops captured a position, the later one wins."""
        self._check_open()
        captured = self._captured.get(run)
        if captured is None:
            raise MissingSource(f"unknown run {run}: it was released or has no captures")
        row_of: dict[int, np.ndarray] = {}
        at_point = [
            chunk for chunk in captured
            if chunk.point == point and (chunk.op < PROBE if op is None else chunk.op == op)
        ]  # fmt: skip
        if at_point and at_point[0].pool:
            rows = np.concatenate([chunk.rows for chunk in at_point])
            row = rows.mean(0, dtype=np.float64) if POOLS[at_point[0].pool - 1] == "mean" else rows.max(0)
            return at_point[-1].positions[-1:], row.astype(np.float32)[None]
        for chunk in sorted(at_point, key=lambda chunk: chunk.op):
            row_of.update(zip(chunk.positions.tolist(), chunk.rows, strict=True))
        positions = sorted(position for position in row_of if position >= first)
        width = len(row_of[positions[0]]) if positions else self.sites.points[point].width
        rows = np.array([row_of[p] for p in positions], np.float32)
        return np.array(positions, np.int64), rows.reshape(-1, width)

    def lens_many(self, wanted: list[Wanted], top: int, translator: Translator | None = None) -> list[TopTokens]:
        found: list[TopTokens] = []
        for each in wanted:
            positions, rows_ND = self.fetch(*each)
            if translator is not None:
                rows_ND = rows_ND @ translator.matrix.array().T
                rows_ND = rows_ND if translator.bias is None else rows_ND + translator.bias.array()
            logits_NV = self._net.unembed(_norm(rows_ND))
            logits_NV = logits_NV - logits_NV.max(axis=-1, keepdims=True)
            logprobs_NV = logits_NV - np.log(np.exp(logits_NV).sum(axis=-1, keepdims=True))
            ids = np.argsort(-logprobs_NV, axis=-1, kind="stable")[:, :top]
            found.append((positions, ids.astype(np.int32), np.take_along_axis(logprobs_NV, ids, -1)))
        return found

    def release(self, runs: list[str]) -> None:
        for run in runs:
            self._captured.pop(run, None)

    def abort(self, runs: list[str]) -> None:
        """Free the captures of runs. The runs themselves have ended when `submit` returns."""
        self.release(runs)

    def check_sampling(self, sampling: dict[str, Any]) -> None:
        check_sampling(sampling, SAMPLING, "fake")
        if sampling.get("temperature", 0) != 0:
            temperature = sampling["temperature"]
            raise ProgramError(f"the fake engine is greedy: expected 0, got {temperature!r}", "sampling.temperature")

    def weight(self, name: str, layer: int | None) -> np.ndarray | None:
        return self._net.weight(name, layer)

    def status(self) -> dict[str, int]:
        """Return counts of resources. Program tables exist only during a batch."""
        counts = {"programs": self._programs, "runs": len(self._captured), "steps_planned": self._planned}
        return {**counts, "pinned": 0, "vectors": 0}

    def close(self) -> None:
        self._open = False
        self._captured.clear()

    def _check_open(self) -> None:
        if not self._open:
            raise EngineError("the engine is closed")

    # -- a batch, from its first step to its last

    def _serve(self, requests: list[Request]) -> list[Answer | PatchclampError]:
        failed: dict[str, PatchclampError] = {}
        values: dict[str, np.ndarray] = {}
        for request in requests:
            try:
                values |= self._values(request)
            except PatchclampError as error:
                failed[request.run] = error
        writers = [
            _ActiveRequest(request, self._net, self.tokenizer) for request in requests if request.run not in failed
        ]
        try:
            failed |= self._generate(writers, values)
        except Exception as error:
            failed |= {writer.request.run: as_patchclamp_error(error) for writer in writers}
        self._programs = 0
        self.release(list(failed))
        answers = {writer.request.run: writer.answer() for writer in writers} | failed
        return [answers[request.run] for request in requests]

    def _values(self, request: Request) -> dict[str, np.ndarray]:
        """Return the rows [n, W] of every bank key that a request reads, by key."""
        if len(request.prompt_token_ids) + request.max_tokens > self.model.max_model_len:
            raise TokensError(f"the request exceeds max_model_len={self.model.max_model_len}")
        values: dict[str, np.ndarray] = {}
        for op in request.bound.ops if request.bound is not None else ():
            for key in filter(is_loaded, op.keys):
                try:
                    values[key] = self._value(key, request)
                except PatchclampError as error:
                    raise error.under(f"{op.path}.value") from None
        return values

    def _value(self, key: str, request: Request) -> np.ndarray:
        if key.startswith("v:"):
            if key not in request.vectors:
                raise MissingSource(f"unknown vector {key[2:14]}")
            return np.asarray(request.vectors[key], np.float32)
        run, point = key[2:].rsplit(":", 1)
        positions, rows = self.fetch(run, int(point))
        if len(positions) == 0:
            raise MissingSource(f"run {run} captured nothing at {self.sites.label(int(point))}")
        return rows

    def _generate(self, writers: list[_ActiveRequest], values: dict[str, np.ndarray]) -> dict[str, PatchclampError]:
        bounds = [writer.request.bound for writer in writers if writer.request.bound is not None]
        capturing = (bound for bound in bounds if any(op.kind == CAPTURE for op in bound.ops))
        self._captured |= {bound.run: [] for bound in capturing}  # runs without captures are never released
        code = {number: (w.request.run, fn) for w in writers for number, fn in w.request.code.items()}
        programs, self._programs = _Programs(self.sites, bounds, values, code), len(bounds)
        while working := [writer for writer in writers if writer.reason is None]:
            self._step(working, programs)
        return programs.errors

    def _step(self, writers: list[_ActiveRequest], programs: _Programs) -> None:
        counts = [min(self._chunk, len(writer.tokens) - writer.computed) for writer in writers]
        first = np.cumsum([0, *counts[:-1]])
        slots = np.array([programs.slot.get(writer.request.run, 0) for writer in writers])
        position = np.array([writer.computed for writer in writers])
        tokens = np.concatenate([w.tokens[w.computed : w.computed + n] for w, n in zip(writers, counts, strict=True)])
        tap = programs.begin(Batch(slots, first, position, np.array(counts), sum(counts)), tokens)
        self._planned += int(slots.any())
        logits_NV = self._net.forward(writers, counts, tap)
        for run, chunk in programs.end():
            if run in self._captured:
                self._captured[run].append(chunk)
        for writer, begin, count, logits_V in zip(writers, first, counts, logits_NV, strict=True):
            if writer.request.prompt_logprobs is not None:
                writer.take_prompt(self._net.unembed(self._net.normed_RD[begin : begin + count]))
            writer.take(count, logits_V)


class _CapturedRows(msgspec.Struct, frozen=True):
    """The positions [n] and rows [n, W] that one op of a run captured at a point in one step."""

    point: int
    op: int
    positions: np.ndarray
    rows: np.ndarray
    pool: int


class _Programs:
    """The programs of one batch, in tables of exactly their size. `slot`: each run's slot."""

    def __init__(
        self,
        sites: SiteMap,
        bounds: list[BoundProgram],
        values: dict[str, np.ndarray],
        code: dict[int, tuple[str, Code]],
    ) -> None:
        self._number = {(point.kind, point.layer): point.number for point in sites.points}
        self._widths = np.array([point.width for point in sites.points])
        self._sampled = np.array([point.rows == "sampled" for point in sites.points])
        ends = np.cumsum([rows.size for rows in values.values()]).tolist()
        addresses = {key: (end - r.size, r.shape[1]) for (key, r), end in zip(values.items(), ends, strict=True)}
        self._bank = np.concatenate([np.zeros(0, np.float32), *(rows.ravel() for rows in values.values())])
        of_programs = [records_of(bound.ops, addresses | self._own(bound), len(sites.points)) for bound in bounds]
        size = sum(len(records) for records, _ in of_programs)
        self._table = ProgramTable(len(bounds), len(sites.points), size, self._sampled)
        self.slot = {bound.run: slot for slot, bound in enumerate(bounds, 1)}
        begin = 0
        for slot, (records, counts) in enumerate(of_programs, 1):
            self._table.install(records, counts, slot, begin)
            begin += len(records)
        self._run = {slot: run for run, slot in self.slot.items()}
        self._code, self._sites = code, sites
        self.errors: dict[str, PatchclampError] = {}
        self._plan: StepPlan | None = None
        self._buffer = np.zeros(0, np.float32)

    def _own(self, bound: BoundProgram) -> dict[str, tuple[int, int]]:
        """Allocate bank space for the rows that a program stores; return (address, width) by key."""
        addresses: dict[str, tuple[int, int]] = {}
        for op in bound.ops:
            for key, point in op.reads() if op.kind == STORE else ():
                width = int(self._widths[point])
                addresses[key] = len(self._bank), width
                self._bank = np.append(self._bank, np.zeros(stored_rows(bound, key) * width, np.float32))
        return addresses

    def begin(self, batch: Batch, token_R: np.ndarray) -> Tap:
        """Plan a step whose rows have these token ids [R]; return its in-place tap(kind, layer, rows)."""
        plan = self._plan = make_plan(batch, self._table, self._widths)
        self._buffer, bits_R = np.zeros(plan.size + plan.scratch, np.float32), np.zeros(batch.rows, np.int64)

        def tap(kind: str, layer: int | None, h_RW: np.ndarray) -> None:
            point = self._number[kind, layer]
            if plan.active[point]:
                rows, tokens = plan.tokens, token_R
                if self._sampled[point]:
                    rows, tokens = plan.sampled, token_R[batch.row + batch.count - 1]
                before_RW = h_RW.copy()
                step = (plan, self._bank, self._buffer, tokens, self._apply, bits_R)
                edited_R = reference.apply(h_RW, rows, point, self._table, *step)
                failed_R = edited_R & ~np.isfinite(h_RW).all(axis=1)
                h_RW[failed_R] = before_RW[failed_R]
                self._fail(rows.slot[failed_R], point)

        return tap

    def _fail(self, slots: np.ndarray, point: int) -> None:
        """Record that edits at a point gave non-finite rows, for the runs in `slots`. A run keeps its first error."""
        for slot in np.unique(slots).tolist():
            self.errors.setdefault(self._run[slot], not_finite(self._sites.label(point)))

    def _apply(self, number: int, rows: np.ndarray, point: int, position: np.ndarray) -> np.ndarray | None:
        """Run code on rows [n, W]. On failure, record the error for the run and return None."""
        import torch

        run, code = self._code[number]
        try:
            return None if run in self.errors else call(code, torch.from_numpy(rows), point, position).numpy()
        except PatchclampError as error:
            self.errors[run] = error
            return None

    def end(self) -> list[tuple[str, _CapturedRows]]:
        """Return the step's captures, each with its run."""
        plan = self._plan
        assert plan is not None
        captured, layout = [], plan.layout
        for c, a in zip(*layout.pairs(np.flatnonzero(plan.count)), strict=True):
            positions = np.arange(plan.begin[c], plan.begin[c] + plan.count[c])
            begin, width = plan.base[a] + plan.offset[c] * plan.row[a], int(plan.row[a])
            rows = self._buffer[begin : begin + plan.count[c] * width].reshape(-1, width).copy()
            pool = int(layout.pool[layout.group[c]])
            rows_at = _CapturedRows(int(layout.point[a]), int(layout.op[c]), positions, rows, pool)
            captured.append((self._run[int(layout.slot[c])], rows_at))
        return captured


class _ActiveRequest:
    """An active request: its tokens, its key/value cache, and its partial answer."""

    def __init__(self, request: Request, net: _Net, tokenizer: Tokenizer) -> None:
        self.request, self._tokenizer = request, tokenizer
        self.tokens = list(request.prompt_token_ids)
        self.computed = 0
        self.logprobs: list[float] = []
        self.top_logprobs: list[dict[int, float]] = []
        self.prompt_logprobs: list[float] = []
        self.prompt_top_logprobs: list[dict[int, float]] = []
        self.scores: dict[int, float] = {}
        self.reason: str | None = None
        self.keys, self.values = net.cache(len(self.tokens) + request.max_tokens)

    def take(self, count: int, logits_V: np.ndarray) -> None:
        """Mark `count` more positions as computed. After the last one, append the likeliest next token."""
        self.computed += count
        if self.computed < len(self.tokens):
            return
        logprobs_V = logits_V - logits_V.max()
        logprobs_V = logprobs_V - np.log(np.exp(logprobs_V).sum())
        generated = len(self.tokens) - len(self.request.prompt_token_ids) + 1
        if generated == 1:
            self.scores = {token: float(logprobs_V[token]) for token in self.request.score}
        token = int(logits_V.argmax())
        self.tokens.append(token)
        if self.request.logprobs is not None:
            self.logprobs.append(float(logprobs_V[token]))
        if self.request.logprobs:
            top = np.argsort(-logprobs_V, kind="stable")[: self.request.logprobs].tolist()
            self.top_logprobs.append({token: float(logprobs_V[token]) for token in top})
        if token == EOS and not self.request.sampling.get("ignore_eos"):
            self.reason = "stop"
        elif generated == self.request.max_tokens:
            self.reason = "length"
        if self.request.listener is not None:  # every token of this vocabulary is complete text
            self.request.listener(Part(self._tokenizer.decode([token]), [token], self.logprobs[-1:]))

    def take_prompt(self, logits_NV: np.ndarray) -> None:
        """Compute the log-probability of each prompt token from the logits at the token before it."""
        top, tokens = self.request.prompt_logprobs or 0, self.request.prompt_token_ids[self.computed + 1 :]
        for token, logprobs_V in zip(tokens, log_softmax(logits_NV), strict=False):  # the last row predicts none
            self.prompt_logprobs.append(float(logprobs_V[token]))
            best = np.argsort(-logprobs_V, kind="stable")[:top].tolist()
            self.prompt_top_logprobs += [{token: float(logprobs_V[token]) for token in best}] if top else []

    def answer(self) -> Answer:
        ids = self.tokens[len(self.request.prompt_token_ids) :]
        logprobs = None if self.request.logprobs is None else self.logprobs
        text = functools.partial(self._tokenizer.decode, ids)
        return Answer(
            ids, text, logprobs, self.scores, self.reason, 0, self.top_logprobs,
            prompt_logprobs=None if self.request.prompt_logprobs is None else self.prompt_logprobs,
            prompt_top_logprobs=self.prompt_top_logprobs,
        )  # fmt: skip


class _Layer(msgspec.Struct, frozen=True):
    q_DD: np.ndarray
    k_DD: np.ndarray
    v_DD: np.ndarray
    o_DD: np.ndarray
    gate_DM: np.ndarray
    up_DM: np.ndarray
    down_MD: np.ndarray


class _Net:
    """The decoder: embedding, pre-norm layers of rotary causal attention and gated MLP, RMS norm, unembedding."""

    def __init__(self, layers: int, d_model: int, d_vocab: int, heads: int, positions: int, seed: int) -> None:
        draw = np.random.default_rng(seed)

        def weight(rows: int, columns: int) -> np.ndarray:
            return (draw.standard_normal((rows, columns)) / math.sqrt(rows)).astype(np.float32)

        shapes = [(d_model, d_model)] * 4 + [(d_model, 2 * d_model)] * 2 + [(2 * d_model, d_model)]
        self._embedding_VD = draw.standard_normal((d_vocab, d_model)).astype(np.float32)
        self._layers = [_Layer(*(weight(*shape) for shape in shapes)) for _ in range(layers)]
        self._unembedding_DV = weight(d_model, d_vocab)
        self.normed_RD: np.ndarray = np.zeros((0, d_model), np.float32)  # normed rows of the last step
        self._heads, self._size = heads, d_model // heads
        frequency = 10000.0 ** -(np.arange(self._size // 2) / (self._size // 2))
        angle = np.arange(positions)[:, None] * frequency
        self._cos, self._sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def weight(self, name: str, layer: int | None) -> np.ndarray | None:
        """Return a weight by its name in `engines.weights`; None for biases and norms, which this model lacks."""
        if layer is None:
            return {"W_E": self._embedding_VD, "W_U": self._unembedding_DV}.get(name)
        of, split = self._layers[layer], (-1, self._heads, self._size)
        if name in ("W_Q", "W_K", "W_V"):
            matrix_DD = {"W_Q": of.q_DD, "W_K": of.k_DD, "W_V": of.v_DD}[name]
            return matrix_DD.reshape(split).transpose(1, 0, 2)
        o_HED = of.o_DD.reshape(self._heads, self._size, -1)
        return {"W_O": o_HED, "W_gate": of.gate_DM, "W_in": of.up_DM, "W_out": of.down_MD}.get(name)

    def cache(self, positions: int) -> tuple[np.ndarray, np.ndarray]:
        """Allocate a request's KV cache: keys and values, [layers, T, H, E] each."""
        shape = (len(self._layers), positions, self._heads, self._size)
        return np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    def forward(self, writers: list[_ActiveRequest], counts: list[int], tap: Tap) -> np.ndarray:
        """Compute each request's next `counts[n]` tokens. Return the logits after its last token, [N, V]."""
        rows = [(writer, p) for writer, count in zip(writers, counts, strict=True)
                for p in range(writer.computed, writer.computed + count)]  # fmt: skip
        h_RD = self._embedding_VD[[writer.tokens[p] for writer, p in rows]]
        for number, layer in enumerate(self._layers):
            tap("stream", number, h_RD)
            in_RD = _norm(h_RD)
            tap("attn_in", number, in_RD)
            attn_RD = self._attention(number, layer, in_RD, rows, tap)
            tap("attn_out", number, attn_RD)
            h_RD = h_RD + attn_RD
            tap("mid", number, h_RD)
            in_RD = _norm(h_RD)
            tap("mlp_in", number, in_RD)
            gate_RM = _times(in_RD, layer.gate_DM)
            neurons_RM = gate_RM / (1 + np.exp(-gate_RM)) * _times(in_RD, layer.up_DM)
            tap("neurons", number, neurons_RM)
            mlp_RD = _times(neurons_RM, layer.down_MD)
            tap("mlp_out", number, mlp_RD)
            h_RD = h_RD + mlp_RD
        tap("stream_end", None, h_RD)
        h_RD = _norm(h_RD)
        tap("final_norm", None, h_RD)
        self.normed_RD = h_RD
        logits_NV = self.unembed(h_RD[np.cumsum(counts) - 1])
        tap("logits", None, logits_NV)
        return logits_NV

    def unembed(self, h_RD: np.ndarray) -> np.ndarray:
        """Return the logits [R, V] of rows that passed the final norm."""
        return _times(h_RD, self._unembedding_DV)

    def _attention(
        self, number: int, layer: _Layer, h_RD: np.ndarray, rows: list[tuple[_ActiveRequest, int]], tap: Tap
    ) -> np.ndarray:
        """Write the rows' keys and values to their requests' caches, then compute each row's attention."""
        positions = [p for _, p in rows]
        q_RD, k_RD, v_RD = (_times(h_RD, weight) for weight in (layer.q_DD, layer.k_DD, layer.v_DD))
        for kind, projected_RD in (("q", q_RD), ("k", k_RD), ("v", v_RD)):
            tap(kind, number, projected_RD)
        q_RHE, k_RHE, v_RHE = self._rotate(q_RD, positions), self._rotate(k_RD, positions), self._split(v_RD)
        for (writer, p), k_HE, v_HE in zip(rows, k_RHE, v_RHE, strict=True):
            writer.keys[number, p], writer.values[number, p] = k_HE, v_HE
        z_RD = np.stack([
            _attend(q_HE, writer.keys[number, : p + 1], writer.values[number, : p + 1]).ravel()
            for (writer, p), q_HE in zip(rows, q_RHE, strict=True)
        ])  # fmt: skip
        tap("z", number, z_RD)
        return _times(z_RD, layer.o_DD)

    def _split(self, x_RD: np.ndarray) -> np.ndarray:
        return x_RD.reshape(-1, self._heads, self._size)

    def _rotate(self, x_RD: np.ndarray, positions: list[int]) -> np.ndarray:
        """Apply the rotary embedding, [R, H, E].

        Source: Su et al. 2021 (arXiv:2104.09864), halves paired as in Llama's Transformers code.
        """
        cos_R1, sin_R1 = self._cos[positions][:, None], self._sin[positions][:, None]
        a, b = np.split(self._split(x_RD), 2, axis=-1)
        return np.concatenate((a * cos_R1 - b * sin_R1, b * cos_R1 + a * sin_R1), axis=-1)


def _times(x_RA: np.ndarray, w_AB: np.ndarray) -> np.ndarray:
    """Return x · w, summed over A in the same order for any R. The order of a BLAS product depends on the shape."""
    return (x_RA[:, :, None] * w_AB).sum(axis=1)


def _norm(x_RD: np.ndarray) -> np.ndarray:
    return x_RD / np.sqrt((x_RD * x_RD).mean(axis=-1, keepdims=True) + np.float32(1e-5))


def _attend(q_HE: np.ndarray, k_THE: np.ndarray, v_THE: np.ndarray) -> np.ndarray:
    """Attend with one query per head over T keys and values; return [H, E]."""
    score_TH = (k_THE * q_HE).sum(axis=-1) / np.float32(math.sqrt(q_HE.shape[-1]))
    weight_TH = np.exp(score_TH - score_TH.max(axis=0))
    return (weight_TH[:, :, None] * v_THE).sum(axis=0) / weight_TH.sum(axis=0)[:, None]


def _check_sizes(layers: int, d_model: int, d_vocab: int, heads: int, max_model_len: int, chunk: int | None) -> None:
    lowest = {"layers": 1, "d_model": 1, "d_vocab": len(SPECIAL) + 1, "heads": 1, "max_model_len": 1, "chunk": 1}
    sizes = (layers, d_model, d_vocab, heads, max_model_len, chunk)
    for (name, minimum), size in zip(lowest.items(), sizes, strict=True):
        if not isinstance(size, int) and not (name == "chunk" and size is None):
            raise ProgramError(f"expected an integer, got {size!r}", name)
        if size is not None and size < minimum:
            raise ProgramError(f"expected at least {minimum}, got {size}", name)
    if d_model % (2 * heads):
        raise ProgramError(f"expected d_model={d_model} to be a multiple of 2 * heads, got {heads} heads", "heads")
