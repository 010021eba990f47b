"""The bank (`lm.bank`): vectors, means, whole programs and runs that ops use by name.

Names are resolved when a request is made. Workers and prefix-cache keys receive the content, not the name.

File format: safetensors. A vector is a tensor of the same name. Means are one tensor [n, D]. Metadata field `means`
has the site of each row (JSON: name to a list of site refs), field `programs` the programs (JSON: name to
`Program.to_json`).

A server's bank sends and receives each entry (a vector or means) as such a file, with one floating-point tensor [D] or
[n, D] of any name. The bytes are untrusted, and are checked before use.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard
from urllib.parse import quote

import msgspec
import numpy as np

from patchclamp.errors import EngineError, MissingSource, PatchclampError, ProgramError, ShapeError, near
from patchclamp.language import Op, Program, Site, Use, Vector, When
from patchclamp.language.program import to_dict
from patchclamp.language.tokens import Tokens
from patchclamp.language.values import ValueLike, as_file, as_items, check_name
from patchclamp.store.tensors import ARRAYS, DTYPES, header_size, parse_header, to_float32


class Means(msgspec.Struct, frozen=True):
    """Means with one row per site ref, keyed by the ref's text. A `Named` value reads the row of its op's site."""

    rows: dict[str, Vector]

    def __post_init__(self) -> None:
        rows = list(self.rows.values())
        if not rows or not all(isinstance(row, Vector) and row.shape == (rows[0].shape[-1],) for row in rows):
            raise ShapeError("expected one or more sites, and for each a vector [D] of the same width")
        if not all(isinstance(ref, str) for ref in self.rows):
            raise ProgramError("expected site names (strings) as keys")

    def __repr__(self) -> str:
        return f"Means({', '.join(self.rows)})"


class SourceRun(Protocol):
    """A run that `From` reads. Its captures are kept as long as this object exists."""

    key: str

    def positions_of(self, point: int) -> np.ndarray:
        """Return the captured positions at a point, ascending; possibly empty."""
        ...

    def select(self, tokens: Tokens | str) -> np.ndarray:
        """Return the positions of a selection, in the selection's order."""
        ...


class CapturedRun(SourceRun, Protocol):
    """The part of the `Run` interface that `NamedBank.mean` uses."""

    def __getitem__(self, site: str) -> Any:  # a torch tensor; a NumPy array from the fake engine
        ...

    def positions(self, site: str) -> list[int]: ...
    def refs(self, site: Site | str) -> list[str]: ...
    def is_projected(self, site: Site | str) -> bool: ...


class Edits(Protocol):
    """An object that provides edits, such as a study's steering vectors; the bank stores its edits at scale 1."""

    def edits(self, scale: float = 1.0) -> Sequence[Op]: ...


Entry = Vector | Means | Program | SourceRun
EntryLike = Entry | ValueLike | Op | Sequence[Op] | Edits


class NamedBank(MutableMapping[str, Entry]):
    """Entries by name: vectors [D] or [n, D] (also from tensors, arrays and lists), `Means`, edits, and runs."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __setitem__(self, name: str, entry: EntryLike) -> None:
        self._entries[check_name(name)] = as_entry(entry)

    def __getitem__(self, name: str) -> Entry:
        if check_name(name) not in self._entries:
            names = ", ".join(self._entries) or "none"
            raise MissingSource(f"unknown bank entry {name!r}{near(name, self._entries)}; available: {names}")
        return self._entries[name]

    def __delitem__(self, name: str) -> None:
        self[name]
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def expanded(self, op: Op, path: str, users: tuple[str, ...] = ()) -> Iterator[tuple[str, Op]]:
        """Yield (path, op): the op or, for a `Use`, each scaled edit of its program. Raises for an invalid name."""
        if not isinstance(op, Use):
            yield path, op
            return
        try:
            used = self[op.name]
            if not isinstance(used, Program) or op.name in users:
                wrong = type(used).__name__ if op.name not in users else "a program that uses itself"
                raise ProgramError(f"expected a program, got {wrong} {op.name!r}")
            edits = [op.scaled(edit) for edit in used.edits]
        except PatchclampError as error:
            raise error.under(path if error.path else f"{path}.name") from None
        for i, edit in enumerate(edits):
            yield from self.expanded(edit, f"{path}.{op.name}[{i}]", (*users, op.name))

    def content_of(self, program: Program, saes: Mapping[str, str]) -> str:
        """Return a hash of a program, including the entries and attached SAEs that it names.

        saes: each SAE's content, by name
        Raises: `ProgramError` for code, which has no hash.
        """
        texts = [_as_json(program)]
        for text in texts:  # grows by the programs in use
            for name, of in (*self._entries.items(), *saes.items()):
                if json.dumps(name, ensure_ascii=False) in text and (more := f"{name}={_as_json(of)}") not in texts:
                    texts.append(more)
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()

    def copy(self) -> NamedBank:
        """Return a shallow copy, unaffected by later changes to this bank."""
        made = NamedBank()
        made._entries = dict(self._entries)
        return made

    def __repr__(self) -> str:
        return f"<bank of {len(self)}: {', '.join(self)}>" if len(self) else "<bank, empty>"

    def mean(
        self, name: str, runs: Iterable[CapturedRun], site: Site | str, tokens: Tokens | str | None = None
    ) -> Means:
        """Store the mean of `runs`' captures at a site under `name`: one row per layer, over all positions or only
        `tokens`.

        Raises `MissingSource` if a run did not capture the site, `ProgramError` if no position is selected.
        Source: mean ablation; Wang et al. 2022 (arXiv:2211.00593).
        """
        check_name(name)
        runs = runs_of(runs)
        if not runs:
            raise ProgramError("cannot average zero runs", "runs")
        rows_by_ref = {}
        for ref in runs[0].refs(site):
            total, count = np.zeros(1), 0
            for i, run in enumerate(runs):
                try:
                    rows = _selected(run, ref, tokens)
                except PatchclampError as error:
                    raise error.under(f"runs[{i}]") from None
                total, count = total + rows.sum(0), count + len(rows)
            if not count:
                raise ProgramError(f"{tokens} selects no captured position at {ref}", "tokens")
            rows_by_ref[ref] = Vector.of(total / count)
        self[name] = means = Means(rows_by_ref)
        return means

    def save(self, file: str | Path, names: Iterable[str] | None = None) -> None:
        """Write all entries, or those in `names`, to a safetensors file, replacing an existing file atomically."""
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        as_file(file, "file")
        try:
            chosen = {name: self[name] for name in (self if names is None else as_items(names, "names"))}
        except PatchclampError as error:
            raise error if error.path else error.under("names") from None
        runs = [name for name, entry in chosen.items() if is_run(entry)]
        if runs:
            raise ProgramError(f"{runs[0]!r} is a run, which cannot be saved: pass names= without it", "names")
        tensors = {name: entry.array() for name, entry in chosen.items() if isinstance(entry, Vector)}
        means = {name: entry.rows for name, entry in chosen.items() if isinstance(entry, Means)}
        tensors |= {name: np.stack([row.array() for row in rows.values()]) for name, rows in means.items()}
        refs = {name: list(rows) for name, rows in means.items()}
        programs = {name: _to_json(name, entry) for name, entry in chosen.items() if isinstance(entry, Program)}
        new = Path(f"{file}.new")
        try:
            save_file(tensors, str(new), {"means": json.dumps(refs), "programs": json.dumps(programs)})
            new.replace(file)
        except (OSError, SafetensorError) as error:
            raise ProgramError(f"{file} cannot be written: {error}", "file") from None

    def load(self, file: str | Path, prefix: str = "") -> list[str]:
        """Load a safetensors file written by `save`, or any with tensors [D] or [n, D]. An entry's name is `prefix`
        plus the tensor's name; returns the names.

        For an invalid entry, raises `ProgramError` with the names of the file and the tensor, and loads nothing.
        """
        if not isinstance(prefix, str):
            raise ProgramError(f"expected text, got {type(prefix).__name__} {prefix!r:.100}", "prefix")
        tensors, metadata = _read(Path(as_file(file, "file")))
        entries: dict[str, Entry] = {}
        name = "its metadata"
        try:
            means = msgspec.json.decode(metadata.get("means", "{}"), type=dict[str, list[str]])
            programs = msgspec.json.decode(metadata.get("programs", "{}"), type=dict[str, str])
            stray = sorted((means.keys() - tensors.keys()) | (programs.keys() & tensors.keys()))
            if stray:
                raise ProgramError(f"the metadata entry {stray[0]!r} does not match the tensors")
            for name, tensor in tensors.items():
                entries[check_name(prefix + name)] = entry_of_tensor(tensor, means.get(name))
            for name, program in programs.items():
                entries[check_name(prefix + name)] = as_entry(Program.from_json(program))
        except (PatchclampError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProgramError(f"{file}: {name}: {error}") from None
        self._entries |= entries
        return list(entries)

    def push(self, url: str, names: Iterable[str] | None = None, api_key: str | None = None) -> list[str]:
        """Upload all entries, or those in `names`, to a running `patchclamp serve`: vectors, means, and programs.
        Requests with the same API key then use them by name, as in `pc.Use("calm")` or the model `MODEL:calm`.
        Returns the names.

        api_key: by default the environment's VLLM_API_KEY

        Raises `EngineError` if the server does not respond or rejects an entry, `ProgramError` for a run, or for a
        program that cannot be serialized.
        """
        try:
            import httpx
        except ImportError:
            raise EngineError("uploading needs httpx: pip install 'patchclamp[http]'") from None
        key = os.environ.get("VLLM_API_KEY") if api_key is None else str(api_key)
        chosen = {name: self[name] for name in (self if names is None else as_items(names, "names"))}
        if runs := [name for name, entry in chosen.items() if is_run(entry)]:
            raise ProgramError(f"{runs[0]!r} is a run, which cannot be uploaded: pass names= without it", "names")
        parts: dict[str, tuple[str, bytes, str]] = {}
        for name, entry in chosen.items():
            if isinstance(entry, Program):
                edits = json.dumps({"edits": json.loads(_to_json(name, entry))["edits"]}).encode()
                parts[name] = "programs", edits, "application/json"
            elif isinstance(entry, (Vector, Means)):
                parts[name] = "vectors", to_bytes(name, entry), "application/octet-stream"
        base = f"{str(url).rstrip('/').removesuffix('/v1')}/v1/patchclamp"
        try:
            with httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=60.0) as client:
                for name, (route, body, kind) in parts.items():
                    path = f"{base}/{route}/{quote(name, safe='')}"
                    response = client.put(path, content=body, headers={"Content-Type": kind})
                    if response.status_code >= 400:
                        raise EngineError(f"{url} rejected {name!r}: {_refusal(response)}")
        except (httpx.InvalidURL, httpx.HTTPError, ValueError) as error:
            raise EngineError(f"no response from {url} ({type(error).__name__}: {error}); expected the URL of a "
                              "running `patchclamp serve`, http://host:port") from None  # fmt: skip
        return list(parts)


def _as_json(entry: Entry | str) -> str:
    """Return an entry's content as JSON; for a run, its key."""
    plain = entry.key if is_run(entry) else to_dict(entry) if isinstance(entry, Program) else entry
    return msgspec.json.encode(plain, order="deterministic").decode()


def _refusal(response: Any) -> str:
    """Return the error message in an HTTP response."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"


def _to_json(name: str, program: Program) -> str:
    try:
        return program.to_json()
    except PatchclampError as error:
        raise ProgramError(f"{name!r} cannot be written: {error}; pass names= without it", "names") from None


def entry_of_tensor(tensor: Any, refs: list[str] | None) -> Vector | Means:
    """Convert a file's tensor to a vector, or to means if `refs` is given."""
    if refs is None:
        return Vector.of(tensor)
    if len(tensor.shape) != 2 or len(set(refs)) != len(refs) or len(refs) != tensor.shape[0]:
        raise ShapeError(f"expected means [{len(refs)}, D] of {len(refs)} distinct sites, got {list(tensor.shape)}")
    return Means({ref: Vector.of(row) for ref, row in zip(refs, tensor, strict=True)})


def as_entry(entry: Any) -> Entry:
    """Convert a value to a bank entry. Raises `ProgramError` for a program with captures or without edits."""
    if isinstance(entry, (Vector, Means)) or is_run(entry):
        return entry
    if callable(edits := getattr(entry, "edits", None)):
        entry = edits()
    if isinstance(entry, Program) or _is_edits(entry):
        program = entry if isinstance(entry, Program) else Program.of(entry)
        if program.readout_path or not program.edits:
            raise ProgramError("expected a program with edits and without captures")
        if any(isinstance(op, When) for op in program.edits):
            raise ProgramError("expected edits without conditions, got pc.When: pass it in edits= instead of by name")
        return program
    return Vector.of(entry)


def runs_of(runs: Any) -> list[Any]:
    """Make a list of runs. Raises `ProgramError` for anything else, including a single run."""
    if is_run(runs) or not all(map(is_run, runs := as_items(runs, "runs"))):
        raise ProgramError(f"expected a list of runs, got {type(runs).__name__}; write [run] for one run", "runs")
    return runs


def is_run(entry: object) -> TypeGuard[SourceRun]:
    return isinstance(getattr(entry, "key", None), str) and hasattr(entry, "positions_of")


def _is_edits(entry: object) -> bool:
    """True if a value is an op, or a list of ops."""
    return isinstance(entry, Op) or (
        isinstance(entry, (list, tuple)) and bool(entry) and all(isinstance(op, Op) for op in entry)
    )


def _selected(run: CapturedRun, ref: str, tokens: Tokens | str | None) -> np.ndarray:
    """Return a run's captured rows at a site ref, fp64 [n, W], at `tokens`, or at all positions (None)."""
    rows = run[ref]
    if rows.shape[1:] and run.is_projected(ref):
        raise ProgramError(f"expected whole rows of {ref}, got projected ones: capture it without project=")
    rows = rows.reshape((len(rows), int(np.prod(rows.shape[1:]))))
    rows = np.asarray(rows.float() if hasattr(rows, "float") else rows, np.float64)
    return rows if tokens is None else rows[np.isin(run.positions(ref), run.select(tokens))]


def _read(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a file's tensors and metadata, through torch if it has a dtype that NumPy does not support (bfloat16)."""
    from safetensors import SafetensorError, safe_open

    try:
        for framework in ("numpy", "pt"):
            try:
                with safe_open(str(file), framework) as opened:
                    return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
            except (TypeError, AttributeError):  # a dtype that NumPy does not support
                if framework == "pt":
                    raise
    except (OSError, SafetensorError, ImportError) as error:
        raise ProgramError(f"{file} cannot be read as safetensors: {error}") from None
    raise AssertionError(file)


MAX_HEADER_BYTES = 1 << 20  # enough for a name, a shape, and a ref per row
FLOATS = [code for code, dtype in DTYPES.items() if "float" in dtype]


def to_bytes(name: str, entry: Vector | Means) -> bytes:
    """Serialize a vector or means as a file with one tensor, `name`."""
    from safetensors.numpy import save

    if isinstance(entry, Vector):
        return save({name: entry.array()})
    rows = np.stack([row.array() for row in entry.rows.values()])
    return save({name: rows}, {"means": json.dumps({name: list(entry.rows)})})


def from_bytes(data: bytes) -> Vector | Means:
    """Parse a vector or means file. Raises `ProgramError`, or `ShapeError` for a bad shape or dtype."""
    from safetensors import SafetensorError, deserialize

    if (size := header_size(data)) > MAX_HEADER_BYTES:
        raise ProgramError(f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {size}")
    try:
        header = parse_header(data)
        if len(header.tensors) != 1:
            raise ProgramError(f"expected one tensor, a vector or means, got {len(header.tensors)}")
        [(name, entry)] = header.tensors.items()
        if len(entry.shape) not in (1, 2) or min(entry.shape) < 1:
            raise ShapeError(f"expected a vector [D] or [n, D], not empty, got {list(entry.shape)}"[:400])
        if entry.dtype not in FLOATS:
            raise ShapeError(f"expected a vector of {', '.join(FLOATS)}, got {entry.dtype}"[:400])
        means = msgspec.json.decode(header.metadata.get("means", "{}"), type=dict[str, list[str]])
        if means.keys() - {name} or "programs" in header.metadata:
            raise ProgramError("expected metadata of one vector or means, got metadata of other entries too")
        [(_, checked)] = deserialize(data)  # checks that shape and bytes agree
    except (SafetensorError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProgramError(f"expected a safetensors file: {error}"[:400]) from None
    numbers = np.frombuffer(checked["data"], ARRAYS[DTYPES[entry.dtype]]).reshape(entry.shape)
    return entry_of_tensor(to_float32(numbers, "bfloat16") if entry.dtype == "BF16" else numbers, means.get(name))


def numbers_of_json(data: bytes) -> Vector:
    """Parse a vector from JSON: a 1-D or 2-D list of numbers. Raises as `from_bytes` does."""
    nested = data.lstrip()[1:].lstrip().startswith(b"[")
    try:
        return Vector.of(msgspec.json.decode(data, type=list[list[float]] if nested else list[float]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProgramError(f"expected a 1-D or 2-D list of numbers: {error}"[:400]) from None
    except PatchclampError as error:
        raise type(error)(error.message[:400]) from None
