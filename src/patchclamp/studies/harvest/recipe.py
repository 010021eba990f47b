"""The plan of a harvest: the tokens of every document, the prompts to run, the rows to keep, and their shuffled order.

The plan depends only on the documents, the tokenizer and the filters, so the number of rows and their places in the
shuffled order are known before anything runs. Filters depend on the tokens alone, except for the caps on norms.

Rows are shuffled within a part, by sorting random numbers drawn from the seed and the part. A resumed harvest, or one
on another machine, puts every row at the same place.

`ReadingOrder` is an exact shuffle of all rows that reads every part sequentially. Each part is shuffled when it is
written and keeps its order here; parts are interleaved at random, in proportion to their rows, with every interleaving
equally likely. Every order of all rows is then equally likely, and nothing is rewritten. The interleaving is drawn
block by block: the number of rows from each part is drawn as from an urn of all remaining rows (multivariate
hypergeometric), and the block is shuffled. So any row can be located without shuffling the blocks before it.

`Recipe` lists everything that determines a data set; its hash names the data set's folder.

N tokens, or rows of all parts · R rows of a part · K parts · B blocks · a document's prompts are consecutive
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from patchclamp.call import is_token_id
from patchclamp.engines.base import Tokenizer
from patchclamp.engines.tokenizer import NoTokenizer
from patchclamp.errors import PatchclampError, ProgramError, TokensError
from patchclamp.language import Features
from patchclamp.language.tokens import Tokens, as_integer
from patchclamp.language.values import BYTES, Converted, as_file, as_flag, as_items, as_number, field, optional
from patchclamp.lm import LM
from patchclamp.store.tensors import ARRAYS
from patchclamp.studies.inputs import check_whole

Document = str | Sequence[int]
SUFFIXES = {".txt": "text", ".jsonl": "JSON lines", ".ndjson": "JSON lines", ".parquet": "Parquet"}


def documents_of(
    data: Any, column: str | None = None, keep: Sequence[str] = (), kept: list[tuple[Any, ...]] | None = None
) -> Iterator[Document]:
    """Yield the documents of `data`, in order.

    data: a list (or any iterable) of texts or lists of token ids; a file of text (one document
        per line, blank lines are skipped), JSON lines or Parquet, by its suffix; a folder that `datasets` saved; or a
        `datasets.Dataset`
    column: the field or column with the documents; "text" by default
    keep: further fields or columns, whose values are appended to `kept` for each document

    Raises: `ProgramError` for any other data, and for a missing column.
    """
    if isinstance(data, (str, Path)):
        return _documents(_of_file(Path(as_file(data, "documents")), column, keep), kept)
    if hasattr(data, "column_names") and not isinstance(data, (list, tuple)):
        return _documents(_of_columns(data, column, keep, "the data set", data.column_names), kept)
    if column is not None or keep:
        raise ProgramError("columns require a file or a data set", "keep" if column is None else "column")
    if isinstance(data, (*BYTES, Mapping, set, frozenset)) or hasattr(data, "columns"):
        as_items(data, "documents")  # raises
    if not isinstance(data, Iterable):
        raise ProgramError(f"expected a list, file or data set of documents, got {type(data).__name__}",
                           "documents")  # fmt: skip
    return map(_document, as_items(data, "documents") if hasattr(data, "tolist") else data)


Fields = Iterable[Sequence[Any]]
"""Pairs of a document and its kept fields."""


def _documents(rows: Fields, kept: list[tuple[Any, ...]] | None) -> Iterator[Document]:
    for value, *others in rows:
        if kept is not None:
            kept.append(tuple(others))
        yield _document(value)


def _of_file(path: Path, column: str | None, keep: Sequence[str]) -> Fields:
    if path.is_dir():
        datasets = needed("datasets")
        try:
            saved = datasets.load_from_disk(str(path))
        except FileNotFoundError as error:
            raise ProgramError(f"expected a folder saved by datasets, got {path}: {error}", "documents") from None
        if not isinstance(saved, datasets.Dataset):
            raise ProgramError(f"{path} has several splits: pass the folder of one: {', '.join(saved)}", "documents")
        return _of_columns(saved, column, keep, str(path), saved.column_names)
    if path.suffix not in SUFFIXES:
        kinds = ", ".join(f"{suffix} ({kind})" for suffix, kind in SUFFIXES.items())
        raise ProgramError(f"expected a folder saved by datasets, or a file with the suffix {kinds}, got {path}",
                           "documents")  # fmt: skip
    if not path.exists():
        raise ProgramError(f"{path} does not exist", "documents")
    if path.suffix == ".parquet":
        return _of_parquet(path, column, keep)
    if path.suffix == ".txt" and (column is not None or keep):
        raise ProgramError(f"{path}: a text file has no columns", "keep" if column is None else "column")
    return _of_lines(path, None if path.suffix == ".txt" else column or "text", keep)


def _of_lines(path: Path, column: str | None, keep: Sequence[str]) -> Fields:
    """Yield a document per line: its text, or a field of its JSON. Blank lines are skipped."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if column is None and line.strip():
                yield [line.rstrip("\n")]
            elif line.strip():
                try:
                    fields = json.loads(line)
                    values = [fields[name] for name in (column, *keep)]
                except (ValueError, KeyError, TypeError) as error:
                    names = ", ".join(map(repr, [column, *keep]))
                    raise ProgramError(f"{path}, line {number}: expected a JSON object with {names} ({error})",
                                       "documents") from None  # fmt: skip
                yield values


def _of_parquet(path: Path, column: str | None, keep: Sequence[str]) -> Fields:
    with needed("pyarrow.parquet").ParquetFile(path) as file:
        names = _columns(column, keep, file.schema_arrow.names, str(path))
        for batch in file.iter_batches(columns=list(dict.fromkeys(names))):
            yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)


def _of_columns(data: Any, column: str | None, keep: Sequence[str], where: str, known: list[str] | None) -> Fields:
    """Yield the documents in a column. `known`: its column names; None if a streamed data set lacks them."""
    names = [column or "text", *keep] if known is None else _columns(column, keep, known, where)
    return ([row[name] for name in names] for row in data)


def _columns(column: str | None, keep: Sequence[str], names: list[str], where: str) -> list[str]:
    asked = {"column": [column or "text"], "keep": list(keep)}
    for path, wanted in asked.items():
        for name in wanted:
            if name not in names:
                raise ProgramError(f"{where} has no column {name!r}; available: {', '.join(names)}", path)
    return [*asked["column"], *asked["keep"]]


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
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise PatchclampError(f"a harvest requires {package}: pip install 'patchclamp[harvest]'") from None


def _windows(windows: Iterable[Any]) -> tuple[tuple[int | None, int | None], ...]:
    read, end = [], optional(as_integer)
    for window in as_items(windows, ""):
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise ProgramError(f"expected (start, stop) pairs, such as ((4, None),), got {windows!r}")
        read.append((end(window[0]), end(window[1])))
    return tuple(read)


def _numbers(ids: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(as_integer, as_items(ids, "")))


def _norm(value: Any) -> float:
    if not (norm := as_number(value)) > 0:
        raise ProgramError(f"expected a norm above 0, got {value!r}")
    return norm


class Filters(Converted, frozen=True, forbid_unknown_fields=True):
    """Row filters: a row is kept if it passes all of them.

    no_bos: drop a special token at the start of a document
    no_special: drop special tokens
    positions: keep document positions in any of these half-open windows, given like slices: (4, None), (-8, None); all
        if empty
    only_tokens: token ids to keep, all if empty · not_tokens: token ids to drop
    norm_cap: keep rows with at most this L2 norm at every site, before projection or summing
    norm_times_median: keep rows with a norm of at most this multiple of the median at every site; the median is over
        the shard or, with sums, over the document's kept rows
    """

    no_bos: bool = field(converter=as_flag, default=False)
    no_special: bool = field(converter=as_flag, default=False)
    positions: tuple[tuple[int | None, int | None], ...] = field(converter=_windows, default=())
    only_tokens: tuple[int, ...] = field(converter=_numbers, default=())
    not_tokens: tuple[int, ...] = field(converter=_numbers, default=())
    norm_cap: float | None = field(converter=optional(_norm), default=None)
    norm_times_median: float | None = field(converter=optional(_norm), default=None)

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except PatchclampError as error:
            raise error.under("filters") from None

    @property
    def caps_norms(self) -> bool:
        return self.norm_cap is not None or self.norm_times_median is not None

    def kept(self, tokens: np.ndarray, starts: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
        """Return a mask of the rows kept by the filters on tokens, bool [N]. Document i has the tokens from `starts[i]`
        to `starts[i + 1]`."""
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
        """Return a mask of the tokens whose position is in a window."""
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
        """Return a mask of a shard's rows within the norm caps, bool [n], given the rows' norms at one site [n]."""
        passing = np.ones(len(norms), bool)
        if self.norm_cap is not None:
            passing &= norms <= self.norm_cap
        if self.norm_times_median is not None:
            known = norms[~np.isnan(norms)]  # NaN rows fail the cap, and must not affect the median
            passing &= norms <= self.norm_times_median * (np.median(known) if len(known) else 0)
        return passing


def special_ids(tokenizer: Tokenizer, ids: np.ndarray) -> list[int]:
    """Return the special tokens among `ids`: they have text, but decode to nothing if special tokens are skipped."""
    if isinstance(tokenizer, NoTokenizer):
        raise ProgramError("special tokens are unknown without a tokenizer: use not_tokens=", "filters")
    texts = tokenizer.token_strings(ids.tolist())
    return [token for token, text in zip(ids.tolist(), texts, strict=True) if text and not tokenizer.decode([token])]


def drawn(count: int, *key: int) -> np.ndarray:
    """Return random 64-bit numbers [count] seeded by a key. PCG64's raw output is the same in all NumPy versions,
    unlike `Generator`'s."""
    return np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)


_PARTS, _SHUFFLE = 1, 2  # separate the random streams of a seed


def parts_of(documents: int, seed: int, parts: int) -> np.ndarray:
    """Return the part that each document belongs to, [documents]."""
    return (drawn(documents, _PARTS, seed) % np.uint64(parts)).astype(np.int64)


def shuffled(rows: int, seed: int, part: int) -> np.ndarray:
    """Return a part's permutation, [R]: the index of the row at each shuffled place."""
    return np.argsort(drawn(rows, _SHUFFLE, seed, part), kind="stable")


BLOCK = 4096
MORE_SHARDS = 8
MOST_ROWS = 10**9  # largest total that NumPy draws from
_COUNTS, _LABELS = 1, 2  # separate the two random streams of the order
Columns = Callable[[int], Mapping[str, np.ndarray]]
"""Returns the columns of a shard, given its index: arrays [rows, …] by name."""


class ReadingOrder:
    """The order in which the rows of the shards are read.

    rows: number of rows per shard; parts: the part of each shard, ascending
    """

    def __init__(self, rows: Sequence[int], parts: Sequence[int], seed: int) -> None:
        self._seed = seed
        self._ends = np.append(0, np.cumsum(rows)).astype(np.int64)  # where each shard ends, in stored rows
        numbers = np.unique(np.asarray(parts, np.int64))
        of_part = [self._ends[np.searchsorted(parts, part)] for part in numbers]
        self._first = np.array([*of_part, self._ends[-1]])  # the first stored row of each part, and the end

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def is_stored(self) -> bool:
        """True if rows are read in stored order, because there is only one part."""
        return len(self._first) <= 2

    @property
    def most_open(self) -> int:
        """The number of shards open at once: one per part, and a few more."""
        return len(self._first) - 1 + MORE_SHARDS

    @functools.cached_property
    def _before(self) -> np.ndarray:
        """The cumulative number of rows of each part before each block, [B + 1, K]."""
        left = np.diff(self._first)
        if left.sum() >= MOST_ROWS:
            raise ProgramError(
                f"expected fewer than {MOST_ROWS:,} rows to interleave, got {left.sum():,}: "
                "use Harvested(folder, interleave=False)", "folder"
            )  # fmt: skip
        draw, before = np.random.default_rng((_COUNTS, self._seed)), [np.zeros_like(left)]
        while left.any():
            counts = draw.multivariate_hypergeometric(left, min(BLOCK, int(left.sum())), method="marginals")
            left = left - counts
            before.append(before[-1] + counts)
        return np.array(before)

    def block(self, number: int) -> np.ndarray:
        """Return the rows of a block in reading order, as indices of stored rows, int64 [n]."""
        if self.is_stored:
            return np.arange(number * BLOCK, min((number + 1) * BLOCK, len(self)))
        counts = self._before[number + 1] - self._before[number]
        parts = np.repeat(np.arange(len(counts)), counts)
        parts = np.random.default_rng((_LABELS, self._seed, number)).permutation(parts)
        rows = np.empty(len(parts), np.int64)
        for part, (first, before) in enumerate(zip(self._first[:-1], self._before[number], strict=True)):
            places = np.flatnonzero(parts == part)
            rows[places] = first + before + np.arange(len(places))
        return rows

    def stored(self) -> np.ndarray:
        """Return all rows in reading order, as indices of stored rows, int64 [N]."""
        return np.concatenate([np.zeros(0, np.int64), *map(self.block, range(-(-len(self) // BLOCK)))])

    def place(self, number: int, block: Callable[[int], np.ndarray]) -> tuple[int, int]:
        """Return the shard of row `number` in reading order, and the row's index in that shard. `block`: cached
        `self.block`."""
        row = int(block(number // BLOCK)[number % BLOCK])
        shard = int(np.searchsorted(self._ends, row, side="right")) - 1
        return shard, row - int(self._ends[shard])

    def read(
        self, columns: Columns, begin: int = 0, end: int | None = None, most: int = BLOCK
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield rows `begin` to `end` of the reading order, in chunks of at most `most` rows, by column."""
        end = len(self) if end is None else end
        opened = functools.lru_cache(self.most_open)(columns)
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            first = number * BLOCK
            rows = self.block(number)[max(begin - first, 0) : end - first]
            for at in range(0, len(rows), most):
                yield self._gathered(opened, rows[at : at + most])

    def _gathered(self, columns: Columns, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Gather stored rows from their shards. Within each shard, `rows` must be consecutive."""
        shards = np.searchsorted(self._ends, rows, side="right") - 1
        pieces = []
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            first = int(rows[places[0]] - self._ends[shard])
            of_shard = columns(shard)
            pieces.append((places, {name: of_shard[name][first : first + len(places)] for name in of_shard}))
        if len(pieces) == 1:
            return pieces[0][1]  # as mapped, not copied
        gathered = {name: np.empty((len(rows), *a.shape[1:]), a.dtype) for name, a in pieces[0][1].items()}
        for places, piece in pieces:
            for name, array in piece.items():
                gathered[name][places] = array
        return gathered


FORMAT = 2  # format 1 had another shuffle; its finished shards are read
READABLE = (1, 2)
NAME_DIGITS = 16


class StoredSite(msgspec.Struct, frozen=True):
    """A site of the data set.

    name: such as "resid_post[3]"
    width: width of a stored row
    captured: width of a captured row
    projection: hash of the projection matrix, "" without one
    """

    name: str
    width: int
    captured: int
    projection: str = ""

    @property
    def file(self) -> str:
        """The file's name in a shard."""
        words = self.name.replace("]", "").replace("[", ".").replace(", ", ".").replace(":", "-")
        return f"{words}.safetensors"


class StoredFeatures(msgspec.Struct, frozen=True):
    """Features of an attached SAE: the `top` largest of each row, or the features `ids`.

    name: the SAE's name · sae, at, precision: a hash of its weights, the site that it reads, and its matrices' dtype
    count: the SAE's number of features
    """

    name: str
    sae: str
    at: str
    precision: str
    count: int
    top: int | None
    ids: tuple[int, ...] | None

    @property
    def file(self) -> str:
        """The file's name in a shard."""
        return f"features.{self.name}.parquet"

    @property
    def filling(self) -> StoredSite:
        """The site that holds features while a part is being filled: the bits of the ids, then the values, float32."""
        width = 2 * (self.top or len(self.ids or ()))
        return StoredSite(f"features.{self.name}", width, width)

    def op(self, tokens: Tokens) -> Features:
        return Features(self.name, tokens, self.top, self.ids)


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that determines the bytes of a data set.

    model: hub id or folder name · weights: hash of a folder's files (`study.model_identity`); "" for a
    hub id · engine, settings: the engine with its version, and its settings · documents: hash of all tokens, and of the
    starts of documents and prompts · sites · dtype: the stored rows' dtype · sums: True if a row is the sum over a
    document · filters · seed · parts · shard_rows · columns: hash of the documents' kept columns, "" without any ·
    features: stored SAE features
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
    columns: str = ""
    features: tuple[StoredFeatures, ...] = ()

    @property
    def norms(self) -> StoredSite | None:
        """The norms of unreduced rows, float32, one per site; None without norm caps. With sums they are 0 for a
        document with rows within the caps, otherwise NaN. They are not part of the data set."""
        return StoredSite("norms", len(self.sites), len(self.sites)) if self.filters.caps_norms else None

    def dtype_of(self, site: StoredSite) -> str:
        """Return the dtype of a file: a site's, the features' or the norms'."""
        return self.dtype if site in self.sites else "float32"

    @property
    def written(self) -> tuple[StoredSite, ...]:
        """The sites, features and norms written while a part is being filled."""
        norms = () if self.norms is None else (self.norms,)
        return (*self.sites, *(one.filling for one in self.features), *norms)

    @property
    def row_bytes(self) -> int:
        """The number of bytes written per row while a part is being filled."""
        return sum(site.width * ARRAYS[self.dtype_of(site)].itemsize for site in self.written)

    @property
    def name(self) -> str:
        """The hash that names the folder."""
        content = msgspec.json.encode(self, order="deterministic")
        for absent in (b',"features":[]}', b',"columns":""}'):  # as in data sets of older versions
            content = content.removesuffix(absent) + b"}" if content.endswith(absent) else content
        return hashlib.sha256(content).hexdigest()[:NAME_DIGITS]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`harvest.json`: the recipe, and the sizes of the complete data set.

    documents, tokens, cut_tokens: counts for the data set · part_rows: rows per part, before norm caps
    """

    recipe: Recipe
    documents: int
    tokens: int
    cut_tokens: int
    part_rows: tuple[int, ...]

    @property
    def shards(self) -> list[str]:
        """The names of all shards, in order."""
        return [name for part in range(len(self.part_rows)) for name in self.shards_of(part)]

    def shards_of(self, part: int) -> list[str]:
        """Return the names of a part's shards, in order."""
        return [shard_name(part, shard) for shard in range(-(-self.part_rows[part] // self.recipe.shard_rows))]


def shard_name(part: int, shard: int) -> str:
    return f"shard-{part:04d}-{shard:05d}"


def part_of(name: str) -> int:
    """Return a shard's part, from its name."""
    return int(name.split("-")[1])


PARTS = 8  # default number of parts of a data set, unless that makes them smaller or larger than:
LEAST_PART_BYTES, MOST_PART_BYTES = 1 << 28, 1 << 31


class TokenizedDocuments(msgspec.Struct, frozen=True, eq=False):
    """The tokens to run.

    ids: token ids of all documents, concatenated, int32 [N]
    documents: offsets of the documents in `ids`, and the end, int64 [documents + 1]
    prompts: offsets of the prompts in `ids`, and the end, int64 [prompts + 1]
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
        """Return the index [n] of each token's document, given the token's index in `ids` [n]."""
        return np.searchsorted(self.documents, tokens, side="right") - 1

    def prompt(self, number: int) -> list[int]:
        """Return the token ids of one prompt."""
        return self.ids[self.prompts[number] : self.prompts[number + 1]].tolist()


def read_tokens(lm: LM, documents: Iterable[Document], context: int | None, overlong: str) -> TokenizedDocuments:
    """Tokenise documents. `context`: maximum prompt length, by default the model's. Longer documents are refused, cut,
    or split into several prompts, depending on `overlong`.

    Raises: `TokensError` for a document that is refused or has a token outside the vocabulary.
    """
    longest = lm.model.max_model_len - 1  # one token is generated
    if context is not None and check_whole(context, "context", 1) > longest:
        raise ProgramError(f"expected 1 to {longest} tokens for this model, got {context!r}", "context")
    longest = context or longest
    parts, starts, prompts, total, cut = [], [0], [0], 0, 0
    for number, document in enumerate(documents):
        ids = _ids(lm, document, number)
        if len(ids) > longest and overlong == "refuse":
            raise TokensError(
                f"expected at most {longest} tokens, got {len(ids)} in document {number}: set overlong='cut' to "
                "truncate it, or 'split' to run it as several prompts", "documents"
            )  # fmt: skip
        if overlong == "cut":
            cut += max(len(ids) - longest, 0)
            ids = ids[:longest]
        parts.append(ids)
        prompts += [min(total + end, total + len(ids)) for end in range(longest, len(ids) + longest, longest)]
        total += len(ids)
        starts.append(total)
    if not total:
        raise ProgramError("expected at least one non-empty document", "documents")
    return TokenizedDocuments(np.concatenate(parts), np.array(starts, np.int64), np.array(prompts, np.int64), cut)


def _ids(lm: LM, document: Document, number: int) -> np.ndarray:
    try:
        ids = np.array(lm.tokenizer.encode(document) if isinstance(document, str) else document, np.int64)
    except OverflowError:
        ids = np.array(list(document), object)
    if len(ids) and not (ids.min() >= 0 and ids.max() < lm.model.d_vocab):
        outside = next(int(i) for i in ids if not 0 <= i < lm.model.d_vocab)
        raise TokensError(f"document {number}: token id {outside} is out of range for a vocabulary of "
                          f"{lm.model.d_vocab}", "documents")  # fmt: skip
    return ids.astype(np.int32)


class HarvestPart(msgspec.Struct, frozen=True, eq=False):
    """A part: documents that are shuffled together (all, unless a harvest has several parts).

    number: the part's number
    prompts: the prompts with rows, ascending, int64 [prompts]
    first: index of each prompt's first row, and the end, int64 [prompts + 1]
    places: the shuffled place of each row, int64 [R]
    tokens: for each shuffled place, the index of the row's token in `TokenizedDocuments.ids`, int64 [R]; for a sum, of
        the document's first kept token
    """

    number: int
    prompts: np.ndarray
    first: np.ndarray
    places: np.ndarray
    tokens: np.ndarray


class HarvestPlan(msgspec.Struct, frozen=True, eq=False):
    """The tokens to run, the rows to keep, and their places.

    kept: mask of the rows kept by the filters on tokens, bool [N]
    parts: number of parts; a document's part is drawn from the seed
    sums: True if a row is the sum over a document's kept rows
    """

    tokens: TokenizedDocuments
    kept: np.ndarray
    parts: int
    sums: bool
    seed: int

    @property
    def part_rows(self) -> tuple[int, ...]:
        """The number of rows of each part."""
        ends = np.append(0, np.cumsum(self.kept))[self.tokens.documents]
        rows = np.diff(ends)
        rows = np.minimum(rows, 1) if self.sums else rows
        parts = parts_of(len(rows), self.seed, self.parts)
        return tuple(int(rows[parts == part].sum()) for part in range(self.parts))

    def part(self, number: int) -> HarvestPart:
        """Return the documents of one part and their rows."""
        documents = len(self.tokens.documents) - 1
        here = np.repeat(parts_of(documents, self.seed, self.parts) == number, np.diff(self.tokens.documents))
        rows = np.flatnonzero(self.kept & here)
        if self.sums:
            rows = rows[np.unique(self.tokens.document_of(rows), return_index=True)[1]]
        first = np.searchsorted(rows, self.tokens.prompts)
        prompts = np.flatnonzero(np.diff(first))
        row_at = shuffled(len(rows), self.seed, number)
        places = np.empty_like(row_at)
        places[row_at] = np.arange(len(rows))
        return HarvestPart(number, prompts, np.append(first[prompts], len(rows)), places, rows[row_at])

    def tokens_to_run(self, parts: Sequence[int]) -> int:
        """Return the total token count of these parts' prompts, counting only prompts with kept rows."""
        rows = np.diff(np.append(0, np.cumsum(self.kept))[self.tokens.prompts])
        of_document = parts_of(len(self.tokens.documents) - 1, self.seed, self.parts)
        of_prompt = of_document[self.tokens.document_of(self.tokens.prompts[:-1])]
        return int(np.diff(self.tokens.prompts)[(rows > 0) & np.isin(of_prompt, parts)].sum())


def parts_for(rows: int, row_bytes: int, machines: int) -> int:
    """Return the default number of parts of a data set, a multiple of `machines`. Each part fits in the page cache, so
    that it is written sequentially, and is synced and sealed while the next one is computed. A machine makes a single
    part if there are more rows than readers can interleave."""
    size = rows * row_bytes
    part = min(max(size // PARTS, LEAST_PART_BYTES), MOST_PART_BYTES)
    several = -(-size // part) if rows < MOST_ROWS else 1
    return max(1, -(-several // machines)) * machines


def make_plan(
    lm: LM, documents: Iterable[Document], filters: Filters, context: int | None, overlong: str,
    sums: bool, seed: int, parts: Callable[[int], int],
) -> HarvestPlan:  # fmt: skip
    """Tokenise the documents and apply the filters. `parts`: maps the number of rows to the number of parts."""
    if sums and overlong == "split":
        raise ProgramError("'split' is not supported with sums: use overlong='cut'", "overlong")
    tokens = read_tokens(lm, documents, context, overlong)
    kept = filters.kept(tokens.ids, tokens.documents, lm.tokenizer)
    if not kept.any():
        raise ProgramError(f"none of the {len(kept)} rows passes the filters", "filters")
    count = parts(len(tokens.documents) - 1 if sums else int(kept.sum()))
    return HarvestPlan(tokens, kept, count, sums, seed)
