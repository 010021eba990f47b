"""CUDA graphs with taps, and copies reduced to the taps that current steps need.

A tap that a step does not need still costs its launch (1 to 3 µs on an H200). So after `PATIENCE` replays of a graph
for the same points, the graph is cloned, all other taps are removed from the copy, and the copy is replayed from then
on. The other nodes are unchanged, so results are bit-identical. If the CUDA bindings do not support this, the whole
graph is replayed.

A graph reads the addresses with which it was recorded. If a step allocates an input instead of filling it in place, the
graph silently reads stale data. With PATCHCLAMP_CHECK_ADDRESSES=1 the addresses are recorded with the graph and
compared at each replay. A difference raises an error that names the tensors.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from patchclamp.errors import AddressMoved
from patchclamp.kernels import switches

VARIABLE = "PATCHCLAMP_CHECK_ADDRESSES"
MAX_DEPTH = 8


def checked() -> bool:
    """True if the environment requests address checks."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def addresses(value: Any, path: str, device: str = "cuda") -> dict[str, int]:
    """Return the addresses of all tensors on devices of type `device` that are nested in a value, by path: `args[0]`,
    `attn_metadata['model.layers.0'].block_table`. Empty tensors have no address and are omitted."""
    return dict(_walk(value, path, device, 0))


def _walk(value: Any, path: str, device: str, depth: int) -> Iterator[tuple[str, int]]:
    if isinstance(value, torch.Tensor):
        if value.device.type == device and value.numel():
            yield path, value.data_ptr()
    elif depth < MAX_DEPTH:
        for name, inner in _inside(value):
            yield from _walk(inner, path + name, device, depth + 1)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items or fields of a value, each with its path suffix."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        yield from ((f".{names[i]}" if names else f"[{i}]", inner) for i, inner in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value))
    elif isinstance(value, msgspec.Struct):
        yield from ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)


def compare(recorded: Mapping[str, int], filled: Mapping[str, int], graph: str) -> None:
    """Raise `AddressMoved`, with the tensors' paths, if a graph's recorded addresses differ from the step's."""
    if recorded == filled:
        return
    kinds = {
        "missing": [path for path in recorded if path not in filled],
        "added": [path for path in filled if path not in recorded],
        "changed": [path for path, address in filled.items() if recorded.get(path, address) != address],
    }
    changes = "; ".join(f"{kind}: {', '.join(sorted(paths))}" for kind, paths in kinds.items() if paths)
    raise AddressMoved(f"the CUDA graph of {graph} reads memory that this step did not fill. {changes}")


PATIENCE = 12  # replays for the same points before a copy is made, which costs about as much as 12 replays save
MAX_NODES = 1 << 15  # nodes in all copies together
NODE_BYTES = 3600  # device memory of a copy per node (1.25 MiB for 368, vLLM 0.32 on an H200)
MAX_COUNTED = 256  # sets of points for which a graph counts replays

logger: logging.Logger = logging.getLogger("patchclamp")


class Recorded:
    """The taps of each recorded graph, and the points that the current step needs."""

    def __init__(self) -> None:
        self._taps: dict[int, list[tuple[Any, int]]] = {}
        self._copies: collections.OrderedDict[_Copy, None] = collections.OrderedDict()  # least recently used first
        self._dropped: list[tuple[torch.cuda.Event, _Copy]] = []  # each with the event after its last replay
        self.active: np.ndarray = np.zeros(0, bool)
        self.key: bytes = b""  # the `active` mask, as bytes
        self.cut: int = 0  # copies made

    def use(self, active: np.ndarray) -> None:
        """Set the mask of points that later steps need, bool [P]."""
        self.active, self.key = active, active.tobytes()

    def note(self, point: int) -> None:
        """Record the node of the last tap launched on the current stream, if a graph is being captured."""
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
        """Wrap a graph recorded with `keep_graph` for replay."""
        return TappedGraph(graph, self._taps.pop(int(graph.raw_cuda_graph()), []), self)

    def forget(self) -> None:
        """Discard the taps of graphs that failed to record."""
        self._taps = {}

    def keep(self, copy: _Copy) -> None:
        """Add a copy. Above `MAX_NODES` in total, evict the least recently used copies; each is freed once idle."""
        self._copies[copy] = None
        self.cut += 1
        while sum(other.nodes for other in self._copies) > MAX_NODES and len(self._copies) > 1:
            oldest, _ = self._copies.popitem(last=False)
            oldest.owner.drop(oldest)
            event = torch.cuda.Event()
            event.record()
            self._dropped.append((event, oldest))
        while self._dropped and self._dropped[0][0].query():
            self._dropped.pop(0)

    def chosen(self, copy: _Copy) -> None:
        self._copies.move_to_end(copy)


class _Copy:
    """An executable graph with a subset of its taps."""

    def __init__(self, owner: TappedGraph, points: frozenset[int], executable: Any, nodes: int) -> None:
        self.owner, self.points, self.executable, self.nodes = owner, points, executable, nodes
        self._launch, self._number, self._stream = _runtime().cudaGraphLaunch, -1, None

    def launch(self) -> None:
        """Launch the copy on the current stream. Raises `RuntimeError` if CUDA fails."""
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
    """A recorded graph. Replays itself, or a copy that has only the taps that the current step needs."""

    def __init__(self, graph: torch.cuda.CUDAGraph, taps: list[tuple[Any, int]], recorded: Recorded) -> None:
        self._graph, self._taps, self._recorded = graph, taps, recorded
        self.addresses: dict[str, int] | None = getattr(graph, "addresses", None)  # of the inputs, if checked
        self._all_points = frozenset(point for _, point in taps)
        self._key: bytes | None = None  # `Recorded.key` of the last choice
        self._points = self._all_points  # active points of the last choice
        self._copy: _Copy | None = None  # with the taps of only these points
        self._copies: dict[frozenset[int], _Copy] = {}
        self._replays: collections.Counter[frozenset[int]] = collections.Counter()
        self._stays_whole = not taps or not switches.enabled("cut_graphs")
        graph.instantiate()

    def replay(self) -> None:
        if self._stays_whole:
            self._graph.replay()
            return
        if self._key != self._recorded.key:
            self._choose()
        if self._copy is not None:
            try:
                self._copy.launch()
                return
            except Exception as error:  # fall back to the whole graph; results are unchanged
                self._copy, self._stays_whole = None, True
                switches.give_up("cut_graphs", error)
        self._graph.replay()
        if not self._stays_whole and self._points != self._all_points:
            self._count_and_cut()

    def reset(self) -> None:
        self._graph.reset()

    def drop(self, copy: _Copy) -> None:
        """Remove a copy, and restart the count of replays for its points."""
        del self._copies[copy.points]
        del self._replays[copy.points]
        if self._copy is copy:
            self._copy = None

    def _choose(self) -> None:
        self._key, active = self._recorded.key, self._recorded.active
        self._points = frozenset(point for point in self._all_points if active[point])
        self._copy = self._copies.get(self._points)
        if self._copy is not None:
            self._recorded.chosen(self._copy)

    def _count_and_cut(self) -> None:
        """Count a replay of the whole graph. After `PATIENCE` replays for the same points, make a reduced copy."""
        if len(self._replays) > MAX_COUNTED:
            self._replays.clear()
        self._replays[self._points] += 1
        if self._replays[self._points] < PATIENCE:
            return
        try:
            self._copy = self._copies[self._points] = _cut(self, self._graph, self._taps, self._points)
        except Exception as error:  # fall back to the whole graph: slower, results are unchanged
            switches.give_up("cut_graphs", error)
            self._stays_whole = True
            return
        self._recorded.keep(self._copy)


def _cut(owner: TappedGraph, graph: torch.cuda.CUDAGraph, taps: list[tuple[Any, int]], points: frozenset[int]) -> _Copy:
    """Copy a graph with only the taps at `points`. Raises `RuntimeError` if CUDA does not allow it."""
    runtime = _runtime()
    (clone,) = _done("cudaGraphClone", runtime.cudaGraph_t(init_value=graph.raw_cuda_graph()))
    try:
        for node, point in taps:
            if point not in points:
                _take_out(clone, _done("cudaGraphNodeFindInClone", node, clone)[0])
        _, nodes = _done("cudaGraphGetNodes", clone)
        (executable,) = _done("cudaGraphInstantiate", clone, 0)
    finally:
        _done("cudaGraphDestroy", clone)
    return _Copy(owner, points, executable, int(nodes))


def _take_out(graph: Any, node: Any) -> None:
    """Remove a node, and connect its dependents to its dependencies."""
    before = _neighbours("cudaGraphNodeGetDependencies", node)
    after = _neighbours("cudaGraphNodeGetDependentNodes", node)
    _done("cudaGraphDestroyNode", node)
    for earlier, _ in before:
        successors = {int(node) for node, _ in _neighbours("cudaGraphNodeGetDependentNodes", earlier)}
        for later, edge in after:
            if int(later) not in successors:
                _join(graph, earlier, later, edge)


def _join(graph: Any, earlier: Any, later: Any, edge: Any) -> None:
    """Add an edge with the given edge data (such as a programmatic launch), or a plain edge if CUDA rejects it."""
    try:
        _done("cudaGraphAddDependencies", graph, [earlier], [later], [edge], 1)
    except RuntimeError:
        _done("cudaGraphAddDependencies", graph, [earlier], [later], None, 1)


def _neighbours(call: str, node: Any) -> list[tuple[Any, Any]]:
    """Return a node's neighbours, each with the data of its edge."""
    nodes, edges, count = _done(call, node, _MAX_NEIGHBOURS)
    if count >= _MAX_NEIGHBOURS:
        raise RuntimeError(f"a graph node has {count} neighbours")
    return list(zip(nodes[:count], edges[:count], strict=True))


_MAX_NEIGHBOURS = 64
_bindings: list[Any] = []


def _runtime() -> Any:
    """Return `cuda.bindings.runtime` (13 or newer, PyTorch's own dependency), or None."""
    if not _bindings:
        try:
            from cuda.bindings import __version__, runtime  # pyright: ignore[reportMissingImports]

            _bindings.append(runtime if int(__version__.split(".")[0]) >= 13 else None)
        except ImportError:
            _bindings.append(None)
    return _bindings[0]


def can_cut() -> bool:
    """True if the installed CUDA bindings support removing taps from graphs."""
    return _runtime() is not None


def _done(name: str, *args: Any) -> tuple[Any, ...]:
    """Call a CUDA function and return its results. Raises `RuntimeError` if it fails."""
    error, *results = getattr(_runtime(), name)(*args)
    if int(error) != 0:
        raise RuntimeError(f"{name}: {error}")
    return tuple(results)
