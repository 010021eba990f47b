"""Every error patchclamp raises, as one tree.

    PatchclampError
    ├── ProgramError        400  the program, or an argument beside it, is wrong as written
    │   ├── UnknownName     400  a word that names nothing: a site, a field, an option, a metric
    │   ├── ShapeError      400  a vector whose shape does not fit the site or the selection
    │   └── TokensError     400  a selection that this prompt cannot satisfy
    ├── NoKey               401  a server that wants an API key, and was given none
    ├── Unlisted            403  names that a server does not tell
    ├── UnsupportedSite     422  a known site that this model, engine or position does not have
    ├── UnsupportedStudy    422  a study that a server does not run
    ├── MissingSource       404  a run or vector that is not (or no longer) there
    │   └── Gone            410  what was here and is no more
    ├── NameTaken           409  a name that something else has, a file that a study is writing
    ├── CapacityError       429  a table is full; the text says which option makes it larger
    │   └── TooLarge        413  a request that asks for more than any request may
    ├── ModelError          422  a model that cannot be loaded or whose layers were not found
    ├── EngineError         500  the engine could not start or has stopped
    │   ├── SeamMoved       500  this vLLM does not have a place that patchclamp attaches to
    │   └── AddressMoved    500  a CUDA graph would read other memory than the step filled
    └── RunError            500  a request failed while it ran
        └── NotFinite       422  edits whose numbers overflow, which the program alone is the cause of

The number is the HTTP status that a server answers with.  `path` points into the program: `edits[2].at`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class PatchclampError(Exception):
    """Base of every error; `path` is the place in the program it speaks of, `status` its HTTP status."""

    status = 500

    def __init__(self, message: str, path: str | None = None) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.message = message
        self.path = path

    def under(self, path: str) -> PatchclampError:
        """The same error, told from one level further out: `at` under `edits[2]` is `edits[2].at`."""
        inner = self.path or ""
        joined = path + ("" if not inner or inner.startswith("[") else ".") + inner
        return type(self)(self.message, joined)

    def __reduce__(self):
        return type(self), (self.message, self.path)


class ProgramError(PatchclampError):
    status = 400


class UnknownName(ProgramError):
    pass


class ShapeError(ProgramError):
    pass


class TokensError(ProgramError):
    pass


class NoKey(PatchclampError):
    status = 401


class Unlisted(PatchclampError):
    status = 403


class UnsupportedSite(PatchclampError):
    status = 422


class UnsupportedStudy(PatchclampError):
    status = 422


class MissingSource(PatchclampError):
    status = 404


class Gone(MissingSource):
    status = 410


class NameTaken(PatchclampError):
    status = 409


class CapacityError(PatchclampError):
    status = 429


class TooLarge(CapacityError):
    status = 413


class ModelError(PatchclampError):
    status = 422


class EngineError(PatchclampError):
    status = 500


class SeamMoved(EngineError):
    pass


class AddressMoved(EngineError):
    pass


class RunError(PatchclampError):
    status = 500


class NotFinite(RunError):
    status = 422


TREE: dict[str, type[PatchclampError]] = {
    kind.__name__: kind
    for kind in (
        PatchclampError, ProgramError, UnknownName, ShapeError, TokensError, NoKey,
        Unlisted, UnsupportedSite, UnsupportedStudy, MissingSource, Gone, NameTaken, CapacityError, TooLarge,
        ModelError, EngineError, SeamMoved, AddressMoved, RunError, NotFinite,
    )
}  # fmt: skip


MAX_WORD = 200  # characters of a word that is compared with known ones, which takes its length squared


def near(word: object, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` when a known word is close, else nothing."""
    if not isinstance(word, str) or len(word) > MAX_WORD:
        return ""
    close = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(repr(c) for c in close)}?)" if close else ""


def unknown(what: str, word: object, known: Iterable[str], path: str | None = None) -> UnknownName:
    """The error for a word that names nothing: what was asked, what is there, what was perhaps meant."""
    known = list(known)
    return UnknownName(f"no {what} {word!r:.200}{near(word, known)}; there are: {', '.join(known)}", path)


def not_finite(site: str) -> NotFinite:
    """The error of a run whose edits at a site overflow: the rows are left as they were."""
    return NotFinite(f"the edits at {site} make numbers that are not finite; they were not written")


def describe_error(error: BaseException) -> str:
    """A foreign error's class and text, and of one without text where it was raised."""
    text, trace = str(error), error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if not text and trace is not None:
        text = f"in {Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}"
    return f"{type(error).__name__}: {text}"


def as_patchclamp_error(error: BaseException) -> PatchclampError:
    """Any exception as one of ours; a foreign one becomes a `RunError` that names it and has it as its cause."""
    if isinstance(error, PatchclampError):
        return error
    run_error = RunError(describe_error(error))
    run_error.__cause__ = error
    return run_error


Packed = tuple[str, str, str | None]  # an error as plain data: its class, message and path


def pack(error: Exception) -> Packed:
    """An error as plain data, to cross a process."""
    if isinstance(error, PatchclampError):
        return type(error).__name__, error.message, error.path
    return "RunError", describe_error(error), None


def unpack(packed: Packed) -> PatchclampError:
    """The error that `pack` packed; a class this version does not know comes back as `RunError`."""
    name, message, path = packed
    return TREE.get(name, RunError)(message, path)
