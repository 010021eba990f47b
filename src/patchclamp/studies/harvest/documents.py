"""Documents: texts or lists of token ids, from memory, files, or Hugging Face `datasets`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchclamp.call import is_token_id
from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.language.values import BYTES, as_file, as_items

Document = str | Sequence[int]
SUFFIXES = {".txt": "text", ".jsonl": "JSON lines", ".ndjson": "JSON lines", ".parquet": "Parquet"}


def documents_of(data: Any, column: str | None = None) -> Iterator[Document]:
    """The documents of `data`, in order.

    data: a list (or any iterable that can be read again) of texts or lists of token ids; a file of text (a document a
        line, blank lines are none), JSON lines or Parquet, by its suffix; a folder that `datasets` saved; or a
        `datasets.Dataset`
    column: the field or column that has the documents; "text" unless given

    Raises: `ProgramError` for what has no documents.
    """
    if isinstance(data, (str, Path)):
        return _of_file(Path(as_file(data, "documents")), column)
    if hasattr(data, "column_names") and not isinstance(data, (list, tuple)):
        return _of_columns(data, column, "the data set", data.column_names)
    if column is not None:
        raise ProgramError("only files and data sets have columns", "column")
    if isinstance(data, (*BYTES, Mapping, set, frozenset)) or hasattr(data, "columns"):
        as_items(data, "documents")  # refuses it
    if not isinstance(data, Iterable) or isinstance(data, Iterator):
        raise ProgramError(f"a list, a file or a data set of documents is needed, not {type(data).__name__}; an "
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
    """`names` is None of a streamed data set that does not know its columns."""
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
    """A module of the `harvest` extra."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise PatchclampError(f"a harvest needs {package}: pip install 'patchclamp[harvest]'") from None
