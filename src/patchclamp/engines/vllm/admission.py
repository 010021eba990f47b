"""Admission in the engine core: allocates slots, records and bank space, and places each program before its request is
scheduled.

A request whose program does not fit alongside the running programs waits, first come first served (or by priority);
requests without programs overtake it. The workers' tasks, `Orders`, are sent with the scheduler's output, without
another round trip. A program's `Verdict`, its receipt or error, is returned with the request's outputs.

`LastWords` stores notes that an engine core's front ends exchange.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
import numpy as np
import safetensors.numpy

from patchclamp.engines.base import ABORTED, decode
from patchclamp.errors import CapacityError, EngineError, MissingSource, Packed, PatchclampError, ProgramError, pack
from patchclamp.plan import CAPTURE
from patchclamp.plan.bound import (
    BoundProgram,
    PositionRange,
    checked_ranges,
    is_loaded,
    is_vector,
    lowest_capture,
    lowest_edit,
    position_array,
    source_of,
)
from patchclamp.plan.room import Placement, Room, resident_sizes
from patchclamp.plan.table import record_count
from patchclamp.sites import SiteMap

MAX_WORDS = 1 << 16  # stored entries; the oldest are dropped first


class LastWords:
    """The latest bytes stored under each key, with sequence numbers."""

    def __init__(self) -> None:
        self._said: OrderedDict[str, tuple[int, bytes]] = OrderedDict()  # ascending by number
        self._number = 0

    def say(self, key: str, word: bytes) -> None:
        """Store bytes under a key, replacing earlier ones."""
        self._number += 1
        self._said[key] = self._number, word
        self._said.move_to_end(key)
        if len(self._said) > MAX_WORDS:
            self._said.popitem(last=False)

    def since(self, number: int) -> tuple[int, list[bytes]]:
        """Return the latest sequence number, and the entries stored after `number`, in order."""
        news: list[bytes] = []
        for said, word in reversed(self._said.values()):
            if said <= number:
                break
            news.append(word)
        return self._number, news[::-1]


class InstallOrder(msgspec.Struct):
    """A program for the workers to install.

    program: the encoded program; its receipt is computed from these bytes
    checked: the positions whose labels are checked (`SelfCheck`)
    """

    request: str
    program: bytes
    placement: Placement
    checked: tuple[PositionRange, ...] = ()


class BlockPool(Protocol):
    """The cache's free blocks."""

    @property
    def free(self) -> int: ...

    def take(self, count: int) -> list[int]: ...

    def give(self, blocks: list[int]) -> None: ...


class Lease(msgspec.Struct, array_like=True):
    """Resources leased to a job's cells: cache blocks, slots and records of the program table, and bank rows."""

    blocks: list[int]
    slots: list[int]
    records: int
    placement: Placement


class Orders(msgspec.Struct):
    """The workers' tasks before a step: free ended requests, release runs, then install programs. `vectors`: inline
    vectors' rows that are not in the bank yet."""

    release: list[str]
    admit: list[InstallOrder]
    vectors: dict[str, np.ndarray]


class Verdict(msgspec.Struct):
    """The result of a request's program, returned with its outputs: the installed program's receipt ("" if none was
    installed), the run's error, the seconds until admission (None if not admitted), and True if its labels were
    checked."""

    receipt: str
    error: Packed | None
    waited_s: float | None = None
    checked: bool = False


class SelfCheck(msgspec.Struct):
    """Tokens of a request, which the workers use to check the labels of its captures.

    Rows at `embed` are captured along with the request's own captures, through the same labels, buffers and positions.
    They must equal the embedding matrix's rows for the tokens at these positions.

    positions, ids: tokens since the last check, [N]; a request that may end at a stop string is checked repeatedly
    is_first: True for the first check
    """

    request: str
    positions: np.ndarray
    ids: np.ndarray
    is_first: bool


class RequestProgram:
    """A request's program in the core."""

    asked: int
    bound: BoundProgram
    carried: bytes
    proved: int
    sizes: dict[str, tuple[int, int]]

    __slots__ = (
        "arrived_s", "asked", "bound", "carried", "checked", "images", "is_released", "placement", "proved",
        "seen_whole", "sizes", "uncaptured", "unchecked", "unedited", "waited_s",
    )  # fmt: skip

    def __init__(self, admission: Admission, carried: bytes, images: tuple[tuple[int, int], ...] = ()) -> None:
        """Decode a program. `images`: the (begin, end) span of each image in the prompt."""
        decoded = decode(carried)
        self.images = images
        self.checked: tuple[PositionRange, ...] = ()  # positions of a self-check
        self.unchecked: int = 0  # the first position that was not checked yet
        self.seen_whole: tuple[tuple[int, int], ...] | tuple[()] = images if admission.images_see_ahead else ()
        self.carried, self.sizes, self.bound = carried, decoded.sizes, decoded.bound
        lowest = lowest_edit(self.bound, self.seen_whole)
        self.unedited: int = sys.maxsize if lowest is None else lowest  # the number of tokens before the first edit
        self.uncaptured: int | None = lowest_capture(self.bound, self.seen_whole)  # tokens before the first capture
        self.forget_proof()
        self.placement: Placement | None = None
        self.is_released: bool = False  # its run was released before its request ended
        self.arrived_s: float = 0.0
        self.waited_s: float | None = None  # from arrival to admission

    def self_check(self, request: Any) -> SelfCheck:
        """Return the tokens computed since the last call. The request's last token was sampled, not computed."""
        ids = np.array(request.all_token_ids[:-1], np.int64)
        positions = position_array(self.checked)
        positions = positions[(positions >= self.unchecked) & (positions < len(ids))]
        is_first, self.unchecked = self.unchecked == 0, len(ids)
        return SelfCheck(request.request_id, positions, ids[positions], is_first)

    def forget_proof(self) -> None:
        """Discard the proof of edited tokens, which will be recomputed.

        proved: the number of tokens whose keys and values may enter the prefix cache. From the first edit onward, the
            workers must first confirm that the run has had no errors.
        asked: the number of tokens covered by the last request for confirmation
        """
        self.proved, self.asked = self.unedited, 0


class _SharedVector(msgspec.Struct):
    """An inline vector [n, W], and its reference count."""

    rows: np.ndarray
    holders: int = 0


class Admission:
    """The programs and resources of an engine core. `workers`: the number of workers. `images_see_ahead`: True if image
    tokens attend to later tokens of the same image. `check_rate`: check the labels of every N-th request with
    captures; 0: never."""

    images_see_ahead: bool
    updates: Callable[[], int]  # counts the calls that may have changed the model's weights in place; set by the core

    def __init__(
        self, sites: SiteMap, room: Room, workers: int, images_see_ahead: bool = False, check_rate: int = 0
    ) -> None:
        self._sites, self._room, self._workers, self.images_see_ahead = sites, room, workers, images_see_ahead
        self._check_rate, self._checkable = check_rate, 0  # requests with captures so far
        self.programs: dict[str, RequestProgram] = {}  # of unfinished requests, admitted or waiting
        self._queue: list[tuple[tuple[float, ...], int, Any]] = []  # a heap of requests; some have ended
        self._waiting: dict[str, Any] = {}  # queued requests by id
        self._blocked: Any = None  # the head of the queue, if it had no room and none was freed since
        self._order = itertools.count()
        self._vectors: dict[str, _SharedVector] = {}
        self._runs: dict[str, set[str]] = {}  # by run: bank keys of its rows
        self._capturing: set[str] = set()  # runs with captures that are not released yet
        self._under_way: dict[str, RequestProgram] = {}  # by run: programs with captures of unfinished requests
        self._sessions: dict[str, float] = {}  # of remote clients: the time of each one's last heartbeat
        self._orders = Orders([], [], {})
        self.pool: BlockPool | None = None  # of the core's cache
        self._leases: dict[str, Lease] = {}
        self.errors: dict[str, Packed] = {}  # of requests that cannot be admitted
        self._words = LastWords()

    # -- calls of front ends

    def say(self, key: str, word: bytes) -> None:
        """Store a note for the other front ends."""
        self._words.say(key, word)

    def said_since(self, number: int) -> tuple[int, list[bytes]]:
        """Return the latest sequence number, and the notes stored after `number`."""
        return self._words.since(number)

    def hold(self, vectors: bytes, keys: list[str], drop: list[str]) -> None:
        """Store inline vectors [n, W] (as safetensors). Add a reference to each vector in `keys`; drop one from each in
        `drop`, and delete vectors without references."""
        rows = safetensors.numpy.load(vectors) if vectors else {}
        for key in keys:
            if key not in self._vectors and key in rows:  # otherwise its readers get `MissingSource`
                self._vectors[key] = _SharedVector(rows[key])
            if key in self._vectors:
                self._vectors[key].holders += 1
        for key in drop:
            vector = self._vectors.get(key)
            if vector is not None:
                vector.holders -= 1
                if not vector.holders:
                    del self._vectors[key]

    def release(self, runs: list[str]) -> None:
        """Free runs' captures and bank rows. If a run is unfinished, its later captures are freed when it ends."""
        self._orders.release.extend(runs)
        for run in runs:
            if run in self._under_way:
                self._under_way[run].is_released = True
        self._capturing.difference_update(runs)
        for run in runs:
            if keys := self._runs.pop(run, None):
                self._room.forget(keys)
                self._blocked = None

    def renew(self, session: str, ago_s: float = 0.0, extend: bool = False) -> None:
        """Renew the lease of the client with runs named `session-…`, as of `ago_s` seconds ago. `extend`: keep a lease
        that ends later."""
        heard_s = time.monotonic() - ago_s
        self._sessions[session] = max(heard_s, self._sessions.get(session, heard_s)) if extend else heard_s

    def free_dead(self, lease_s: float) -> None:
        """Free the captures of clients whose last heartbeat is more than `lease_s` seconds old."""
        oldest = time.monotonic() - lease_s
        for session in [session for session, heard_s in self._sessions.items() if heard_s < oldest]:
            del self._sessions[session]
            self.release([run for run in self._capturing if run.startswith(f"{session}-")])

    def abort(self, runs: list[str]) -> None:
        """End runs' requests with an error that says they were aborted."""
        for request, program in self.programs.items():
            if program.bound.run in runs:
                self.errors[request] = pack(EngineError(ABORTED))

    @property
    def has_orders(self) -> bool:
        """True if there are tasks for the workers. They require a step even if no request is scheduled."""
        return bool(self._orders.release or self._orders.admit)

    def take_orders(self) -> Orders | None:
        """Take and return the workers' tasks for the next step; None without tasks."""
        if not self.has_orders:
            return None
        orders, self._orders = self._orders, Orders([], [], {})
        return orders

    # -- leases

    def lease(
        self, name: str, blocks: tuple[int, int], slots: tuple[int, int], records: tuple[int, int],
        sizes: dict[str, Any],
    ) -> bytes | None:  # fmt: skip
        """Lease resources to a job's cells: cache blocks, slots and records (each given as minimum and maximum), and
        bank rows (`sizes` by key). Returns the encoded `Lease`, or None if there is no room."""
        assert self.pool is not None
        assert name not in self._leases
        count = min(blocks[1], self.pool.free // 2)  # requests need the rest
        if count < blocks[0]:
            return None
        given = {key: (rows, width) for key, (rows, width) in sizes.items()}  # lists, as they arrive
        rooms = self._room.lease((slots[0], slots[1]), (records[0], records[1]), given)
        if rooms is None:
            return None
        placement, taken, number = rooms
        lease = Lease(self.pool.take(count), taken, number, self._loading(placement))
        self._leases[name] = lease
        return msgspec.msgpack.encode(lease)

    def give(self, name: str) -> None:
        """Free a lease's resources."""
        lease = self._leases.pop(name, None)
        if lease is not None:
            assert self.pool is not None
            self.pool.give(lease.blocks)
            self._room.end_lease(lease.placement, lease.slots)
            self._blocked = None

    # -- requests

    @property
    def unscheduled(self) -> int:
        """The number of requests not yet in the scheduler: waiting for room, or about to end with an error."""
        return len(self._waiting) + len(self.errors)

    def arrive(self, request: Any, program: RequestProgram, priority: tuple[float, ...]) -> bool:
        """Return True if a program was admitted; otherwise queue it (lower `priority` first) or record its error."""
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
        if self._check_rate and _is_checkable(request, program):
            self._checkable += 1
            ranges = () if self._checkable % self._check_rate else checked_ranges(program.bound, program.images)
            if record_count(program.bound.ops) + len(ranges) <= self._room.records:  # else it would never fit
                program.checked = ranges
        if not self._waiting and self._admit(request.request_id, program):
            return True
        if request.request_id not in self.errors:
            self._waiting[request.request_id] = request
            heapq.heappush(self._queue, (priority, next(self._order), request))
        return False

    def _check(self, program: RequestProgram) -> None:
        """Raise `ProgramError` for an invalid program, or for captures under a run name already in use. With `n` > 1, a
        prompt's choices share one program and so one run name."""
        bound, points = program.bound, self._sites.points
        for op in bound.ops:
            if op.points and not 0 <= min(op.points) <= max(op.points) < len(points):
                raise ProgramError(f"points are out of range for this model: {list(op.points)}", op.path)
            if op.ranges and (op.ranges[0].start < 0 or any(each.stop < each.start for each in op.ranges)):
                raise ProgramError("positions are out of range", op.path)
        for key, (rows, width) in program.sizes.items():
            source = source_of(key)
            if source is not None and not 0 <= source[1] < len(points):
                raise ProgramError(f"source point {source[1]} is out of range for this model")
            whole = source is None or width == points[source[1]].width
            if rows < 0 or width < 1 or not whole:
                raise ProgramError(f"invalid source size: {rows} rows of {width} numbers")
            if key in self._vectors and self._vectors[key].rows.shape != (rows, width):
                raise ProgramError(f"vector {key[2:14]}: expected shape {(rows, width)}, as the program declares")
        if any(op.kind == CAPTURE for op in bound.ops):
            if bound.run in self._capturing:
                raise ProgramError(
                    f"run {bound.run} is already captured by another request: use a separate program for each run of a "
                    "prompt"
                )
            self._capturing.add(bound.run)
            self._under_way[bound.run] = program

    def admit_waiting(self) -> Iterator[Any]:
        """Admit waiting requests, in order, while there is room."""
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
        """End a request with an error, before it has run."""
        if program is not None:
            self.programs[request.request_id] = program
        self.errors[request.request_id] = pack(error)

    def end(self, request_id: str) -> None:
        """Free the resources of a request's program when the request has finished or was aborted."""
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

    def counts(self) -> dict[str, int]:
        """Return resource counts; all are 0 when every request has ended and every run was released."""
        return {**self._room.counts(), "waiting": len(self._waiting), "vectors": len(self._vectors),
                "requests": len(self.programs), "leases": len(self._leases)}  # fmt: skip

    def _admit(self, request_id: str, program: RequestProgram) -> bool:
        """Allocate space for a program. Return False if there is no room, or on an error, which is recorded."""
        try:
            sizes = resident_sizes(program.bound, program.sizes, self._sites)
            missing = next((key for key in program.sizes if is_vector(key) and key not in self._vectors), None)
            if missing is not None:
                raise MissingSource(f"vector {missing[2:14]} is not available")
            placement = self._room.place(record_count(program.bound.ops) + len(program.checked), sizes)
        except (CapacityError, MissingSource) as error:
            self.errors[request_id] = pack(error)
            return False
        except Exception as error:  # the program is malformed
            self.errors[request_id] = pack(EngineError(f"the program cannot be admitted: {error!r}"))
            return False
        if placement is None:
            return False
        placement = self._loading(placement)
        program.placement, program.waited_s = placement, time.monotonic() - program.arrived_s
        self._orders.admit.append(InstallOrder(request_id, program.carried, placement, program.checked))
        keys = [name.removesuffix("#") for name in placement.load]
        self._orders.vectors |= {key: self._vectors[key].rows for key in keys if is_vector(key)}
        return True

    def _loading(self, placement: Placement) -> Placement:
        """Extend a placement's `load` to all rows that a worker may lack, and record their source runs."""
        # a worker's bank has only rows that earlier programs read there, and a lease's rows may be loaded a step later
        if self._workers > 1 or self._leases:
            placement = msgspec.structs.replace(placement, load=tuple(filter(is_loaded, placement.addresses)))
        for name in placement.load:
            if (source := source_of(name)) is not None:
                self._runs.setdefault(source[0], set()).add(name)
        return placement


def _is_checkable(request: Any, program: RequestProgram) -> bool:
    """True if a request has captures, and the rows at `embed` are known to be rows of the embedding matrix: the request
    has no adapter, and its prompt was not given as embeddings."""
    captures = any(op.kind == CAPTURE for op in program.bound.ops)
    return captures and request.lora_request is None and request.prompt_embeds is None
