"""CUDA graphs with taps in them, and copies of them cut down to the taps that the steps at hand need.

A tap that a step does not need still costs its launch (1 to 3 µs on an H200).  A graph that has been replayed a few
times for the same points is therefore cloned, the nodes of all its other taps are taken out, and the copy is replayed
from then on.  Everything else in it is the same nodes, so not a bit differs.  Where the CUDA bindings do not allow
this, the whole graph goes on being replayed.
"""

from __future__ import annotations

import collections
import logging
from typing import Any

import numpy as np
import torch

from patchclamp.kernels import switches

PATIENCE = 12  # replays for the same points before a copy is made: making one costs about as much as it saves in these
MAX_NODES = 1 << 15  # of all copies together
NODE_BYTES = 3600  # device memory that a copy takes a node (1.25 MiB for 368, vLLM 0.32 on an H200)
MAX_COUNTED = 256  # sets of points whose replays a graph counts

logger = logging.getLogger("patchclamp")


class Recorded:
    """What has been recorded: the taps of each graph; and the points that the step at hand needs."""

    def __init__(self) -> None:
        self._taps: dict[int, list[tuple[Any, int]]] = {}
        self._copies: collections.OrderedDict[_Copy, None] = collections.OrderedDict()  # least recently chosen first
        self._gone: list[tuple[torch.cuda.Event, _Copy]] = []
        self.active = np.zeros(0, bool)
        self.key = b""
        self.cut = 0  # copies made

    def use(self, active: np.ndarray) -> None:
        """Points that steps need from now on, bool [P]."""
        self.active, self.key = active, active.tobytes()

    def note(self, point: int) -> None:
        """A tap has just been launched on the current stream: if that is being captured, remembers its node."""
        if not torch.cuda.is_current_stream_capturing() or _runtime() is None:
            return
        try:
            _, _, graph, nodes, *_ = _done("cudaStreamGetCaptureInfo", torch.cuda.current_stream().cuda_stream)
        except Exception as error:
            logger.warning("patchclamp: CUDA graphs are replayed with all their taps: %s", error)
            _bindings[:] = [None]
            return
        self._taps.setdefault(int(graph), []).append((nodes[0], point))

    def tapped(self, graph: torch.cuda.CUDAGraph) -> TappedGraph:
        """A graph recorded with `keep_graph`, ready to be replayed."""
        return TappedGraph(graph, self._taps.pop(int(graph.raw_cuda_graph()), []), self)

    def forget(self) -> None:
        """Lets go of the taps of graphs that came to nothing."""
        self._taps = {}

    def keep(self, copy: _Copy) -> None:
        """Bounds the copies kept: those chosen longest ago go first, once nothing that runs can need them."""
        self._copies[copy] = None
        self.cut += 1
        while sum(kept.nodes for kept in self._copies) > MAX_NODES and len(self._copies) > 1:
            oldest, _ = self._copies.popitem(last=False)
            oldest.owner.drop(oldest)
            event = torch.cuda.Event()
            event.record()
            self._gone.append((event, oldest))
        while self._gone and self._gone[0][0].query():
            self._gone.pop(0)

    def chosen(self, copy: _Copy) -> None:
        self._copies.move_to_end(copy)


class _Copy:
    """An executable graph with only some taps."""

    def __init__(self, owner: TappedGraph, points: frozenset[int], executable: Any, nodes: int) -> None:
        self.owner, self.points, self.executable, self.nodes = owner, points, executable, nodes
        self._launch, self._number, self._stream = _runtime().cudaGraphLaunch, -1, None

    def launch(self) -> None:
        """On the current stream. Raises `RuntimeError` if that is refused."""
        number = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        if number != self._number:
            self._stream, self._number = _runtime().cudaStream_t(init_value=number), number
        (error,) = self._launch(self.executable, self._stream)
        if error:
            raise RuntimeError(f"a CUDA graph could not be launched: {error}")

    def __del__(self) -> None:
        runtime = _bindings[0] if _bindings else None
        if runtime is not None:
            runtime.cudaGraphExecDestroy(self.executable)


class TappedGraph:
    """A recorded graph that replays itself, or a copy without the taps that the step at hand does not need."""

    def __init__(self, graph: torch.cuda.CUDAGraph, taps: list[tuple[Any, int]], recorded: Recorded) -> None:
        self._graph, self._taps, self._recorded = graph, taps, recorded
        self.addresses: dict[str, int] | None = getattr(graph, "addresses", None)  # of what it reads, if it was noted
        self._all = frozenset(point for _, point in taps)
        self._key: bytes | None = None
        self._wanted = self._all
        self._copy: _Copy | None = None
        self._copies: dict[frozenset[int], _Copy] = {}
        self._replays: collections.Counter[frozenset[int]] = collections.Counter()
        self._whole = not taps or not switches.enabled("cut_graphs")
        graph.instantiate()

    def replay(self) -> None:
        if self._whole:
            self._graph.replay()
            return
        if self._key != self._recorded.key:
            self._choose()
        if self._copy is not None:
            try:
                self._copy.launch()
                return
            except Exception as error:  # the whole graph is at hand, and right
                self._copy, self._whole = None, True
                switches.give_up("cut_graphs", error)
        self._graph.replay()
        if self._whole:
            return
        if self._wanted != self._all:
            self._wait_and_cut()

    def reset(self) -> None:
        self._graph.reset()

    def drop(self, copy: _Copy) -> None:
        """Forgets a copy."""
        del self._copies[copy.points]
        del self._replays[copy.points]  # it must earn another
        if self._copy is copy:
            self._copy = None

    def _choose(self) -> None:
        self._key, active = self._recorded.key, self._recorded.active
        self._wanted = frozenset(point for point in self._all if active[point])
        self._copy = self._copies.get(self._wanted)
        if self._copy is not None:
            self._recorded.chosen(self._copy)

    def _wait_and_cut(self) -> None:
        if len(self._replays) > MAX_COUNTED:
            self._replays.clear()
        self._replays[self._wanted] += 1
        if self._replays[self._wanted] < PATIENCE:
            return
        try:
            self._copy = self._copies[self._wanted] = _cut(self, self._graph, self._taps, self._wanted)
        except Exception as error:  # whatever the bindings at hand raise: the whole graph is right, if slower
            switches.give_up("cut_graphs", error)
            self._whole = True
            return
        self._recorded.keep(self._copy)


def _cut(owner: TappedGraph, graph: torch.cuda.CUDAGraph, taps: list[tuple[Any, int]], wanted: frozenset[int]) -> _Copy:
    """A copy of a graph without the taps at other points. Raises `RuntimeError` where CUDA does not allow it."""
    runtime = _runtime()
    (clone,) = _done("cudaGraphClone", runtime.cudaGraph_t(init_value=graph.raw_cuda_graph()))
    try:
        for node, point in taps:
            if point not in wanted:
                _take_out(clone, _done("cudaGraphNodeFindInClone", node, clone)[0])
        _, nodes = _done("cudaGraphGetNodes", clone)
        (executable,) = _done("cudaGraphInstantiate", clone, 0)
    finally:
        _done("cudaGraphDestroy", clone)
    return _Copy(owner, wanted, executable, int(nodes))


def _take_out(graph: Any, node: Any) -> None:
    """Removes a node; what came after it comes after what came before it."""
    before = _neighbours("cudaGraphNodeGetDependencies", node)
    after = _neighbours("cudaGraphNodeGetDependentNodes", node)
    _done("cudaGraphDestroyNode", node)
    for earlier, _ in before:
        successors = {int(node) for node, _ in _neighbours("cudaGraphNodeGetDependentNodes", earlier)}
        for later, edge in after:
            if int(later) not in successors:
                _join(graph, earlier, later, edge)


def _join(graph: Any, earlier: Any, later: Any, edge: Any) -> None:
    """An edge of the same kind (it may let a kernel begin early), or a plain one where that kind may not be."""
    try:
        _done("cudaGraphAddDependencies", graph, [earlier], [later], [edge], 1)
    except RuntimeError:
        _done("cudaGraphAddDependencies", graph, [earlier], [later], None, 1)


def _neighbours(question: str, node: Any) -> list[tuple[Any, Any]]:
    nodes, edges, count = _done(question, node, _MAX_NEIGHBOURS)
    if count >= _MAX_NEIGHBOURS:
        raise RuntimeError(f"a graph node has {count} neighbours")
    return list(zip(nodes[:count], edges[:count], strict=True))


_MAX_NEIGHBOURS = 64
_bindings: list[Any] = []


def _runtime() -> Any:
    """`cuda.bindings.runtime` (13 or newer, PyTorch's own dependency), or None."""
    if not _bindings:
        try:
            from cuda.bindings import __version__, runtime  # pyright: ignore[reportMissingImports]

            _bindings.append(runtime if int(__version__.split(".")[0]) >= 13 else None)
        except ImportError:
            _bindings.append(None)
    return _bindings[0]


def can_cut() -> bool:
    """Whether the CUDA bindings at hand let taps be taken out of graphs."""
    return _runtime() is not None


def _done(name: str, *args: Any) -> tuple[Any, ...]:
    """What a CUDA call returns. Raises `RuntimeError` for what it refuses."""
    error, *results = getattr(_runtime(), name)(*args)
    if int(error) != 0:
        raise RuntimeError(f"{name}: {error}")
    return tuple(results)
