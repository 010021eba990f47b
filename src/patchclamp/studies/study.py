"""The base of every study: its configuration, its result, runs in batches, and the journal it resumes from."""

from __future__ import annotations

import ast
import asyncio
import collections
import contextlib
import functools
import hashlib
import inspect
import itertools
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    NoReturn,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import msgspec
import numpy as np

from patchclamp.engines import base
from patchclamp.engines.grading import LOOK_EVERY_S
from patchclamp.errors import PatchclampError, ProgramError, unknown
from patchclamp.grade import UNDER_WAY, Pace
from patchclamp.language import Program, Site
from patchclamp.language.structs import PublicStruct
from patchclamp.language.values import as_array, as_file, as_kept, as_plain, check_dense
from patchclamp.lm import LM
from patchclamp.plots import Picture, save_page, save_picture
from patchclamp.plots.style import ran_on, titled
from patchclamp.run import Run
from patchclamp.store.journal import Journal
from patchclamp.store.tensors import parse_header, with_sorted_header
from patchclamp.trace.hints import check_options, hints_for

if TYPE_CHECKING:
    from IPython.display import HTML, Image
    from plotly.graph_objects import Figure as Interactive


class Reporter:
    """Receives the progress of a study, in place of a progress bar. An error that a method raises stops the study."""

    def begin(self, what: str, total: int) -> None:
        """Receive the name of the step about to start, and its number of runs."""

    def advance(self, done: int) -> None:
        """Receive the number of runs finished since the last call."""


Show = bool | Reporter | None  # show a bar, or lines where there is no terminal; or a receiver of the progress


@contextmanager
def progress(what: str, total: int, show: Show, unit: str = "cells") -> Iterator[Callable[[int], None]]:
    """Show a progress bar, or lines without a terminal, unless `show` is False. Yield a function that advances it."""
    if isinstance(show, Reporter):
        show.begin(what, total)
        yield show.advance
        return
    if show is False or not sys.stderr.isatty():
        yield (lambda done: None) if show is False else _Lines(what, total, unit).advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, advance=done)


LINE_S, KNOWN_S = 30.0, 0.5


class _Lines:
    """Writes progress to standard error, a line every `LINE_S`."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit, self._done, self._known = what, total, unit, 0, 0
        self._began_s = self._last_s = time.monotonic()

    def advance(self, done: int) -> None:
        self._done += done
        now_s = time.monotonic()
        if now_s - self._began_s < KNOWN_S:  # runs read from a journal
            self._known = self._done
        elif now_s - self._last_s >= LINE_S and self._done > self._known:
            left = (now_s - self._began_s) / (self._done - self._known) * (self._total - self._done)
            self._last_s = now_s
            print(f"{self._what}: {self._done:,} of {self._total:,} {self._unit}, about {left / 60:.0f} min left",
                  file=sys.stderr, flush=True)  # fmt: skip


WEIGHTS = (".safetensors", ".bin", ".gguf", ".json")
SAMPLED_BYTES = 1 << 16  # at both ends of a weights file


def model_identity(lm: LM) -> tuple[str, str]:
    """Return the model's name and, for a folder, a hash of config.json and of the weight files' names, sizes and last
    bytes. The hash is the same on every machine; the last bytes distinguish weights of the same shapes."""
    folder = Path(lm.model.name)
    if not folder.is_dir():
        return lm.model.name, ""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in WEIGHTS and path.name != "config.json":
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLED_BYTES))
                file.seek(max(path.stat().st_size - SAMPLED_BYTES, 0))
                digest.update(file.read())
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.exists() else b"")
    return folder.name, digest.hexdigest()


FORMAT = "1"


class Provenance(PublicStruct, frozen=True):
    """The model, engine and versions that made a result.

    model: hub id or folder · engine: its name and version · dtype: the weights' dtype · patchclamp: its version ·
    settings: engine settings that affect results · seeds: seeds of all random draws
    """

    model: str
    engine: str
    dtype: str
    patchclamp: str
    settings: str = ""
    seeds: tuple[int, ...] = ()

    @property
    def where(self) -> str:
        """Model, engine and dtype for plots."""
        return ran_on(self.model, self.engine, self.dtype)


def provenance(lm: LM, seeds: tuple[int, ...] = ()) -> Provenance:
    """Return the provenance of runs on `lm`."""
    from patchclamp.version import __version__

    model = lm.model
    engine = f"{model.engine} {model.version}"
    return Provenance(model.name, engine, model.dtype, __version__, model.settings, seeds)


class StudyResult(PublicStruct, frozen=True, eq=False, kw_only=True):
    """The base of study results. Arrays are NumPy's; all other fields are stored as JSON."""

    provenance: Provenance
    config: dict[str, Any] = msgspec.field(default_factory=dict)

    def picture(self, *of: Any) -> Picture:
        """Return the plot's data; some studies accept a selection in `of`."""
        raise NotImplementedError

    def figure(self, *of: Any) -> Interactive:
        """Return the plot as an interactive plotly figure."""
        return titled(self.picture(*of))

    @overload
    def plot(self, path: str | Path, *of: Any) -> Path: ...
    @overload
    def plot(self, path: None = None, *of: Any) -> Image: ...
    def plot(self, path: str | Path | None = None, *of: Any) -> Any:
        """Draw the plot with matplotlib into a file, PNG, SVG or PDF by its extension, and return its path; without a
        path, return IPython's `Image`, which a notebook shows."""
        return save_picture(self.picture(*of), path)

    @overload
    def to_html(self, path: str | Path, *of: Any, include_plotlyjs: bool | str = "directory") -> Path: ...
    @overload
    def to_html(self, path: None = None, *of: Any, include_plotlyjs: bool | str = "directory") -> HTML: ...
    def to_html(self, path: str | Path | None = None, *of: Any, include_plotlyjs: bool | str = "directory") -> Any:
        """Write an interactive page with the plot and its numbers into a file, and return its path; without a path,
        return the page as IPython's `HTML`, with plotly.min.js in it, which a notebook shows.

        include_plotlyjs: "directory" writes plotly.min.js next to the page, once for all pages of the folder; True puts
            it into the page, which grows by 5 MB; "cdn" loads it from the web
        """
        return save_page(self.picture(*of), path, include_plotlyjs)

    def _repr_html_(self) -> str | None:
        """Return the figure as HTML for notebooks; None (plain text) without a figure or plotly."""
        return self._repr_mimebundle_().get("text/html")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Return the figure's data, which JupyterLab and VS Code draw offline; other HTML loads plotly from the web."""
        try:
            figure = self.figure()
        except (PatchclampError, NotImplementedError):
            return {}
        data, page = msgspec.json.decode(figure.to_json() or "{}"), figure._repr_html_()
        return {"application/vnd.plotly.v1+json": data, "text/html": page, "text/plain": repr(self)}

    def to_bytes(self) -> bytes:
        """Return the result as a safetensors file: each array is a tensor, everything else JSON in its metadata."""
        from safetensors.numpy import save

        tensors: dict[str, np.ndarray] = {}

        def store(value: Any) -> dict[str, str]:
            if not isinstance(value, np.ndarray):
                raise NotImplementedError(f"cannot store {type(value).__name__} as JSON")
            name = str(len(tensors))
            tensors[name] = np.ascontiguousarray(value)
            return {"tensor": name}

        fields = msgspec.json.encode(msgspec.to_builtins(self, enc_hook=store)).decode()
        return with_sorted_header(save(tensors, {"study": type(self).__name__, "format": FORMAT, "result": fields}))

    def save(self, path: str | Path) -> Path:
        """Write the result into one file, creating its folder if needed.

        Raises: `ProgramError` if the file cannot be written.
        """
        target = Path(as_file(path, "path"))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self.to_bytes())
        except OSError as error:
            raise ProgramError(f"cannot write {path}: {error}", "path") from None
        return target

    @classmethod
    def load(cls, path: str | Path | bytes) -> Self:
        """Read a result that `save` wrote, from its file or its bytes.

        Raises: `ProgramError` if it is not a result of this study, or is broken.
        """
        metadata, tensors = _read_result(path, cls.__name__)
        of = "its bytes" if isinstance(path, bytes) else path
        names = (cls.__name__, cls.__name__.removesuffix("Result"))  # files of 0.1 use the short name
        if metadata.get("study") not in names or metadata.get("format") != FORMAT:
            saved = metadata.get("study") or "an unknown study"
            raise ProgramError(f"expected {cls.__name__} in format {FORMAT}, got {saved} in format "
                               f"{metadata.get('format')}: {of}", "path")  # fmt: skip

        def restore(kind: type, value: Any) -> Any:
            return tensors[value["tensor"]] if kind is np.ndarray else value

        try:
            return msgspec.convert(msgspec.json.decode(metadata["result"]), cls, dec_hook=restore, str_keys=True)
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise ProgramError(f"this version cannot read {of} as {cls.__name__}: {error}", "path") from None


def load(path: str | Path | bytes) -> StudyResult:
    """Load a saved result of any study, from its file or its bytes.

    Raises: `ProgramError` if it is not a result, or is broken.
    """
    name = _read_result(path, "result")[0].get("study")
    for kind in _kinds(StudyResult):
        if name in (kind.__name__, kind.__name__.removesuffix("Result")):
            return kind.load(path)
    raise ProgramError(f"expected a saved result, got {name or 'another file'}", "path")


def _kinds(base: type[StudyResult]) -> Iterator[type[StudyResult]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _read_result(path: str | Path | bytes, what: str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return the metadata and the tensors of a result."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        data = path if isinstance(path, bytes) else Path(as_file(path, "path")).read_bytes()
        return parse_header(data).metadata, load(data)
    except (OSError, SafetensorError, ValueError) as error:
        of = "the bytes" if isinstance(path, bytes) else path
        raise ProgramError(f"cannot read {of} as a saved {what}: {error}", "path") from None


class Arg(NamedTuple):
    """Metadata in a study field's annotation that defines how its values are read.

    read: checks and converts a value, given its path
    parse: converts command-line text; None hides the field from the command line
    many: True if the option is repeatable · option: its name, if it differs from the field's
    served: True if a server's clients may set it
    """

    read: Callable[[Any, str], Any] | None = None
    parse: Callable[[str], Any] | None = str
    many: bool = False
    option: str = ""
    served: bool = True


class StudyField(NamedTuple):
    """A field of a study, or an argument of its `run`."""

    name: str
    type: Any
    default: Any  # `REQUIRED` without a default
    doc: str

    @property
    def arg(self) -> Arg:
        return next((one for one in getattr(self.type, "__metadata__", ()) if isinstance(one, Arg)), Arg())

    @property
    def kind(self) -> Any:
        """The type without its metadata."""
        return get_args(self.type)[0] if get_origin(self.type) is Annotated else self.type

    def value(self, given: Any) -> Any:
        """Check and convert a given value. Raises `ProgramError` with the field as its path."""
        if hasattr(given, "detach") and not isinstance(given, LM):
            check_dense(given, self.name)
        if getattr(given, "shape", None) == ():  # a NumPy or torch scalar
            given = as_plain(given, self.name)
        given = as_kept(given)
        if given is None and (self.default is None or type(None) in get_args(self.kind)):
            return None
        kinds = self.kind, *get_args(self.kind)
        choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
        if choices and (not isinstance(given, str) or given not in choices):
            raise unknown(self.name, given, choices, self.name)
        return given if self.arg.read is None else self.arg.read(given, self.name)


REQUIRED = object()


def as_lm(lm: Any, path: str) -> LM:
    if not isinstance(lm, LM):
        raise ProgramError(f"expected an LM, got {type(lm).__name__} {lm!r:.100}; create one with pc.LM(...)", path)
    return lm


def fields_of(function: Callable[..., Any], chosen: Callable[[Any], bool]) -> dict[str, StudyField]:
    """Return a function's parameters whose kind satisfies `chosen`, by name."""
    types, given = get_type_hints(function, include_extras=True), inspect.signature(function).parameters
    return {name: StudyField(name, types[name], REQUIRED if one.default is one.empty else one.default, "")
            for name, one in given.items() if chosen(one.kind)}  # fmt: skip


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Study:
    """The configuration of a study: everything that determines its values, declared once.

    A subclass has annotated fields, each followed by a docstring, and `_run(self, lm, *, ...)`, whose keyword arguments
    (`resume`, `batch`, …) do not change the values. Both define the constructor, `run`, the short form
    (`patch_sweep(lm, **fields)`), the command line, and the `config` that is saved with a result.
    """

    command: ClassVar[str] = ""  # the name on the command line
    positional: ClassVar[int] = 0  # fields that the short form takes by position
    short: ClassVar[str] = ""  # the name of the short form and of the HTTP route
    not_served: ClassVar[str] = ""  # the reason why servers refuse the study, if they do

    def __init__(self, /, **given: Any) -> None:
        fields = self.fields()
        check_options((n for n in given if n not in fields), f"{type(self).__name__}()", fields, hints_for(fields))
        for name, field in fields.items():
            if name not in given and field.default is REQUIRED:
                raise ProgramError(f"{type(self).__name__}() requires the argument {name}=", name)
            object.__setattr__(self, name, field.value(given.get(name, field.default)))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is frozen: create another with {name}=")

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __repr__(self) -> str:
        given = (name for name in self.to_dict() if name != "study")
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r:.60}' for name in given)})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(json_of(self.to_dict()))

    @classmethod
    @functools.cache
    def fields(cls) -> dict[str, StudyField]:
        """Return the fields by name, in order."""
        types, docs = get_type_hints(cls, include_extras=True), {}
        for one in reversed(cls.__mro__):
            docs |= dict.fromkeys(inspect.get_annotations(one), "") | _docs(one)
        return {name: StudyField(name, types[name], getattr(cls, name, REQUIRED), docs[name])
                for name in docs if get_origin(types[name]) is not ClassVar}  # fmt: skip

    @classmethod
    @functools.cache
    def options(cls) -> dict[str, StudyField]:
        """Return the keyword arguments of `run`, by name."""
        run = cls._run  # pyright: ignore[reportAttributeAccessIssue]
        return fields_of(run, lambda kind: kind == inspect.Parameter.KEYWORD_ONLY)

    def run(self, lm: LM, **how: Any) -> Any:
        """Run the study on a model, and return its result.

        resume: a file that values are appended to as they are computed, so that an interrupted run of the same study
            can continue · batch: runs per batch · show_progress: a progress bar; by default on a terminal
        """
        if lm is not None or self.needs_lm():
            as_lm(lm, "lm")
        options, call = self.options(), f"{type(self).__name__}.run()"
        check_options((name for name in how if name not in options), call, options)
        given = {name: options[name].value(value) for name, value in how.items()}
        result = self._run(lm, **given)  # pyright: ignore[reportAttributeAccessIssue]
        return msgspec.structs.replace(result, config=self.to_dict()) if isinstance(result, StudyResult) else result

    def needs_lm(self) -> bool:
        """True if the study makes runs; otherwise `lm` may be None."""
        return True

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data: its class and every field that is not the default."""
        plain = {name: plain_data(getattr(self, name)) for name in self.fields()}
        fields = {name: field for name, field in self.fields().items() if field.default is not REQUIRED}
        defaults = {name: plain_data(field.value(field.default)) for name, field in fields.items()}
        given = {name: value for name, value in plain.items() if name not in defaults or value != defaults[name]}
        return {"study": type(self).__name__, **given}

    @classmethod
    def short_form(cls, name: str) -> Callable[..., Any]:
        """Return the function `name(lm, **fields, **options)`, which makes the study and runs it."""
        ordered = ["lm", *list(cls.fields())[: cls.positional]]

        def call(*args: Any, **kwargs: Any) -> Any:
            required = ["lm", *(one for one, field in cls.fields().items() if field.default is REQUIRED)]
            kwargs = bind_call(name, ["lm", *cls.fields(), *cls.options()], ordered, required, args, kwargs)
            lm, how = kwargs.pop("lm"), {one: kwargs.pop(one) for one in cls.options() if one in kwargs}
            return cls(**kwargs).run(lm, **how)

        keyword, by_position = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter("lm", by_position, annotation=LM)]
        for field in (*cls.fields().values(), *cls.options().values()):
            kind = by_position if field.name in ordered else keyword
            default = inspect.Parameter.empty if field.default is REQUIRED else field.default
            parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=field.kind))
        call.__name__ = call.__qualname__ = name
        cls.short = name
        call.study = cls  # pyright: ignore[reportFunctionMemberAccess]
        call.__module__, call.__signature__ = cls.__module__, inspect.Signature(parameters)  # pyright: ignore
        fields = "\n".join(f"{field.name}: {field.doc}" for field in cls.fields().values())
        call.__doc__ = f"{inspect.getdoc(cls)}\n\n{fields}\n\nThe short form of `{cls.__name__}(...).run(lm, ...)`."
        return call


def bind_call(
    name: str, known: Sequence[str], ordered: Sequence[str], required: Sequence[str], args: tuple[Any, ...],
    named: dict[str, Any], others: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments of a call by name.

    ordered: names that may be given by position · others: True if the function accepts further names
    Raises: `ProgramError` for a missing, unknown, duplicate or surplus argument.
    """
    unknown = () if others else (one for one in named if one not in known)
    check_options(unknown, f"{name}()", known, hints_for(known))
    if len(args) > len(ordered):
        raise ProgramError(f"{name}() takes {', '.join(ordered)} by position, got {len(args)} values: name the rest")
    by_position = dict(zip(ordered, args, strict=False))
    if twice := [one for one in by_position if one in named]:
        raise ProgramError(f"{name}() got this argument both by position and by name", twice[0])
    for one in required:
        if one not in by_position and one not in named:
            raise ProgramError(f"{name}() requires the argument {one}=", one)
    return {**named, **by_position}


def _docs(cls: type) -> dict[str, str]:
    """Return the docstring below each annotated field of a class; empty if its source is not available."""
    try:
        definition: Any = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError):
        return {}
    docs = {}
    for field, text in itertools.pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            target, value = field.target, text.value
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                docs[target.id] = " ".join(str(value.value).split())
    return docs


def plain_data(value: Any) -> Any:
    """Return a value as plain JSON data. Arrays become their shape and a content hash; bytes become a hash."""
    if "float" in str(getattr(value, "dtype", "")) and hasattr(value, "shape"):
        numbers = as_array(value)
        return {"shape": list(numbers.shape), "sha256": hashlib.sha256(numbers.tobytes()).hexdigest()}
    value = as_plain(value)
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, slice):
        parts = (value.start, value.stop) if value.step is None else (value.start, value.stop, value.step)
        return ":".join("" if part is None else str(part) for part in parts)
    if isinstance(value, (str, int, float, type(None))):
        return value
    if callable(value) and not isinstance(value, (msgspec.Struct, Site)):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, Mapping):
        return {str(name): plain_data(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain_data(one) for one in value]
    if isinstance(value, msgspec.Struct) and not isinstance(value, (StudyResult, Site)):
        return {"type": type(value).__name__, **{k: plain_data(v) for k, v in msgspec.structs.asdict(value).items()}}
    return str(value)[:1000]


Record = TypeVar("Record")


def json_of(question: Any) -> str:
    """Encode plain data as JSON, with equal text for equal data. NumPy scalars count as plain."""
    return msgspec.json.encode(question, enc_hook=_plain, order="deterministic").decode()


def _plain(value: Any) -> Any:
    if (plain := as_plain(value)) is value:
        raise NotImplementedError(f"{type(value).__name__} is not plain data")
    return plain


class StoredArray(msgspec.Struct, frozen=True, array_like=True):
    """An array in a journal record."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> StoredArray:
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


Resumable = str | Path | Journal
"""Storage of a study's values: a file, or a server's journal."""


Item = TypeVar("Item")


def run_batches(
    lm: LM,
    calls: Iterable[Mapping[str, Any]],
    read: Callable[[list[Run]], None],
    under_way: int = UNDER_WAY,
    pace: Pace | None = None,
    stopped: Future[None] | None = None,
) -> None:
    """Call `lm.arun` with each of `calls` (keyword arguments for a list of prompts), and pass the runs to `read` in
    order. Up to `under_way` calls are in flight. `pace` is notified of each batch that has been read.

    `read` is called on another thread. An error of a call or of `read`, an interrupt, or the completion of `stopped`
    cancels the calls in flight and closes the runs that have not been read. The first error is raised.
    """
    stopped = stopped or Future()

    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(_: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has already ended
                loop.call_soon_threadsafe(task.cancel)

        async def read_one() -> None:
            runs = await tasks.popleft()
            try:
                read(runs)
            except BaseException:
                close(runs)
                raise
            if pace is not None:
                pace.done()

        stopped.add_done_callback(cancel)
        tasks: collections.deque[asyncio.Task[list[Run]]] = collections.deque()
        try:
            for call in calls:
                tasks.append(asyncio.create_task(lm.arun(**call)))
                await asyncio.sleep(0)  # the task submits its runs
                if len(tasks) == under_way:
                    await read_one()
            while tasks:
                await read_one()
        finally:
            for one in tasks:
                one.cancel()
            for runs in await asyncio.gather(*tasks, return_exceptions=True):
                close(() if isinstance(runs, BaseException) else runs)

    def close(runs: Iterable[Run]) -> None:
        for run in runs:  # not left to the garbage collector: the error's traceback refers to them
            run.close()

    # a thread, because a notebook already has an event loop on this one
    with base.rarely(), ThreadPoolExecutor(1, thread_name_prefix="patchclamp batches") as thread:
        # start the thread before any call is in flight: an interrupt during its start would not wait for it
        thread.submit(int).result()
        ended = thread.submit(lambda: asyncio.run(main()))
        try:
            # Python handles a signal that arrives just before it blocks only after the wait, so wait in short steps
            while not wait([ended], timeout=LOOK_EVERY_S).done:
                pass
        except BaseException:
            if not stopped.done():
                stopped.set_result(None)
            raise
        ended.result()


def content_of(lm: LM, program: Program, path: str) -> str:
    """Return a program's content, for a journal (`NamedBank.content_of`). Raises `ProgramError` if it contains code."""
    try:
        return lm.bank.content_of(program, {name: of.card.content for name, of in lm.sites.dictionaries.items()})
    except PatchclampError as error:
        raise error.under(path) from None


@contextmanager
def keeping(lm: LM, question: Mapping[str, Any], resume: Resumable | None) -> Iterator[Journal | None]:
    """Open the journal of a resumable study and yield it; yield None without `resume`.

    question: everything that determines the values, as plain data; programs as their `content_of`
    Raises: `ProgramError` if the journal belongs to another study, model, engine or version, `NameTaken` if another
    study is writing it.
    """
    if resume is None:
        yield None
        return
    made = {"made": msgspec.to_builtins(provenance(lm)), "weights": model_identity(lm)[1]}
    journal = resume if isinstance(resume, Journal) else Journal(resume)
    try:
        journal.open(hashlib.sha256(json_of({**question, **made}).encode()).hexdigest())
    except PatchclampError as error:
        raise error.under("resume") from None
    try:
        yield journal
    finally:
        journal.close()


def recorded_runs(
    lm: LM,
    journal: Journal | None,
    items: Sequence[Item],
    call: Callable[[Sequence[Item]], Mapping[str, Any]],
    record: Callable[[Sequence[Run], Sequence[Item]], Sequence[Record]],
    kind: type[Record],
    advance: Callable[[int], None],
    batch: int,
) -> list[Record]:
    """Return a record of each item's run, in order. Items in the journal are not rerun.

    call: makes `lm.arun` arguments for a batch of items, one run each
    record: makes a batch's records from its runs, which are then closed
    advance: called with counts of newly finished items
    batch: maximum number of runs in a batch
    """
    records = journal.take(kind, len(items)) if journal is not None else []
    advance(len(records))

    def read(runs: list[Run]) -> None:
        first = len(records)
        new = record(runs, items[first : first + len(runs)])
        for run in runs:
            run.close()
        if journal is not None:
            journal.append(new)
        records.extend(new)
        advance(len(new))

    if len(records) < len(items):
        pace = Pace(batch)
        run_batches(lm, map(call, pace.parts(items[len(records) :])), read, UNDER_WAY, pace)
    return records


def recorded(
    journal: Journal | None, count: int, kind: type[Record], compute: Callable[[], Sequence[Record]]
) -> list[Record]:
    """Return `count` records from the journal; if any is missing, compute all of them."""
    records = journal.take(kind, count) if journal is not None else []
    if len(records) < count:
        records = list(compute())
        assert len(records) == count
        if journal is not None:
            journal.append(records)
    return records
