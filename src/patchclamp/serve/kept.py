"""What requests leave on a server: captured runs, and vectors and programs by name, each its owner's alone."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from patchclamp.errors import CapacityError, MissingSource, ProgramError
from patchclamp.run import Run
from patchclamp.store.named import NamedBank

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class KeepLimits(msgspec.Struct, frozen=True):
    """run_ttl_s: seconds after which a run that nobody asks for is dropped
    run_bytes: captures that one owner keeps at most
    owner_names: vectors and programs of one owner at most
    """

    run_ttl_s: float = 600.0
    run_bytes: int = 1 << 32
    owner_names: int = 1024


class Gone(MissingSource):
    """What was here and is no more: `status` 410."""

    status = 410


class _KeptRun(msgspec.Struct):
    run: Run
    touched_s: float


class Owned(Mapping[str, Any]):
    """What one owner may name in a program: its bank and its runs."""

    def __init__(self, bank: NamedBank, runs: Mapping[str, Run]) -> None:
        self.bank, self._runs = bank, runs

    def __getitem__(self, name: str) -> Any:
        return self._runs[name] if name in self._runs else self.bank[name]

    def __contains__(self, name: object) -> bool:
        return name in self._runs or name in self.bank

    def __iter__(self) -> Iterator[str]:
        return iter({*self._runs, *self.bank})

    def __len__(self) -> int:
        return len({*self._runs, *self.bank})

    def source(self, key: str) -> Run:
        """The run of that key, or of that name."""
        for name, run in self._runs.items():
            if key in (name, run.key):
                return run
        raise MissingSource(f"there is no run {key}; there are: {', '.join(self._runs) or 'none'}")


class Kept:
    """By owner: runs and a bank. Used on the event loop's thread alone."""

    def __init__(self, limits: KeepLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits or KeepLimits(), clock
        self._runs: dict[str, dict[str, _KeptRun]] = {}
        self._banks: dict[str, NamedBank] = {}
        self._gone: dict[tuple[str, str], str] = {}  # why a run is no more

    def bank(self, owner: str) -> NamedBank:
        return self._banks.setdefault(owner, NamedBank())

    def owned(self, owner: str) -> Owned:
        """What programs of an owner may name."""
        self.drop_old()
        return Owned(self.bank(owner), {name: kept.run for name, kept in self._runs.get(owner, {}).items()})

    def keep(self, owner: str, name: str, run: Run) -> None:
        """Keeps a run under a name. Raises `CapacityError` where the owner's captures leave no room."""
        self.drop_old()
        runs = self._runs.setdefault(owner, {})
        used = sum(kept.run.captured_bytes for key, kept in runs.items() if key != name)
        if used + run.captured_bytes > self.limits.run_bytes:
            raise CapacityError(
                f"the captures of run {name} need {run.captured_bytes} bytes, and {used} of {self.limits.run_bytes} "
                "are taken: delete runs that are read, or capture less",
                "run",
            )
        if name in runs:
            self._close(owner, name, "another run took its name")
        runs[name] = _KeptRun(run, self._clock())
        self._gone.pop((owner, name), None)

    def run(self, owner: str, name: str) -> Run:
        """A run. Raises `Gone` for one that was dropped and `MissingSource` for one that never was."""
        self.drop_old()
        kept = self._runs.get(owner, {}).get(name)
        if kept is not None:
            kept.touched_s = self._clock()
            return kept.run
        if (owner, name) in self._gone:
            raise Gone(f"run {name} is no more: {self._gone[owner, name]}")
        raise MissingSource(f"there is no run {name}")

    def runs(self, owner: str) -> dict[str, Run]:
        self.drop_old()
        return {name: kept.run for name, kept in self._runs.get(owner, {}).items()}

    def drop(self, owner: str, name: str) -> None:
        """Frees a run's captures."""
        self.run(owner, name)
        self._close(owner, name, "it was deleted")

    def drop_old(self) -> None:
        """Frees runs that nobody has asked for in `run_ttl_s`."""
        oldest = self._clock() - self.limits.run_ttl_s
        for owner, runs in self._runs.items():
            for name in [name for name, kept in runs.items() if kept.touched_s < oldest]:
                self._close(owner, name, f"nobody asked for it in {self.limits.run_ttl_s:g} seconds")

    def _close(self, owner: str, name: str, why: str) -> None:
        self._runs[owner].pop(name).run.close()
        self._gone[owner, name] = why
        while len(self._gone) > 4096:
            del self._gone[next(iter(self._gone))]


def check_name(name: str, path: str) -> str:
    """A name of a run, a vector or a program. Raises `ProgramError` for what is none."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ProgramError(f"a name has up to 64 letters, digits, '_', '-' and '.', not {name!r}", path)
    return name
