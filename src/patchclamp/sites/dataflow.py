"""Where the stream, and what is added to it, lie in a model: read from a record of one run, which knows how every value
was computed.

A layer is called with the stream, or with two tensors whose sum it is. What a layer adds is what is left of the next
layer's stream, as a sum, without its own. Each such term is looked for among the results of the layer's modules.

    T tokens of the run · D model width · l layer
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator

import msgspec

Key = int | str  # of an argument: its number or its name
Sum = dict[int, float]  # values, each with its factor
MIXER = re.compile(
    r"mamba|ssm|shortconv|short_conv|\bconv\b|delta_?net|delta_?attention|linear_?att|lightning|recurrent|rwkv"
)
ATTENTION_NAME = re.compile(r"att(ention|n)")


class Value(msgspec.Struct):
    """A tensor's numbers.

    op, of: how they were computed, and of which values: `add` and `scale` (by `factor`) are arithmetic
    path: the innermost module that computed them
    """

    op: str
    of: tuple[int, ...]
    shape: tuple[int, ...]
    path: str
    factor: float = 1.0


class Call(msgspec.Struct):
    """A call of a module.

    given, result: its tensor arguments and results, as values
    shapes, result_shapes: their shapes
    begin, end: how many values there were before and after
    """

    path: str
    begin: int
    given: dict[Key, int]
    shapes: dict[Key, tuple[int, ...]]
    result: dict[int, int] = {}
    result_shapes: dict[int, tuple[int, ...]] = {}
    end: int = -1

    def takes(self, key: Key, width: int, tokens: int) -> bool:
        """Whether an argument is rows [T, width]."""
        return _is_rows(self.shapes.get(key, ()), width, tokens)

    def returns(self, item: int, width: int, tokens: int) -> bool:
        """Whether an item of the result is rows [T, width]."""
        return _is_rows(self.result_shapes.get(item, ()), width, tokens)


def _is_rows(shape: tuple[int, ...], width: int, tokens: int) -> bool:
    return shape[-1:] == (width,) and math.prod(shape) == tokens * width


class Record(msgspec.Struct, dict=True):
    """One run.

    kinds: of every module, its classes' names
    ids: the token ids
    guessed: modules that did not run without data, and why; what they return was taken to be like what they take
    """

    kinds: dict[str, str]
    values: list[Value] = []
    calls: list[Call] = []
    guessed: dict[str, str] = {}
    ids: int = 0

    def add(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    @functools.cached_property
    def by_path(self) -> dict[str, list[Call]]:
        calls: dict[str, list[Call]] = {}
        for call in self.calls:
            calls.setdefault(call.path, []).append(call)
        return calls

    @functools.cached_property
    def readers(self) -> dict[int, list[int]]:
        """The values that were computed of each value."""
        readers: dict[int, list[int]] = {}
        for number, value in enumerate(self.values):
            for source in value.of:
                readers.setdefault(source, []).append(number)
        return readers

    @functools.cached_property
    def returned(self) -> dict[int, list[tuple[Call, int]]]:
        """The calls that returned each value, and as which item; outer calls first."""
        returned: dict[int, list[tuple[Call, int]]] = {}
        for call in sorted(self.calls, key=lambda call: len(call.path)):
            for item, number in call.result.items():
                returned.setdefault(number, []).append((call, item))
        return returned

    def is_norm(self, path: str) -> bool:
        return "norm" in path.rpartition(".")[2] or "norm" in self.kinds[path]

    def sources(self, number: int) -> set[int]:
        """The values that a value was computed of, and itself."""
        waiting, seen = [number], set()
        while waiting:
            at = waiting.pop()
            if at not in seen:
                seen.add(at)
                waiting += self.values[at].of
        return seen

    def children(self, path: str) -> list[str]:
        start = f"{path}." if path else ""
        return [
            name[len(start) :]
            for name in self.kinds
            if name.startswith(start) and "." not in name[len(start) :] and name
        ]


class NotFound(Exception):
    """Why there is no such place."""


class Flow:
    """The stream of a record.

    layers: the path of the list of layers
    keys: the arguments that carry the stream
    adds: whether layers do nothing to the stream but add to it
    end, end_keys: the call that takes the stream after the last layer, and the arguments that carry it
    gains: what each layer adds
    """

    def __init__(self, record: Record, count: int, width: int, tokens: int) -> None:
        self.record, self.count, self.width, self.tokens = record, count, width, tokens
        self.layers = self._list_of_layers()
        self.calls = [record.by_path[f"{self.layers}.{layer}"][0] for layer in range(count)]
        self.keys, self.end, self.end_keys, self.adds = self._stream()
        self.gains = [self._gains(layer) for layer in range(count)]

    def _list_of_layers(self) -> str:
        """The path of the one list with as many modules as there are layers, each called once."""
        record, lists = self.record, {}
        for path, kinds in record.kinds.items():
            if "modulelist" in kinds.split() and not any(path.startswith(f"{outer}.") for outer in lists):
                lists[path] = len(record.children(path))
        fitting = [
            path
            for path in lists
            if lists[path] == self.count
            and all(len(record.by_path.get(f"{path}.{layer}", ())) == 1 for layer in range(self.count))
        ]
        if len(fitting) != 1:
            listed = ", ".join(f"{path} ({number})" for path, number in lists.items())
            names = listed or ", ".join(record.children("")) or "no modules"
            raise NotFound(f"not one list of {self.count} layers, each called once, was found among: {names}")
        return fitting[0]

    def wide(self, call: Call) -> dict[Key, int]:
        """A call's arguments that are rows [T, D]."""
        return {key: value for key, value in call.given.items() if call.takes(key, self.width, self.tokens)}

    def _stream(self) -> tuple[tuple[Key, ...], Call, tuple[Key, ...], bool]:
        wide = [self.wide(call) for call in self.calls]
        last = wide[-1]
        changing = [key for key in last if self.count == 1 or wide[-2].get(key) != last[key]]
        choices = [*itertools.combinations(changing, 2), *((key,) for key in changing)]
        for keys in choices:
            carried = [self.carried(layer, keys) for layer in range(self.count)]
            if all(self._is_kept(before, after) for before, after in itertools.pairwise(carried)):
                before = carried[-1]
                for call, end_keys in self._last_norms():
                    if self._is_kept(before, [call.given[key] for key in end_keys]):
                        return keys, call, end_keys, True
        results = set(self.calls[-1].result.values())
        for call, end_keys in self._last_norms():
            if len(changing) == 1 and len(end_keys) == 1 and call.given[end_keys[0]] in results:
                return (changing[0],), call, end_keys, False
        given = {key: list(shape) for key, shape in self.calls[-1].shapes.items()}
        raise NotFound(
            f"{self.layers}.{self.count - 1} should be called with the stream [{self.tokens}, {self.width}], or with "
            "two tensors whose sum it is, and a norm after it with what it returns; it was called with "
            f"{given or 'no tensor'}"
        )

    def _last_norms(self) -> Iterator[tuple[Call, tuple[Key, ...]]]:
        """The calls of norms after the last layer."""
        for call, keys in self.calls_with_sums(self.calls[-1].end, len(self.record.values)):
            if self.record.is_norm(call.path):
                yield call, keys

    def carried(self, layer: int, keys: tuple[Key, ...] | None = None) -> list[int]:
        """The values whose sum is the stream before a layer."""
        given = self.calls[layer].given
        return [given[key] for key in (self.keys if keys is None else keys) if key in given]

    def _is_kept(self, before: list[int], after: list[int]) -> bool:
        """Whether a stream is an earlier one with something added."""
        total = self.total(after, frozenset(before))
        return bool(before) and all(total.get(value) == 1 for value in before)

    def calls_with_sums(self, begin: int, end: int) -> Iterator[tuple[Call, tuple[Key, ...]]]:
        """The calls in a part of the run, each with the arguments whose sum it may take."""
        for call in self.record.calls:
            if begin <= call.begin and call.end <= end:
                wide = list(self.wide(call))
                for keys in [*itertools.combinations(wide, 2), *((key,) for key in wide)]:
                    if any(self.unread(call.given[key], call.begin) for key in keys):
                        yield call, keys

    def unread(self, value: int, until: int) -> bool:
        """Whether nothing was computed of a value before the moment `until`."""
        return not any(reader < until for reader in self.record.readers.get(value, ()))

    # -- sums

    def total(self, values: Iterable[int], terms: frozenset[int]) -> Sum:
        """A sum of values as a sum of `terms` and of what modules returned."""
        total: Sum = {}
        for value in values:
            for term, factor in self._expanded(value, terms).items():
                total[term] = total.get(term, 0.0) + factor
        return total

    def _expanded(self, number: int, terms: frozenset[int]) -> Sum:
        value = self.record.values[number]
        if number in terms or value.op not in ("add", "scale"):
            return {number: 1.0}
        if number in self.record.returned and not self._reaches(number, terms):
            return {number: 1.0}
        return {term: factor * value.factor for term, factor in self.total(value.of, terms).items()}

    def _reaches(self, number: int, terms: frozenset[int]) -> bool:
        """Whether a value is a sum with a term in it."""
        waiting, seen = [number], set()
        first = min(terms, default=-1)
        while waiting:
            at = waiting.pop()
            if at in terms:
                return True
            if at not in seen and at > first and self.record.values[at].op in ("add", "scale"):
                waiting += self.record.values[at].of
            seen.add(at)
        return False

    def _gains(self, layer: int) -> Sum:
        """What a layer adds."""
        before = self.carried(layer)
        after = self.carried(layer + 1) if layer + 1 < self.count else [self.end.given[key] for key in self.end_keys]
        total = self.total(after, frozenset(before))
        return {term: factor for term, factor in total.items() if term not in before}

    def part_of(self, layer: int, term: int) -> str:
        """Which part of a layer computes a term: attention, another mixer of tokens, or the MLP."""
        terms, waiting, seen, names = frozenset(self.carried(layer)), [term], set(), set()
        while waiting:
            number = waiting.pop()
            if number in seen or number < self.calls[layer].begin or (number != term and self._reaches(number, terms)):
                continue
            seen.add(number)
            value = self.record.values[number]
            waiting += value.of
            for path in _upwards(value.path, f"{self.layers}.{layer}"):
                if "norm" not in path.rpartition(".")[2]:
                    names.add(f"{path.rpartition('.')[2]} {self.record.kinds[path]}")
        if any(MIXER.search(name.lower()) for name in names):
            return "mixer"
        return "attention" if any(ATTENTION_NAME.search(name.lower()) for name in names) else "mlp"


def _upwards(path: str, above: str) -> Iterator[str]:
    """A module's path and its owners', below another."""
    while path.startswith(f"{above}."):
        yield path
        path = path.rpartition(".")[0]
