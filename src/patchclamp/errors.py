"""The tree of all errors that patchclamp raises.

    PatchclampError
    ├── ProgramError        400  invalid program or argument
    │   ├── UnknownName     400  unknown site, field, option or metric
    │   ├── ShapeError      400  a vector whose shape does not match the site or the selection
    │   └── TokensError     400  a selection or token ids that are invalid for this prompt
    ├── NoKey               401  no API key was given to a server that requires one
    ├── Unlisted            403  a list that servers without API keys do not return
    ├── UnsupportedSite     422  a known site that this model, engine or position lacks
    ├── UnsupportedStudy    422  a study that a server or an engine does not run
    ├── MissingSource       404  a run or vector that does not exist
    │   └── Gone            410  a resource that was deleted or expired
    ├── NameTaken           409  a name in use, or a file that a study is writing
    ├── CapacityError       429  a table is full; the message names the option that enlarges it
    │   └── TooLarge        413  a request above the limits of a single request
    ├── ModelError          422  the model cannot be loaded, or its layers were not found
    ├── EngineError         500  the engine could not start or has stopped
    │   ├── SeamMoved       500  this vLLM lacks, or has changed, a function that patchclamp wraps
    │   └── AddressMoved    500  a CUDA graph would read memory that the step did not fill
    └── RunError            500  a request failed while it ran
        ├── NotFinite       422  values overflow because of the program: its edits, or its float16 captures
        └── Mislabelled     500  a self-check found captured rows with the labels of other tokens

The number is the HTTP status of a server's response. `path` points into the program: `edits[2].at`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class PatchclampError(Exception):
    """Base class of all errors. `path`: the location in the program that caused it; `status`: its HTTP status."""

    status = 500

    def __init__(self, message: str, path: str | None = None) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.message = message
        self.path = path

    def under(self, path: str) -> PatchclampError:
        """Return the same error with a prefixed path: `at` under `edits[2]` is `edits[2].at`."""
        inner = self.path or ""
        joined = path + ("" if not inner or inner.startswith("[") else ".") + inner
        return type(self)(self.message, joined)

    def __reduce__(self) -> tuple[type[PatchclampError], tuple[str, str | None]]:
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


class Mislabelled(RunError):
    pass


TREE: dict[str, type[PatchclampError]] = {
    kind.__name__: kind
    for kind in (
        PatchclampError, ProgramError, UnknownName, ShapeError, TokensError, NoKey,
        Unlisted, UnsupportedSite, UnsupportedStudy, MissingSource, Gone, NameTaken, CapacityError, TooLarge,
        ModelError, EngineError, SeamMoved, AddressMoved, RunError, NotFinite,
        Mislabelled,
    )
}  # fmt: skip


MAX_WORD = 200  # characters of the longest name to suggest replacements for: comparing takes quadratic time


def near(word: object, known: Iterable[str]) -> str:
    """Return the text ` (did you mean 'x'?)` if `known` has a similar name, else ""."""
    if not isinstance(word, str) or len(word) > MAX_WORD:
        return ""
    close = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(repr(c) for c in close)}?)" if close else ""


def unknown(what: str, word: object, known: Iterable[str], path: str | None = None) -> UnknownName:
    """Return the error for an unknown name, with close matches and all known names."""
    known = list(known)
    listed = ", ".join(known) or "none"
    return UnknownName(f"unknown {what} {word!r:.200}{near(word, known)}; available: {listed}", path)


def not_finite(site: str) -> NotFinite:
    """Return the error for a run whose edits at a site produce non-finite values. The rows were left unedited."""
    return NotFinite(f"the edits at {site} produce values that are not finite; they were not written")


def describe_error(error: BaseException) -> str:
    """Describe an exception by its class and message or, if it has no message, by the line that raised it."""
    text, trace = str(error), error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if not text and trace is not None:
        text = f"in {Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}"
    return f"{type(error).__name__}: {text}"


def as_patchclamp_error(error: BaseException) -> PatchclampError:
    """Return a `PatchclampError` unchanged; wrap any other exception in a `RunError` that describes it."""
    if isinstance(error, PatchclampError):
        return error
    run_error = RunError(describe_error(error))
    run_error.__cause__ = error
    return run_error


Packed = tuple[str, str, str | None]  # an error as plain data: its class, message and path


def pack(error: Exception) -> Packed:
    """Convert an error to plain data, to send it to another process."""
    if isinstance(error, PatchclampError):
        return type(error).__name__, error.message, error.path
    return "RunError", describe_error(error), None


def unpack(packed: Packed) -> PatchclampError:
    """Restore an error from `pack`; an unknown class becomes `RunError`."""
    name, message, path = packed
    return TREE.get(name, RunError)(message, path)
