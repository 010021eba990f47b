"""The plan of a harvest: the tokens of every document, the prompts to run, the rows to keep, and the place of each row.

The plan depends only on the documents, the tokenizer and the filters, so the number and the places of rows are known
before anything runs. Filters depend on the tokens alone, except for the caps on norms.

`Permutation` shuffles the rows of a part with a keyed permutation, computed for each row alone. No table of places is
stored, so a resumed harvest, or one on another machine, puts every row at the same place.
Source: the generalised Feistel cipher with cycle walking of Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002, section 5; its round function is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).

`ReadingOrder` is an exact shuffle of all rows that reads every part sequentially. Each part is shuffled when it is
written and keeps its order here; parts are interleaved at random, in proportion to their rows, with every interleaving
equally likely. Every order of all rows is then equally likely, and nothing is rewritten. The interleaving is drawn
block by block: the number of rows from each part is drawn as from an urn of all remaining rows (multivariate
hypergeometric), and the block is shuffled. So any place is found without shuffling the blocks before it.

`Recipe` lists everything that a data set is made from; its hash names the data set's folder.

N tokens, or rows of all parts · R rows of a part · K parts · B blocks · a document's prompts are consecutive
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from patchclamp.call import is_token_id
from patchclamp.engines.base import Tokenizer
from patchclamp.engines.tokenizer import NoTokenizer
from patchclamp.errors import PatchclampError, ProgramError, TokensError
from patchclamp.language.tokens import as_integer
from patchclamp.language.values import BYTES, Converted, as_file, as_flag, as_items, as_number
from patchclamp.lm import LM
from patchclamp.studies.inputs import check_whole

Document = str | Sequence[int]
SUFFIXES = {".txt": "text", ".jsonl": "JSON lines", ".ndjson": "JSON lines", ".parquet": "Parquet"}


def documents_of(data: Any, column: str | None = None) -> Iterator[Document]:
    """The documents of `data`, in order.

    data: a list (or any iterable that can be read again) of texts or lists of token ids; a file of text (one document
        per line, blank lines are skipped), JSON lines or Parquet, by its suffix; a folder that `datasets` saved; or a
        `datasets.Dataset`
    column: the field or column with the documents; "text" by default

    Raises: `ProgramError` if `data` is none of these.
    """
    if isinstance(data, (str, Path)):
        return _of_file(Path(as_file(data, "documents")), column)
    if hasattr(data, "column_names") and not isinstance(data, (list, tuple)):
        return _of_columns(data, column, "the data set", data.column_names)
    if column is not None:
        raise ProgramError("only files and data sets have columns", "column")
    if isinstance(data, (*BYTES, Mapping, set, frozenset)) or hasattr(data, "columns"):
        as_items(data, "documents")  # raises
    if not isinstance(data, Iterable) or isinstance(data, Iterator):
        raise ProgramError(f"expected a list, a file or a data set of documents, got {type(data).__name__}; an "
                           "iterator cannot be read again", "documents")  # fmt: skip
    return map(_document, as_items(data, "documents") if hasattr(data, "tolist") else data)


def _of_file(path: Path, column: str | None) -> Iterator[Document]:
    if path.is_dir():
        return _of_folder(path, column)
    if path.suffix not in SUFFIXES:
        kinds = ", ".join(f"{suffix} ({kind})" for suffix, kind in SUFFIXES.items())
        raise ProgramError(f"{path}: the suffix says what a file has, one of {kinds}; or a folder of datasets'",
                           "documents")  # fmt: skip
    if not path.exists():
        raise ProgramError(f"there is no {path}", "documents")
    if path.suffix == ".txt":
        if column is not None:
            raise ProgramError(f"{path}: a text file has no columns", "column")
        return _of_text(path)
    return _of_parquet(path, column) if path.suffix == ".parquet" else _of_json(path, column or "text")


def _of_text(path: Path) -> Iterator[Document]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield line.rstrip("\n")


def _of_json(path: Path, column: str) -> Iterator[Document]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)[column]
            except (ValueError, KeyError, TypeError) as error:
                raise ProgramError(f"{path}, line {number}: no JSON object with {column!r} ({error})",
                                   "documents") from None  # fmt: skip
            yield _document(value)


def _of_parquet(path: Path, column: str | None) -> Iterator[Document]:
    parquet = needed("pyarrow.parquet")
    with parquet.ParquetFile(path) as file:
        name = _column(column, file.schema_arrow.names, str(path))
        for batch in file.iter_batches(columns=[name]):
            yield from map(_document, batch.column(0).to_pylist())


def _of_folder(path: Path, column: str | None) -> Iterator[Document]:
    datasets = needed("datasets")
    try:
        saved = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ProgramError(f"{path} is no folder that datasets saved: {error}", "documents") from None
    if not isinstance(saved, datasets.Dataset):
        raise ProgramError(f"{path} has several splits: give the folder of one, of {', '.join(saved)}", "documents")
    return _of_columns(saved, column, str(path), saved.column_names)


def _of_columns(data: Any, column: str | None, where: str, names: list[str] | None) -> Iterator[Document]:
    """Documents in a column. `names` is None for a streamed data set with unknown columns."""
    name = (column or "text") if names is None else _column(column, names, where)
    return (_document(row[name]) for row in data)


def _column(column: str | None, names: list[str], where: str) -> str:
    name = column or "text"
    if name not in names:
        raise ProgramError(f"{where} has no column {name!r}; it has {', '.join(names)}", "column")
    return name


def _document(value: Any) -> Document:
    if isinstance(value, str):
        return value
    ids = as_items(value, "documents")
    if not set(map(type, ids)) <= {int} and not all(map(is_token_id, ids)):
        raise ProgramError(
            f"expected text or a list of token ids, got {type(value).__name__} {value!r:.100}", "documents"
        )
    return list(map(int, ids))


def needed(module: str) -> Any:
    """Import a module of the `harvest` extra."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise PatchclampError(f"a harvest needs {package}: pip install 'patchclamp[harvest]'") from None


class Filters(Converted, frozen=True, forbid_unknown_fields=True):
    """Filters of rows: a row is kept if it passes all of these.

    no_bos: drop a special token at the start of a document
    no_special: drop special tokens
    positions: keep positions of the document in any of these half-open windows, given like Python slices: (4, None),
        (-8, None); all if empty
    only_tokens, not_tokens: keep only these token ids, if any; drop these
    norm_cap: keep L2 norms up to this at every site, of whole rows: before they are projected or summed
    norm_times_median: keep norms up to this multiple of the median of the row's shard, at every site; with sums, of the
        median of the document's kept rows
    """

    no_bos: bool = False
    no_special: bool = False
    positions: tuple[tuple[int | None, int | None], ...] = ()
    only_tokens: tuple[int, ...] = ()
    not_tokens: tuple[int, ...] = ()
    norm_cap: float | None = None
    norm_times_median: float | None = None

    def __post_init__(self) -> None:
        for name in ("no_bos", "no_special"):
            as_flag(getattr(self, name), f"filters.{name}")
        for name, read in (("positions", _windows), ("only_tokens", _numbers), ("not_tokens", _numbers),
                           ("norm_cap", _norm), ("norm_times_median", _norm)):  # fmt: skip
            try:
                value = read(getattr(self, name))
            except (TypeError, ValueError, ProgramError) as error:
                raise ProgramError(f"{error}", f"filters.{name}") from None
            msgspec.structs.force_setattr(self, name, value)

    @property
    def caps_norms(self) -> bool:
        return self.norm_cap is not None or self.norm_times_median is not None

    def kept(self, tokens: np.ndarray, starts: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
        """A mask of the rows kept by the filters on tokens, bool [N]. Document i has the tokens from `starts[i]` to
        `starts[i + 1]`."""
        kept = np.ones(len(tokens), bool)
        if self.no_bos or self.no_special:
            special = np.isin(tokens, special_ids(tokenizer, np.unique(tokens)))
            begins = np.zeros(len(tokens), bool)
            begins[starts[:-1][np.diff(starts) > 0]] = True
            kept &= ~special if self.no_special else ~(special & begins)
        if self.positions:
            kept &= self._in_windows(starts)
        if self.only_tokens:
            kept &= np.isin(tokens, self.only_tokens)
        if self.not_tokens:
            kept &= ~np.isin(tokens, self.not_tokens)
        return kept

    def _in_windows(self, starts: np.ndarray) -> np.ndarray:
        """A mask of the tokens whose position is in a window."""
        lengths = np.diff(starts)
        length = np.repeat(lengths, lengths)
        position = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        inside = np.zeros(len(position), bool)
        for first, end in self.positions:
            first = 0 if first is None else first
            low = first if first >= 0 else np.maximum(length + first, 0)
            high = length if end is None else (end if end >= 0 else length + end)
            inside |= (position >= low) & (position < high)
        return inside

    def passing(self, norms: np.ndarray) -> np.ndarray:
        """A mask of a shard's rows within the caps, bool [n], by their norms at one site [n]."""
        passing = np.ones(len(norms), bool)
        if self.norm_cap is not None:
            passing &= norms <= self.norm_cap
        if self.norm_times_median is not None and len(norms):
            passing &= norms <= self.norm_times_median * np.median(norms)
        return passing


def _windows(windows: Iterable[Any]) -> tuple[tuple[int | None, int | None], ...]:
    windows = as_items(windows, "")
    if not all(isinstance(window, (tuple, list)) and len(window) == 2 for window in windows):
        raise ValueError(f"windows are pairs of first and end, such as ((4, None),), not {windows!r}")
    return tuple((_end(first), _end(end)) for first, end in windows)


def _end(value: Any) -> int | None:
    return None if value is None else as_integer(value)


def _numbers(ids: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(as_integer, as_items(ids, "")))


def _norm(value: Any) -> float | None:
    if value is not None and not as_number(value) > 0:
        raise ValueError(f"expected a norm above 0, got {value!r}")
    return None if value is None else float(value)


def special_ids(tokenizer: Tokenizer, ids: np.ndarray) -> list[int]:
    """The special ones among some token ids: they have a text of their own, but decode to nothing when special tokens
    are skipped."""
    if isinstance(tokenizer, NoTokenizer):
        raise ProgramError("an engine without a tokenizer does not know special tokens: give not_tokens=", "filters")
    texts = tokenizer.token_strings(ids.tolist())
    return [token for token, text in zip(ids.tolist(), texts, strict=True) if text and not tokenizer.decode([token])]


ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Permutation:
    """A permutation of 0 … size − 1, drawn by `seed`."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._low = max(1, math.isqrt(max(size - 1, 0)) + 1)  # a number is low + self._low · high
        self._high = max(1, -(-size // self._low))
        numbers = np.array([(seed + (i + 1) * _GOLDEN) & _MASK for i in range(ROUNDS)], np.uint64)
        self._keys = scrambled(numbers)

    def places(self, rows: np.ndarray) -> np.ndarray:
        """The place [n] of each of these rows [n]."""
        return self._walk(rows, self._forward)

    def rows(self, places: np.ndarray) -> np.ndarray:
        """The row [n] at each of these places [n]."""
        return self._walk(places, self._backward)

    def _walk(self, numbers: np.ndarray, step) -> np.ndarray:
        """One step for each number, and further steps for numbers outside 0 … size − 1."""
        numbers = step(np.asarray(numbers).astype(np.uint64))
        while len(outside := np.flatnonzero(numbers >= np.uint64(self.size))):
            numbers[outside] = step(numbers[outside])
        return numbers.astype(np.int64)

    def _forward(self, numbers: np.ndarray) -> np.ndarray:
        low, high = numbers % np.uint64(self._low), numbers // np.uint64(self._low)
        for number, key in enumerate(self._keys):
            if number % 2:
                high = _added(high, _below(self._high, scrambled(low ^ key)), self._high)
            else:
                low = _added(low, _below(self._low, scrambled(high ^ key)), self._low)
        return low + np.uint64(self._low) * high

    def _backward(self, numbers: np.ndarray) -> np.ndarray:
        low, high = numbers % np.uint64(self._low), numbers // np.uint64(self._low)
        for number, key in reversed(list(enumerate(self._keys))):
            if number % 2:
                high = _added(high, np.uint64(self._high) - _below(self._high, scrambled(low ^ key)), self._high)
            else:
                low = _added(low, np.uint64(self._low) - _below(self._low, scrambled(high ^ key)), self._low)
        return low + np.uint64(self._low) * high


def scrambled(numbers: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each number, uint64 [n]."""
    x = numbers.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _below(size: int, hashes: np.ndarray) -> np.ndarray:
    """A number from 0 to size − 1 for each hash, from its upper half; `size` is at most 2³²."""
    return ((hashes >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)


def _added(a: np.ndarray, b: np.ndarray, size: int) -> np.ndarray:
    """(a + b) mod size, for a + b < 2 · size."""
    total = a + b
    return np.where(total >= np.uint64(size), total - np.uint64(size), total)


BLOCK = 4096
MORE_SHARDS = 8
MOST_ROWS = 10**9  # largest total that NumPy draws from
_COUNTS, _LABELS = 1, 2  # separate the two random streams
Columns = Callable[[int], Mapping[str, np.ndarray]]
"""A shard's columns, by its number: arrays [rows, …]."""


class ReadingOrder:
    """The order of reading the rows of shards, by number.

    rows: of every shard; parts: the part of each shard, ascending
    """

    def __init__(self, rows: Sequence[int], parts: Sequence[int], seed: int) -> None:
        self._seed = seed
        self._ends = np.append(0, np.cumsum(rows)).astype(np.int64)  # of shards, in stored rows
        numbers = np.unique(np.asarray(parts, np.int64))
        of_part = [self._ends[np.searchsorted(parts, part)] for part in numbers]
        self._first = np.array([*of_part, self._ends[-1]])  # the first stored row of each part, and the end

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def is_stored(self) -> bool:
        """True if rows are read as stored, because there is only one part."""
        return len(self._first) <= 2

    @property
    def most_open(self) -> int:
        """The number of shards open at a time: one of each part, and some more."""
        return len(self._first) - 1 + MORE_SHARDS

    @functools.cached_property
    def _before(self) -> np.ndarray:
        """The number of rows of each part before each block, [B + 1, K]."""
        left = np.diff(self._first)
        if left.sum() >= MOST_ROWS:
            raise ProgramError(
                f"rows of several parts are interleaved up to {MOST_ROWS:,} of them, and these are {left.sum():,}: "
                "Harvested(folder, interleave=False) reads part after part", "folder"
            )  # fmt: skip
        draw, before = np.random.default_rng((_COUNTS, self._seed)), [np.zeros_like(left)]
        while left.any():
            counts = draw.multivariate_hypergeometric(left, min(BLOCK, int(left.sum())), method="marginals")
            left = left - counts
            before.append(before[-1] + counts)
        return np.array(before)

    def _labels(self, block: int) -> np.ndarray:
        """The part of each place of a block."""
        counts = self._before[block + 1] - self._before[block]
        labels = np.repeat(np.arange(len(counts)), counts)
        return np.random.default_rng((_LABELS, self._seed, block)).permutation(labels)

    def block(self, number: int) -> np.ndarray:
        """The stored row at each place of a block, int64 [n]."""
        labels = self._labels(number)
        rows = np.empty(len(labels), np.int64)
        for part, (first, before) in enumerate(zip(self._first[:-1], self._before[number], strict=True)):
            places = np.flatnonzero(labels == part)
            rows[places] = first + before + np.arange(len(places))
        return rows

    def stored(self) -> np.ndarray:
        """The stored row at each place, int64 [N]."""
        if self.is_stored:
            return np.arange(len(self))
        return np.concatenate([self.block(number) for number in range(len(self._before) - 1)])

    def place(self, number: int, block: Callable[[int], np.ndarray]) -> tuple[int, int]:
        """The shard of the row at a place, and its number there. `block`: `self.block`, with a cache."""
        row = number if self.is_stored else int(block(number // BLOCK)[number % BLOCK])
        shard = int(np.searchsorted(self._ends, row, side="right")) - 1
        return shard, row - int(self._ends[shard])

    def read(
        self, columns: Columns, begin: int = 0, end: int | None = None, most: int = BLOCK
    ) -> Iterator[dict[str, np.ndarray]]:
        """Rows at places `begin` to `end` in order, at most `most` at a time, by column."""
        end = len(self) if end is None else end
        if self.is_stored:
            yield from self._slices(columns, begin, end, most)
            return
        opened = functools.lru_cache(self.most_open)(columns)
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            first = number * BLOCK
            rows = self.block(number)[max(begin - first, 0) : end - first]
            for at in range(0, len(rows), most):
                yield self._gathered(opened, rows[at : at + most])

    def _slices(self, columns: Columns, begin: int, end: int, most: int) -> Iterator[dict[str, np.ndarray]]:
        """Rows in stored order, mapped and not copied."""
        for shard, (first, last) in enumerate(zip(self._ends[:-1].tolist(), self._ends[1:].tolist(), strict=True)):
            low, high = max(begin, first), min(end, last)
            if low < high:
                of_shard = columns(shard)
                for at in range(low, high, most):
                    part = slice(at - first, min(at + most, high) - first)
                    yield {name: array[part] for name, array in of_shard.items()}

    def _gathered(self, columns: Columns, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Stored rows, copied together. The rows of each shard are ascending and consecutive."""
        shards = np.searchsorted(self._ends, rows, side="right") - 1
        gathered: dict[str, np.ndarray] = {}
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            first = int(rows[places[0]] - self._ends[shard])
            for name, array in columns(shard).items():
                if name not in gathered:
                    gathered[name] = np.empty((len(rows), *array.shape[1:]), array.dtype)
                gathered[name][places] = array[first : first + len(places)]
        return gathered


FORMAT = 1
NAME_DIGITS = 16
NORMS = "norms of whole rows"


class StoredSite(msgspec.Struct, frozen=True):
    """A site of the data set.

    name: such as "resid_post[3]"
    width: of a stored row
    captured: width of a captured row
    projection: the hash of the matrix between them, "" without one
    """

    name: str
    width: int
    captured: int
    projection: str = ""

    @property
    def file(self) -> str:
        """The name of its file in a shard."""
        words = self.name.replace("]", "").replace("[", ".").replace(", ", ".").replace(":", "-")
        return f"{words}.safetensors"


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a data set is made from. Whatever changes a byte of it is here.

    model: hub id, or the last name of a folder · weights: hash of a folder's files (`study.model_identity`); "" for a
    hub id · engine, settings: the engine with its version, and its settings · documents: hash of all tokens, and of the
    starts of documents and prompts · sites · dtype: of the stored rows · sums: True if a row is the sum over a
    document · filters · seed · parts · shard_rows
    """

    model: str
    weights: str
    engine: str
    settings: str
    weights_dtype: str
    documents: str
    sites: tuple[StoredSite, ...]
    dtype: str
    sums: bool
    filters: Filters
    seed: int
    parts: int
    shard_rows: int
    format: int = FORMAT

    @property
    def norms(self) -> StoredSite | None:
        """The norms of whole rows, one number per site, if caps need them and rows are stored reduced. With sums they
        are 0 for a document with rows within the caps, otherwise NaN. Its files are not part of the data set."""
        reduced = self.sums or any(site.projection for site in self.sites)
        return StoredSite(NORMS, len(self.sites), 0) if reduced and self.filters.caps_norms else None

    @property
    def written(self) -> tuple[StoredSite, ...]:
        """The sites written while a part is being filled."""
        return self.sites if self.norms is None else (*self.sites, self.norms)

    def place(self, folder: Path, site: StoredSite) -> Path:
        """The file of a site in a shard that is being filled in `folder`; that of norms is next to the folder."""
        return folder.with_name(f"{folder.name}.{site.file}") if site.name == NORMS else folder / site.file

    @property
    def name(self) -> str:
        """The hash that names the folder."""
        content = msgspec.json.encode(self, order="deterministic")
        if self.norms is not None:  # 0.1.0 compared the caps with reduced rows: its folders must not be resumed
            content += NORMS.encode()
        return hashlib.sha256(content).hexdigest()[:NAME_DIGITS]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`harvest.json`: the recipe, and the sizes of the complete data set.

    documents, tokens, cut_tokens: of the data set · part_rows: rows of each part, before caps on norms
    """

    recipe: Recipe
    documents: int
    tokens: int
    cut_tokens: int
    part_rows: tuple[int, ...]

    @property
    def shards(self) -> list[str]:
        """The names of all shards, in order."""
        size = self.recipe.shard_rows
        counts = [-(-rows // size) for rows in self.part_rows]
        return [shard_name(part, shard) for part, count in enumerate(counts) for shard in range(count)]


def shard_name(part: int, shard: int) -> str:
    return f"shard-{part:04d}-{shard:05d}"


def part_of(name: str) -> int:
    """The part of a shard, from its name."""
    return int(name.split("-")[1])


OVERLONG = ("refuse", "cut", "split")
PARTS = 8  # default number of parts of a data set, unless that makes them smaller or larger than:
LEAST_PART_BYTES, MOST_PART_BYTES = 1 << 28, 1 << 31


class Tokens(msgspec.Struct, frozen=True, eq=False):
    """The tokens to run.

    ids: token ids of all documents, concatenated, int32 [N]
    documents: the start of each document in `ids`, and the end, int64 [documents + 1]
    prompts: the start of each prompt, and the end, int64 [prompts + 1]
    cut: the number of tokens dropped at the ends of overlong documents
    """

    ids: np.ndarray
    documents: np.ndarray
    prompts: np.ndarray
    cut: int

    @property
    def digest(self) -> str:
        """A hash of the three arrays."""
        digest = hashlib.sha256()
        for array in (self.ids, self.documents, self.prompts):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def document_of(self, tokens: np.ndarray) -> np.ndarray:
        """The document [n] of tokens, by their place in `ids` [n]."""
        return np.searchsorted(self.documents, tokens, side="right") - 1

    def prompt(self, number: int) -> list[int]:
        """The token ids of one prompt."""
        return self.ids[self.prompts[number] : self.prompts[number + 1]].tolist()


def read_tokens(lm: LM, documents: Iterable[Document], context: int | None, overlong: str) -> Tokens:
    """Tokenise documents. `context` is the longest prompt, by default the model's longest; a longer document is
    refused, cut there, or split into prompts of that length.

    Raises: `TokensError` for a document that is refused or has a token outside the vocabulary.
    """
    longest = lm.model.max_model_len - 1  # one token is generated
    if context is not None and check_whole(context, "context", 1) > longest:
        raise ProgramError(f"a prompt may have 1 to {longest} tokens here, not {context!r}", "context")
    if overlong not in OVERLONG:
        raise ProgramError(f"expected one of {', '.join(OVERLONG)}, got {overlong!r}", "overlong")
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
    """Documents that are shuffled together: all of them, unless a harvest has several parts.

    number: of the part
    prompts: the prompts with rows, ascending, int64 [prompts]
    first: the number of each one's first row, and the end, int64 [prompts + 1]
    tokens: the token of each row, by its place in the documents' ids, int64 [R]; for a document's sum, its first
    shuffle: the place of each row
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
        """The token of each of a shard's rows, as in `tokens`."""
        first = shard * self.shard_rows
        return self.tokens[self.shuffle.rows(np.arange(first, first + self.rows_of_shard(shard)))]


class Plan(msgspec.Struct, frozen=True, eq=False):
    """The tokens to run, the rows to keep, and their places.

    kept: mask of the rows kept by the filters on tokens, bool [N]
    parts: number of parts; a document's part comes from a hash of the seed and its number
    sums: True if a row is the sum over a document's kept rows
    """

    tokens: Tokens
    kept: np.ndarray
    parts: int
    sums: bool
    seed: int
    shard_rows: int

    @property
    def part_rows(self) -> tuple[int, ...]:
        """The number of rows of each part."""
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
    """The default number of parts of a data set, equal for all machines. Each part is synced and sealed while the next
    one is computed, and fits the page cache, so that it is written sequentially. A machine makes a single part if there
    are more rows than readers interleave."""
    size = rows * row_bytes
    part = min(max(size // PARTS, LEAST_PART_BYTES), MOST_PART_BYTES)
    several = -(-size // part) if rows < MOST_ROWS else 1
    return max(1, -(-several // machines)) * machines


def make_plan(
    lm: LM, documents: Iterable[Document], filters: Filters, context: int | None, overlong: str,
    parts: int | Callable[[int], int], sums: bool, seed: int, shard_rows: int,
) -> Plan:  # fmt: skip
    """Tokenise the documents and apply the filters. `parts`: their number, or a function of the number of rows."""
    if sums and overlong == "split":
        raise ProgramError("the sum over a document is that of one prompt: give overlong='cut'", "overlong")
    tokens = read_tokens(lm, documents, context, overlong)
    kept = filters.kept(tokens.ids, tokens.documents, lm.tokenizer)
    if not kept.any():
        raise ProgramError(f"no row of {len(kept)} passes the filters", "filters")
    if not isinstance(parts, int):
        parts = parts(len(tokens.documents) - 1 if sums else int(kept.sum()))
    return Plan(tokens, kept, parts, sums, seed, shard_rows)
