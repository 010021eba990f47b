"""The plan of a harvest: every document's tokens, the prompts that run them, and the rows that are kept.

It depends on the documents, the tokenizer and the filters alone. How many rows there are is known before anything runs,
and so is the place of every row.

    N tokens · R rows of a part · a document's prompts are consecutive
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from patchclamp.errors import ProgramError, TokensError
from patchclamp.lm import LM
from patchclamp.studies.harvest.documents import Document
from patchclamp.studies.harvest.filters import Filters
from patchclamp.studies.harvest.order import MOST_ROWS
from patchclamp.studies.harvest.permutation import Permutation, scrambled
from patchclamp.studies.inputs import check_whole

OVERLONG = ("refuse", "cut", "split")
PARTS = 8  # of a data set, unless they are given, or would be smaller or larger than:
LEAST_PART_BYTES, MOST_PART_BYTES = 1 << 28, 1 << 31


class Tokens(msgspec.Struct, frozen=True, eq=False):
    """What is run.

    ids: token ids of all documents, one after the other, int32 [N]
    documents: where each document begins in `ids`, and the end, int64 [documents + 1]
    prompts: where each prompt begins, and the end, int64 [prompts + 1]
    cut: how many tokens were left out, at the ends of documents that are too long
    """

    ids: np.ndarray
    documents: np.ndarray
    prompts: np.ndarray
    cut: int

    @property
    def digest(self) -> str:
        """A hash of all this."""
        digest = hashlib.sha256()
        for array in (self.ids, self.documents, self.prompts):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def document_of(self, tokens: np.ndarray) -> np.ndarray:
        """The document [n] of tokens by their place in `ids` [n]."""
        return np.searchsorted(self.documents, tokens, side="right") - 1

    def prompt(self, number: int) -> list[int]:
        """The token ids of one prompt."""
        return self.ids[self.prompts[number] : self.prompts[number + 1]].tolist()


def read_tokens(lm: LM, documents: Iterable[Document], context: int | None, overlong: str) -> Tokens:
    """Tokenises documents. `context`: the longest prompt, the model's longest unless given; a longer document is
    refused, cut off there, or split into prompts of that length.

    Raises: `TokensError` for a document that is refused, or has a token outside the vocabulary.
    """
    longest = lm.model.max_model_len - 1  # one token is generated
    if context is not None and check_whole(context, "context", 1) > longest:
        raise ProgramError(f"a prompt may have 1 to {longest} tokens here, not {context!r}", "context")
    if overlong not in OVERLONG:
        raise ProgramError(f"one of {', '.join(OVERLONG)} is needed, not {overlong!r}", "overlong")
    longest = context or longest
    parts, starts, prompts, total, cut = [], [0], [0], 0, 0
    for number, document in enumerate(documents):
        ids = _ids(lm, document, number)
        if len(ids) > longest and overlong == "refuse":
            raise TokensError(
                f"document {number} has {len(ids)} tokens, and a prompt at most {longest}: give overlong='cut' to "
                "leave the rest out, or 'split' to run it as several prompts", "documents"
            )  # fmt: skip
        if overlong == "cut":
            cut += max(len(ids) - longest, 0)
            ids = ids[:longest]
        parts.append(ids)
        prompts += [min(total + end, total + len(ids)) for end in range(longest, len(ids) + longest, longest)]
        total += len(ids)
        starts.append(total)
    if not total:
        raise ProgramError("there are no documents, or all are empty", "documents")
    return Tokens(np.concatenate(parts), np.array(starts, np.int64), np.array(prompts, np.int64), cut)


def _ids(lm: LM, document: Document, number: int) -> np.ndarray:
    ids = np.array(lm.tokenizer.encode(document) if isinstance(document, str) else document, np.int64)
    if len(ids) and not (ids.min() >= 0 and ids.max() < lm.model.d_vocab):
        outside = next(int(i) for i in ids if not 0 <= i < lm.model.d_vocab)
        raise TokensError(f"document {number}: token id {outside} is outside the vocabulary of {lm.model.d_vocab}",
                          "documents")  # fmt: skip
    return ids.astype(np.int32)


class Part(msgspec.Struct, frozen=True, eq=False):
    """The documents that are shuffled together: all of them, unless a harvest has several parts.

    number: of the part
    prompts: the prompts that have rows, ascending, int64 [prompts]
    first: the number of each one's first row, and the end, int64 [prompts + 1]
    tokens: the token of each row, by its place in the documents' ids, int64 [R]; of a document's sum, its first
    shuffle: where each row goes
    shard_rows: rows of each shard but the last
    """

    number: int
    prompts: np.ndarray
    first: np.ndarray
    tokens: np.ndarray
    shuffle: Permutation
    shard_rows: int

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def shards(self) -> int:
        return -(-self.rows // self.shard_rows)

    def rows_of_shard(self, shard: int) -> int:
        return min(self.shard_rows, self.rows - shard * self.shard_rows)

    def tokens_of_shard(self, shard: int) -> np.ndarray:
        """The token of each of a shard's rows, as `tokens` has them."""
        first = shard * self.shard_rows
        return self.tokens[self.shuffle.rows(np.arange(first, first + self.rows_of_shard(shard)))]


class Plan(msgspec.Struct, frozen=True, eq=False):
    """What is run, which rows are kept, and where they go.

    kept: whether the row of each token is kept, as far as tokens say, bool [N]
    parts: how many; a document's part comes from a hash of the seed and its number
    sums: whether a row is the sum over a document's kept rows
    """

    tokens: Tokens
    kept: np.ndarray
    parts: int
    sums: bool
    seed: int
    shard_rows: int

    @property
    def part_rows(self) -> tuple[int, ...]:
        """How many rows each part has."""
        ends = np.append(0, np.cumsum(self.kept))[self.tokens.documents]
        rows = np.diff(ends)
        rows = np.minimum(rows, 1) if self.sums else rows
        parts = parts_of(len(rows), self.seed, self.parts)
        return tuple(int(rows[parts == part].sum()) for part in range(self.parts))

    def part(self, number: int) -> Part:
        """The documents of one part and their rows."""
        kept = self.kept
        if self.parts > 1:
            lengths = np.diff(self.tokens.documents)
            kept = kept & np.repeat(parts_of(len(lengths), self.seed, self.parts) == number, lengths)
        rows = np.flatnonzero(kept)
        if self.sums:
            rows = rows[np.unique(self.tokens.document_of(rows), return_index=True)[1]]
        first = np.searchsorted(rows, self.tokens.prompts)
        prompts = np.flatnonzero(np.diff(first))
        shuffle = Permutation(len(rows), int(scrambled(np.array([self.seed * 2 + 1, number], np.uint64)).sum()))
        return Part(number, prompts, np.append(first[prompts], len(rows)), rows, shuffle, self.shard_rows)


def parts_of(documents: int, seed: int, parts: int) -> np.ndarray:
    """The part of every document, [documents]."""
    salt = scrambled(np.array([2 * seed], np.uint64))[0]
    return (scrambled(np.arange(documents, dtype=np.uint64) ^ salt) % np.uint64(parts)).astype(np.int64)


def parts_for(rows: int, row_bytes: int, machines: int) -> int:
    """How many parts a data set has, as many for each machine. Each is brought to the disk and sealed while the next
    one is computed, and the page cache holds it, so that it is written from end to end. A machine makes one alone where
    there are more rows than readers interleave."""
    size = rows * row_bytes
    part = min(max(size // PARTS, LEAST_PART_BYTES), MOST_PART_BYTES)
    several = -(-size // part) if rows < MOST_ROWS else 1
    return max(1, -(-several // machines)) * machines


def make_plan(
    lm: LM, documents: Iterable[Document], filters: Filters, context: int | None, overlong: str,
    parts: int | Callable[[int], int], sums: bool, seed: int, shard_rows: int,
) -> Plan:  # fmt: skip
    """Tokenises the documents and applies the filters. `parts`: how many, or what says that of a number of rows."""
    if sums and overlong == "split":
        raise ProgramError("the sum over a document is that of one prompt: give overlong='cut'", "overlong")
    tokens = read_tokens(lm, documents, context, overlong)
    kept = filters.kept(tokens.ids, tokens.documents, lm.tokenizer)
    if not kept.any():
        raise ProgramError(f"no row of {len(kept)} passes the filters", "filters")
    if not isinstance(parts, int):
        parts = parts(len(tokens.documents) - 1 if sums else int(kept.sum()))
    return Plan(tokens, kept, parts, sums, seed, shard_rows)
