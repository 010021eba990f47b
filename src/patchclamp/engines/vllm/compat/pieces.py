"""A compiled model's pieces, split by vLLM at attention. patchclamp's batches may begin after any cut.

The per-row values that cross the cut after layer l − 1's attention are everything that layers l and later need from
earlier layers: the attention output, the stream, and values computed once for all layers. Given these, the remaining
pieces are the same code as in a full pass.

    R rows of a call · L layers
"""

from __future__ import annotations

import logging
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.fx.node import map_arg

from patchclamp.engines.vllm.compat.configuration import engine_id
from patchclamp.errors import EngineError
from patchclamp.kernels.transfer import to_device
from patchclamp.runtime.taps import points_in

if TYPE_CHECKING:
    from vllm.compilation.backends import VllmBackend
    from vllm.config import VllmConfig

logger: logging.Logger = logging.getLogger("patchclamp")
MAX_BYTES = 1 << 28  # of kept streams
ROOM_BYTES = 1 << 30  # of device memory that must be free for streams and a batch's rows
Observer = Callable[[int, list[Any]], None]


class Pieces:
    """A model compiled in pieces.

    layers: the number of cuts at attention
    layer_of: by point, the highest layer where a pass can begin and still run the point's tap
    usable: True if a pass started at a layer matched a full pass bit for bit; None until compared
    """

    def __init__(self, backend: VllmBackend) -> None:
        self._graph = backend.split_gm
        self._nodes = list(self._graph.graph.nodes)
        attention = {item.submod_name for item in backend.piecewise_graphs
                     if item.is_splitting_graph and _attends(item.graph)}  # fmt: skip
        self._inputs = [node for node in self._nodes if node.op == "placeholder"]
        place = {node: i for i, node in enumerate(self._nodes)}
        self._begins = [len(self._inputs)]  # by layer: the index of its first node
        for i, node in enumerate(self._nodes):
            if node.op == "call_module" and node.target in attention:
                while self._nodes[i + 1].target is operator.getitem:
                    i += 1
                self._begins.append(i + 1)
        last = [max((place[user] for user in node.users), default=-1) for node in self._nodes]
        computed = [i for i, node in enumerate(self._nodes) if node.op.startswith("call")]
        self._crossing = [[self._nodes[i] for i in computed if i < begin <= last[i]] for begin in self._begins]
        self._unused: dict[int, list[Any]] = {}  # by node: the values that no later node uses
        for i in computed:
            self._unused.setdefault(max(last[i], i), []).append(self._nodes[i])
        self.layers: int = len(self._begins) - 1
        layer_of_piece = {node.target: bisect_right(self._begins, place[node]) - 1 for node in self._nodes}
        self.layer_of: dict[int, int] = {}
        for item in reversed(backend.piecewise_graphs):
            self.layer_of |= dict.fromkeys(points_in(item.graph), layer_of_piece[item.submod_name])
        self.usable: bool | None = None
        self._layer = 0
        self._rows: Sequence[Any] = ()
        self._observe: Observer | None = None
        _of_engine[engine_id(backend.vllm_config)] = self

    def wrap(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the compiled graph, so that calls inside a `within` context run its pieces."""

        def call(*args: Any) -> Any:
            return self._run(args) if self._layer or self._observe is not None else whole(*args)

        return call

    @contextmanager
    def within(self, layer: int, rows: Sequence[Any], observe: Observer | None) -> Iterator[None]:
        """Make calls inside the context begin at `layer`. `rows`: the values that cross its cut. `observe` is called
        with each later layer and the values that cross that layer's cut."""
        self._layer, self._rows, self._observe = layer, rows, observe
        try:
            yield
        finally:
            self._layer, self._rows, self._observe = 0, (), None

    def _run(self, args: Sequence[Any]) -> Any:
        layer, observe = self._layer, self._observe
        values: dict[Any, Any] = dict(zip(self._inputs, args, strict=True))
        values |= zip(self._crossing[layer], self._rows, strict=True)
        self._rows = ()
        begins = {begin: i for i, begin in enumerate(self._begins) if i > layer}
        for i in range(self._begins[layer], len(self._nodes)):
            node = self._nodes[i]
            if observe is not None and i in begins:
                observe(begins[i], [values[each] for each in self._crossing[begins[i]]])
            given = map_arg(node.args, values.__getitem__)
            if node.op == "output":
                return given[0]
            function = getattr(self._graph, node.target) if node.op == "call_module" else node.target
            values[node] = function(*given, **map_arg(node.kwargs, values.__getitem__))
            for unused in self._unused.get(i, ()):
                values.pop(unused, None)
        raise AssertionError("the graph has no output")


_of_engine: WeakValueDictionary[int, Pieces] = WeakValueDictionary()  # by `engine_id`; the compiled code holds them


def pieces_of(vllm_config: VllmConfig, layers: int) -> Pieces | None:
    """Return the pieces of an engine's model; None unless it is compiled in pieces with one cut per layer."""
    pieces = _of_engine.get(engine_id(vllm_config))
    return pieces if pieces is not None and pieces.layers == layers else None


def _attends(graph: torch.fx.GraphModule) -> bool:
    return any(node.op == "call_function" and "attention" in str(node.target) for node in graph.graph.nodes)


class Streams:
    """The values that cross cuts in passes over prompts, T rows in total. Batches use them to skip layers.

    Above `MAX_BYTES`, only every n-th layer is kept. Batches begin at layer 0 if a crossing value has no row per token,
    or if the pieces do not reproduce the full pass.
    """

    def __init__(self, pieces: Pieces, rows: int, device: torch.device) -> None:
        self._pieces, self._total, self._device = pieces, rows, device
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._every = 1

    def record(self, compute: Callable[..., torch.Tensor], row: np.ndarray) -> None:
        """Compute a pass over the rows with these indices, [R], and keep the values that cross cuts. `compute`:
        `BatchModel.forward` of the pass."""
        pieces, row_R = self._pieces, to_device(row, self._device)

        def keep(layer: int, values: list[Any]) -> None:
            for each in values:
                if not isinstance(each, torch.Tensor) or each.shape[:1] != row_R.shape:
                    raise EngineError(
                        f"expected a value per row at the cut before layer {layer}, got {getattr(each, 'shape', each)}"
                    )
            size = sum(each[0].nbytes for each in values) * self._total * pieces.layers
            self._every = self._every if layer > 1 else max(1, -(-size // MAX_BYTES))
            if layer % self._every == 0:
                kept = self._kept.setdefault(layer, [each.new_empty(self._total, *each.shape[1:]) for each in values])
                for whole, value in zip(kept, values, strict=True):
                    whole[row_R] = value

        if pieces.usable is not None:
            compute(**({"observe": keep} if pieces.usable else {}))
            return
        whole = compute()
        try:
            compute(observe=keep)
            layer = self.begin(pieces.layers // 2 + 1)
            same = torch.equal(whole, compute(layer=layer, crossing=self.crossing(layer, row)))
            problem = "" if same else "a partial pass differs from a full one"
            if _free_bytes(self._device) < ROOM_BYTES:
                problem = "less than 1 GiB of device memory is free"
        except Exception as error:  # the graph has an unexpected structure
            problem = repr(error)  # never empty
        pieces.usable = _agreed(not problem)
        if not pieces.usable:
            logger.warning("patchclamp: graded programs are computed from layer 0: %s", problem)

    def begin(self, layer: int) -> int:
        """Return the highest layer up to `layer` where a batch may begin."""
        return 0 if self._pieces.usable is False else layer - layer % self._every

    def crossing(self, layer: int, row: np.ndarray) -> list[torch.Tensor]:
        """Return the values that cross the cut before a layer, for the rows with these indices."""
        row_R = to_device(row, self._device)
        return [kept[row_R] for kept in self._kept[layer]] if layer else []


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return ROOM_BYTES
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _agreed(holds: bool) -> bool:
    """True if the condition holds on all workers of this stage, which must begin a batch at the same layer."""
    from vllm.distributed.parallel_state import get_tp_group

    group, flag = get_tp_group(), torch.tensor(int(holds))
    if group.world_size > 1:
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group.cpu_group)
    return bool(flag)
