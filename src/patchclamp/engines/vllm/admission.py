"""Admission in the engine core: it keeps the books of slots, records and the bank, and gives each program its placement
before its request is scheduled.

A request whose program has no room beside those that run waits here, first come first served (or by priority), and
requests without programs pass it. What workers must do for it, `Orders`, travels with the scheduler's own output, so
that nothing waits for a round trip. What a program came to, its receipt and its error, travels back with the request's
outputs.

What front ends of one engine core leave for each other: the last word on each key, in the order it was said.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from patchclamp.engines.base import ABORTED, decode
from patchclamp.errors import CapacityError, EngineError, MissingSource, Packed, PatchclampError, ProgramError, pack
from patchclamp.plan import APPLY, CAPTURE
from patchclamp.plan.bound import is_loaded, is_vector, lowest_edit, source_of
from patchclamp.plan.room import Placement, Room, resident_sizes
from patchclamp.plan.table import record_count
from patchclamp.sites import SiteMap

MAX_WORDS = 1 << 16  # those said longest ago go first


class LastWords:
    """Bytes by key, each with the number of when it was said."""

    def __init__(self) -> None:
        self._said: OrderedDict[str, tuple[int, bytes]] = OrderedDict()  # ascending by number
        self._number = 0

    def say(self, key: str, word: bytes) -> None:
        """The last word on a key."""
        self._number += 1
        self._said[key] = self._number, word
        self._said.move_to_end(key)
        if len(self._said) > MAX_WORDS:
            self._said.popitem(last=False)

    def since(self, number: int) -> tuple[int, list[bytes]]:
        """What was said after a number, in order, and the number to ask with next."""
        news: list[bytes] = []
        for said, word in reversed(self._said.values()):
            if said <= number:
                break
            news.append(word)
        return self._number, news[::-1]


class Admitted(msgspec.Struct):
    """One program for the workers to install. `program`: as it was carried; they make its receipt from that."""

    request: str
    program: bytes
    placement: Placement


class Orders(msgspec.Struct):
    """What workers do before a step, after they have freed what ended: release runs and install programs. `vectors` are
    the rows of inline vectors that are not in the bank yet."""

    release: list[str]
    admit: list[Admitted]
    vectors: dict[str, np.ndarray]


class Verdict(msgspec.Struct):
    """What workers found of a request's program, told with its outputs: the receipt of what was installed ("": nothing
    was), and the run's error; and how long it waited to be admitted (None: it was not)."""

    receipt: str
    error: Packed | None
    waited_s: float | None = None


class RequestProgram:
    """A request's program in the core."""

    __slots__ = (
        "arrived_s", "asked", "bound", "carried", "is_released", "placement", "proved", "seen_whole", "sizes",
        "unedited", "waited_s",
    )  # fmt: skip

    def __init__(self, admission: Admission, carried: bytes, images: tuple[tuple[int, int], ...] = ()) -> None:
        """`images`: where the prompt's images lie."""
        decoded = decode(carried)
        self.seen_whole = images if admission.images_see_ahead else ()
        self.carried, self.sizes, self.bound = carried, decoded.sizes, decoded.bound
        lowest = lowest_edit(self.bound, self.seen_whole)
        self.unedited = sys.maxsize if lowest is None else lowest  # the number of tokens before the first edit
        self.forget_proof()
        self.placement: Placement | None = None
        self.is_released = False  # its caller has let go of it, though it is not at its end
        self.arrived_s = 0.0
        self.waited_s: float | None = None  # until it was admitted

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has that it is bound to."""
        return self.bound.prompt

    @property
    def has_code(self) -> bool:
        """Whether it has ops that run Python."""
        return any(op.kind == APPLY for op in self.bound.ops)

    def forget_proof(self) -> None:
        """Drop the proof of the edited tokens, because they will be computed again.

        proved: the number of tokens whose keys and values may enter the prefix cache. Those from the first edit on may
            once the workers have confirmed that the run is free of errors up to there.
        asked: the number of tokens that the workers were last asked about
        """
        self.proved, self.asked = self.unedited, 0


class _Vector(msgspec.Struct):
    rows: np.ndarray
    holders: int = 0


class Admission:
    """The books of one engine core, for a model of `sites` on `workers` workers. `images_see_ahead`: whether an image's
    tokens attend to those that come after them in it."""

    def __init__(self, sites: SiteMap, room: Room, workers: int, images_see_ahead: bool = False) -> None:
        self._sites, self._room, self._workers, self.images_see_ahead = sites, room, workers, images_see_ahead
        self.programs: dict[str, RequestProgram] = {}  # of unfinished requests, admitted or waiting
        self._queue: list[tuple[tuple[float, ...], int, Any]] = []  # a heap of requests, some of which left
        self._waiting: dict[str, Any] = {}  # requests that wait
        self._blocked: Any = None  # the first of the queue, if it had no room and none was freed since
        self._order = itertools.count()
        self._vectors: dict[str, _Vector] = {}
        self._runs: dict[str, set[str]] = {}  # by run: bank keys of its rows
        self._capturing: set[str] = set()  # runs that were asked for captures and not released yet
        self._under_way: dict[str, RequestProgram] = {}  # by run: programs with captures of unfinished requests
        self._sessions: dict[str, float] = {}  # of clients elsewhere: when each was last heard of
        self._orders = Orders([], [], {})
        self.errors: dict[str, Packed] = {}  # of requests that cannot be admitted

    # -- vectors and runs, from front ends

    def hold_vectors(self, vectors: Mapping[str, np.ndarray], keys: list[str], drop: list[str]) -> None:
        """Keeps inline vectors [n, W], each for one more holder every time `keys` names it, and one less every time
        `drop` does."""
        for key in keys:
            if key not in self._vectors and key in vectors:  # else whoever reads it is told that it is missing
                self._vectors[key] = _Vector(vectors[key])
            if key in self._vectors:
                self._vectors[key].holders += 1
        for key in drop:
            vector = self._vectors.get(key)
            if vector is not None:
                vector.holders -= 1
                if not vector.holders:
                    del self._vectors[key]

    def release(self, runs: list[str]) -> None:
        """Frees runs' captures, and their rows in the bank. What a run that is still under way captures from now on is
        freed when it ends."""
        self._orders.release.extend(runs)
        for run in runs:
            if run in self._under_way:
                self._under_way[run].is_released = True
        self._capturing.difference_update(runs)
        for run in runs:
            if keys := self._runs.pop(run, None):
                self._room.forget(keys)
                self._blocked = None

    def renew(self, session: str, ago_s: float = 0.0) -> None:
        """A client was alive so long ago whose runs are named `session-…`."""
        self._sessions[session] = time.monotonic() - ago_s

    def free_dead(self, lease_s: float) -> None:
        """Frees the captures of clients that have not been heard of for so long."""
        oldest = time.monotonic() - lease_s
        for session in [session for session, heard_s in self._sessions.items() if heard_s < oldest]:
            del self._sessions[session]
            self.release([run for run in self._capturing if run.startswith(f"{session}-")])

    def abort(self, runs: list[str]) -> None:
        """Ends requests of runs, with that error."""
        for request, program in self.programs.items():
            if program.bound.run in runs:
                self.errors[request] = pack(EngineError(ABORTED))

    @property
    def has_orders(self) -> bool:
        """Whether workers have something to do even if nothing is scheduled."""
        return bool(self._orders.release or self._orders.admit)

    def take_orders(self) -> Orders | None:
        """What workers are to do before the next step, if anything."""
        if not self.has_orders:
            return None
        orders, self._orders = self._orders, Orders([], [], {})
        return orders

    # -- requests

    @property
    def unscheduled(self) -> int:
        """Requests that the scheduler does not have yet: waiting for room, or about to end with an error."""
        return len(self._waiting) + len(self.errors)

    def arrive(self, request: Any, program: RequestProgram, priority: tuple[float, ...]) -> bool:
        """Admits a request's program if there is room; else it waits (lower `priority` first), or gets an error."""
        self.programs[request.request_id] = program
        program.arrived_s = time.monotonic()
        try:
            self._check(program)
        except PatchclampError as error:
            self.errors[request.request_id] = pack(error)
            return False
        except Exception as error:
            self.errors[request.request_id] = pack(ProgramError(f"the program cannot be read: {error!r}"))
            return False
        if not self._waiting and self._admit(request.request_id, program):
            return True
        if request.request_id not in self.errors:
            self._waiting[request.request_id] = request
            heapq.heappush(self._queue, (priority, next(self._order), request))
        return False

    def _check(self, program: RequestProgram) -> None:
        """Raises `ProgramError` for a program that would be installed wrongly, or that captures under a run's name that
        another request captures under: children of one prompt (`n`) have one program."""
        bound, points = program.bound, self._sites.points
        for op in bound.ops:
            if op.points and not 0 <= min(op.points) <= max(op.points) < len(points):
                raise ProgramError(f"it acts at points that this model does not have: {list(op.points)}", op.path)
            if op.ranges and (op.ranges[0].start < 0 or any(each.stop < each.start for each in op.ranges)):
                raise ProgramError("its positions are no positions", op.path)
        for key, (rows, width) in program.sizes.items():
            source = source_of(key)
            if source is not None and not 0 <= source[1] < len(points):
                raise ProgramError(f"it reads a point that this model does not have: {source[1]}")
            whole = source is None or width == points[source[1]].width
            if rows < 0 or width < 1 or not whole:
                raise ProgramError(f"it reads rows of no possible size: {rows} of {width} numbers")
            if key in self._vectors and self._vectors[key].rows.shape != (rows, width):
                raise ProgramError(f"vector {key[2:14]} is not of the size that the program says")
        if any(op.kind == CAPTURE for op in bound.ops):
            if bound.run in self._capturing:
                raise ProgramError(
                    f"run {bound.run} is captured by another request already, and their rows could not be told apart: "
                    "each of several runs of a prompt needs a program of its own"
                )
            self._capturing.add(bound.run)
            self._under_way[bound.run] = program

    def admit_waiting(self) -> Iterator[Any]:
        """Admits requests that have waited, in order, as far as there is room."""
        while self._queue:
            request = self._queue[0][2]
            name = request.request_id
            if self._waiting.get(name) is request:
                if request is self._blocked:
                    return
                is_admitted = self._admit(name, self.programs[name])
                if not is_admitted and name not in self.errors:
                    self._blocked = request
                    return
                del self._waiting[name]
                heapq.heappop(self._queue)
                if is_admitted:
                    yield request
            else:
                heapq.heappop(self._queue)

    def refuse(self, request: Any, program: RequestProgram | None, error: PatchclampError) -> None:
        """A request ends with an error before it runs."""
        if program is not None:
            self.programs[request.request_id] = program
        self.errors[request.request_id] = pack(error)

    def end(self, request_id: str) -> None:
        """A request is finished or aborted: what its program held is free."""
        self.errors.pop(request_id, None)
        if self._waiting.pop(request_id, None) is not None and len(self._queue) > 2 * len(self._waiting) + 16:
            self._queue = [entry for entry in self._queue if self._waiting.get(entry[2].request_id) is entry[2]]
            heapq.heapify(self._queue)
        program = self.programs.pop(request_id, None)
        if program is None:
            return
        if self._under_way.get(program.bound.run) is program:
            del self._under_way[program.bound.run]
        if program.is_released:
            self._orders.release.append(program.bound.run)
        if program.placement is not None:
            self._room.free(program.placement)
            program.placement = self._blocked = None

    def judge(self, program: RequestProgram, verdict: Verdict) -> Verdict:
        """A verdict of the workers, with what the core alone knows."""
        return msgspec.structs.replace(verdict, waited_s=program.waited_s)

    def counts(self) -> dict[str, int]:
        """What is held; all 0 when every request has ended and every run was released."""
        return {**self._room.counts(), "waiting": len(self._waiting), "vectors": len(self._vectors),
                "requests": len(self.programs)}  # fmt: skip

    def _admit(self, request_id: str, program: RequestProgram) -> bool:
        """Whether there is room for a program, which it then has."""
        try:
            sizes = resident_sizes(program.bound, program.sizes, self._sites)
            missing = next((key for key in program.sizes if is_vector(key) and key not in self._vectors), None)
            if missing is not None:
                raise MissingSource(f"vector {missing[2:14]} is not here")
            placement = self._room.place(record_count(program.bound.ops), sizes)
        except (CapacityError, MissingSource) as error:
            self.errors[request_id] = pack(error)
            return False
        except Exception as error:  # of a program that is not well-formed
            self.errors[request_id] = pack(EngineError(f"the program cannot be admitted: {error!r}"))
            return False
        if placement is None:
            return False
        if self._workers > 1:  # each has other parts of the programs before: what one has not read lies with another
            placement = msgspec.structs.replace(placement, load=tuple(filter(is_loaded, placement.addresses)))
        program.placement, program.waited_s = placement, time.monotonic() - program.arrived_s
        self._order_admission(request_id, program, placement)
        return True

    def _order_admission(self, request_id: str, program: RequestProgram, placement: Placement) -> None:
        self._orders.admit.append(Admitted(request_id, program.carried, placement))
        for name in placement.load:
            key = name.removesuffix("#")
            source = source_of(key)
            if source is None:
                self._orders.vectors[key] = self._vectors[key].rows
            else:
                self._runs.setdefault(source[0], set()).add(name)
