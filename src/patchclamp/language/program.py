"""Programs: the ordered ops of one request, frozen and hashable, with a JSON form and a content fingerprint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from patchclamp.errors import PatchclampError, ProgramError, unknown
from patchclamp.language.conditions import (
    ProbeCondition,
    check_condition,
    comparisons,
    condition_data,
    read_condition,
)
from patchclamp.language.ops import (
    OPS,
    Apply,
    Capture,
    CaptureLike,
    Features,
    Lens,
    Op,
    Probe,
    Readout,
    SetFeature,
    Translator,
    Use,
    When,
    as_capture,
)
from patchclamp.language.site import SPECS, At, Site
from patchclamp.language.structs import PublicStruct
from patchclamp.language.tokens import Selection, read_tokens
from patchclamp.language.values import From, Named, SameRun, Value, Vector, as_plain, as_value

VALUES: dict[str, type[Any]] = {"vector": Vector, "from": From, "named": Named, "same_run": SameRun}
VECTORS = {  # fields that hold vectors
    "value", "mask", "basis", "direction", "directions", "plane", "project", "weight", "bias", "rotation",
}  # fmt: skip
# fields added by later versions, omitted at these defaults so that older programs keep their fingerprints
LATER = {"project": None, "pool": None, "translators": None, "basis": None, "norm": None, "strength": 1.0,
         "keys": None, "spans": None, "top": None}  # fmt: skip
EditsLike = Op | Iterable[Op] | None  # the type of `edits=` for one prompt
CapturesLike = CaptureLike | Iterable[CaptureLike] | None  # the type of `capture=` for one prompt
Item = TypeVar("Item")
Read = TypeVar("Read")


class Program(PublicStruct, frozen=True):
    """The ops of one request: `edits` in order, then `capture`, which records the values after all edits."""

    edits: tuple[Op, ...] = ()
    capture: tuple[Readout, ...] = ()

    def __post_init__(self) -> None:
        self.probes  # noqa: B018  raises

    @classmethod
    def of(cls, edits: EditsLike = (), captures: CapturesLike = ()) -> Program:
        """Make a program from `lm.run`'s arguments: one or more edits, and one or more sites or captures."""
        ops = (_check_op(item, f"edits[{i}]") for i, item in enumerate(_as_list(edits, "edits")))
        capture = (_read_at(as_capture, item, f"capture[{i}]") for i, item in enumerate(_as_list(captures, "capture")))
        return cls(tuple(ops), tuple(capture))

    @property
    def ops(self) -> Iterator[tuple[str, Op]]:
        """Every op with its path, in order."""
        yield from ((f"edits[{i}]", op) for i, op in enumerate(self.edits))
        yield from ((f"capture[{i}]", op) for i, op in enumerate(self.capture))

    @property
    def readout_path(self) -> str:
        """The path of the first readout, among edits or captures; "" if nothing is read."""
        of_edits = (f"edits[{i}]" for i, op in enumerate(self.edits) if isinstance(op, Readout))
        return next(of_edits, "capture[0]" if self.capture else "")

    @property
    def probes(self) -> dict[str, Probe]:
        """The probes by name, including those in conditions. Raises `ProgramError` for a duplicate name."""
        return self._beside(())

    def _beside(self, always_on: Iterable[Probe]) -> dict[str, Probe]:
        """Return the probes by name, including `always_on`. Raises `ProgramError` for a duplicate name."""
        named, read = {probe.name: probe for probe in always_on}, set[str]()  # `read`: probes that are ops themselves
        for path, op in self.ops:
            read_by = [each.probe for each in comparisons(op.condition)] if isinstance(op, When) else [op]
            for probe in (each for each in read_by if isinstance(each, Probe)):  # skips features
                if named.setdefault(probe.name, probe) != probe or (probe is op and probe.name in read):
                    raise ProgramError(f"duplicate probe name {probe.name!r}: rename one", f"{path}.name")
            read |= {op.name} if isinstance(op, Probe) else set()
        return named

    def stopped_by(self, condition: ProbeCondition | None, always_on: Sequence[Probe], path: str) -> Program:
        """Return the program with a stop condition's probes added. Raises `ProgramError`, at `path`, for a feature, a
        pooled probe, a probe of several layers, or a name that different probes share (`always_on` included)."""
        if condition is None and not always_on:
            return self
        own, named = self.probes, self._beside(always_on)
        for each in [] if condition is None else comparisons(check_condition(condition, path)):
            if not isinstance(probe := each.probe, Probe):
                raise ProgramError("expected a probe, got a feature: use its encoder row as a probe", path)
            if probe.pool is not None:
                raise ProgramError(f"expected a probe with a score per token, got pool={probe.pool!r}", f"{path}.pool")
            if SPECS[probe.at.name].layered and not isinstance(probe.at.layers, int):
                raise ProgramError(f"expected a probe of one layer, got {probe.at}", f"{path}.at")
            if named.setdefault(probe.name, probe) != probe:
                raise ProgramError(f"duplicate probe name {probe.name!r}: rename one", f"{path}.name")
            own.setdefault(probe.name, probe)
        added = tuple(own.values())[len(self.probes) :]
        return Program(self.edits, self.capture + added) if added else self

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the content, in hex. Equal programs have equal fingerprints, however they were written."""
        return hashlib.sha256(msgspec.json.encode(to_dict(self), order="deterministic")).hexdigest()

    def to_json(self) -> str:
        return msgspec.json.encode(to_dict(self)).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Program:
        """Parse `to_json`'s output. Raises `ProgramError` with a path for unknown, duplicate or malformed fields."""
        return from_dict(parse_json(text))

    @classmethod
    def parse(cls, text: str) -> Program:
        """Parse a mix of named programs from text such as `0.3 calm + 0.2 honest @ generated`.

        Each term is `Use(name, scale)`: an optional scale (default 1) and a name; `-` negates. The selection after `@`
        sets the tokens of all edits. Raises `ProgramError` with the position of the syntax error.
        """
        terms, at, tokens = text.partition("@")
        chosen = read_tokens(tokens.strip(), "tokens") if at else None
        edits, begin = list[Op](), 0

        def take(pattern: re.Pattern[str], expected: str) -> str | None:
            nonlocal begin
            found = pattern.match(terms, begin)
            if found is not None:
                begin = found.end()
                return found[1]
            if expected:
                rest = terms[begin:].lstrip()
                place = f"got {rest!r:.40} at character {len(terms) - len(rest)} of {text!r:.200}"
                raise ProgramError(f"expected {expected}, {place}")
            return None

        while not edits or begin < len(terms):
            sign = take(_SIGN, "+, - or @ SELECTION" if edits else "")
            number = take(_NUMBER, "")
            name = take(_NAME, "NAME" if number else "[NUMBER] NAME")
            edits.append(Use(str(name), float(number or 1.0) * (-1.0 if sign == "-" else 1.0), chosen))
        return cls(tuple(edits))

    def __bool__(self) -> bool:
        return bool(self.edits or self.capture)


_SIGN, _NAME = re.compile(r"\s*([+-])"), re.compile(r"\s*([A-Za-z_][\w.-]*)\s*")
_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)(?:\s*\*|\s)")


def to_dict(program: Program) -> dict[str, Any]:
    """Convert a program to plain data: sites and tokens as text, vectors as shape and base64.

    Raises `ProgramError` for `Apply`.
    """
    for path, op in program.ops:
        if isinstance(op, Apply):
            raise ProgramError("Apply contains code, which cannot be saved or sent", path)
    return {part: [_data(op) for op in getattr(program, part)] for part in ("edits", "capture")}


def condition_to_dict(condition: ProbeCondition) -> dict[str, Any]:
    """Convert a condition to plain data, as in an HTTP request's `stop_when`."""
    return condition_data(condition, _data)


def condition_from_dict(data: object, path: str) -> ProbeCondition:
    """Parse the output of `condition_to_dict`. Raises `ProgramError` with the path of the invalid field."""
    return read_condition(data, path, _read_probe)


def _data(op: Op) -> dict[str, Any]:
    """Convert an op to plain data."""
    if isinstance(op, When):
        edits = [_data(edit) for edit in op.edits]
        return {"type": "when", "condition": condition_data(op.condition, _data), "edits": edits, "scope": op.scope}
    return _fields(op) | _texts(op)


def _fields(op: Op) -> dict[str, Any]:
    """Return an op's fields as plain data, omitting fields in `LATER` that have their default value."""
    fields = msgspec.to_builtins(op, enc_hook=str)
    return {name: value for name, value in fields.items() if name not in LATER or value != LATER[name]}


def _texts(op: Op) -> dict[str, Any]:
    """Return an op's fields that are serialized as text."""
    fields = {name: getattr(op, name, None) for name in ("at", "tokens", "keys")}
    texts: dict[str, Any] = {name: str(value) for name, value in fields.items() if value is not None}
    if isinstance(op, Capture) and op.spans is not None:
        texts["spans"] = [str(span) for span in op.spans]
    value = getattr(op, "value", None)
    if isinstance(value, (From, SameRun)):
        words = {name: getattr(value, name) for name in value.__struct_fields__}
        texts["value"] = {"type": value.__struct_config__.tag} | {k: str(v) for k, v in words.items() if v is not None}
    return texts


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that has, or may have, a program. Raises `ProgramError` for invalid JSON and duplicate keys."""
    try:
        return json.loads(text, object_pairs_hook=_no_doubles)
    except (TypeError, ValueError, RecursionError) as error:
        raise ProgramError(f"invalid JSON: {error}") from None


def from_dict(data: object) -> Program:
    """Parse the output of `to_dict`. Raises `ProgramError` with the path of the invalid field."""
    if not isinstance(data, dict):
        raise ProgramError(f"expected an object with 'edits' and 'capture', got {type(data).__name__}")
    for key in data:
        if key not in ("edits", "capture"):
            raise unknown("field", key, ("edits", "capture"), key)
    edits, capture = (_read_ops(data.get(part, []), part) for part in ("edits", "capture"))
    for i, op in enumerate(capture):
        if not isinstance(op, Readout):
            raise ProgramError(f"expected a Capture or a Probe, got {type(op).__name__}", f"capture[{i}]")
    return Program(edits, tuple(op for op in capture if isinstance(op, Readout)))


def _read_ops(data: object, part: str, depth: int = 0) -> tuple[Op, ...]:
    if not isinstance(data, list) or depth > 1:  # `When` cannot be nested
        raise ProgramError("expected a list of ops", part)
    return tuple(_read_op(op, f"{part}[{i}]", depth) for i, op in enumerate(data))


def _read_probe(data: object, path: str) -> Probe | Features:
    probe = _read_op(data, path)
    if not isinstance(probe, (Probe, Features)):
        raise ProgramError(f"expected a Probe, got {type(probe).__name__}", path)
    return probe


def _read_op(data: object, path: str, depth: int = 0) -> Op:
    if isinstance(data, str) and path.startswith("capture"):  # a site
        return _read_at(as_capture, data, path)
    if not isinstance(data, dict):
        raise ProgramError(f"expected an op as an object, got {type(data).__name__}", path)
    if "type" not in data:
        raise ProgramError(f"an op needs 'type'; available: {', '.join(OPS)}", path)
    kind = OPS.get(str(data["type"]))
    if kind is None:
        raise unknown("op", str(data["type"]), OPS, f"{path}.type")
    fields = {k: v for k, v in data.items() if k != "type"}
    names = kind.__struct_fields__
    _check_fields(fields, names, kind.__name__, path)
    needed = names[: len(names) - len(kind.__struct_defaults__)]
    for field in sorted(needed, key=lambda field: field != "at"):
        if field not in fields:
            raise ProgramError(f"{kind.__name__} needs {field!r}", path)
    if kind is When:
        fields["condition"] = read_condition(fields["condition"], f"{path}.condition", _read_probe)
        fields["edits"] = _read_ops(fields["edits"], f"{path}.edits", depth + 1)
    for field in ("at", "tokens", "keys"):
        may_be_none = kind is Use or field == "keys"
        if field in fields and not isinstance(fields[field], str) and not (may_be_none and fields[field] is None):
            raise ProgramError("expected the text form, such as 'resid_post[12]' or 'prompt[-1]'", f"{path}.{field}")
    for field in VECTORS & fields.keys() if kind is not SetFeature else ():
        if fields[field] is not None:
            fields[field] = _read_value(fields[field], f"{path}.{field}")
    if kind is Lens and fields.get("translators") is not None:
        fields["translators"] = _read_translators(fields["translators"], f"{path}.translators")
    return _read_at(lambda words: kind(**words), fields, path)


def _read_translators(data: object, path: str) -> tuple[Translator, ...]:
    """Read translators. File names, which `Lens` accepts, are rejected: a server opens no files for clients."""
    if not isinstance(data, list):
        raise ProgramError(f"expected a list of translators, got {type(data).__name__}", path)
    found = []
    for i, one in enumerate(data):
        try:
            found.append(msgspec.convert(one, Translator))
        except PatchclampError as error:
            raise error.under(f"{path}[{i}]") from None
        except msgspec.ValidationError as error:
            raise ProgramError(str(error), f"{path}[{i}]") from None
    return tuple(found)


def _check_fields(fields: Iterable[str], names: tuple[str, ...], owner: str, path: str) -> None:
    for field in fields:
        if field not in names:
            raise unknown(f"{owner} field", field, names, f"{path}.{field}")


def _read_value(data: object, path: str) -> Value:
    if isinstance(data, list):
        return _read_at(as_value, data, path)
    tag = data.get("type") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(tag, str) or tag not in VALUES:
        raise ProgramError(f"expected a list of numbers or an object of type {', '.join(map(repr, VALUES))}", path)
    words = {k: v for k, v in data.items() if k != "type"}
    kind = VALUES[tag]
    _check_fields(words, kind.__struct_fields__, tag, path)
    try:
        return msgspec.convert(data, Vector) if tag == "vector" else kind(**words)
    except PatchclampError as error:
        raise error.under(path) from None
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        if isinstance(error.__cause__, PatchclampError):
            raise error.__cause__.under(path) from None
        raise ProgramError(str(error), path) from None


def _check_op(op: object, path: str) -> Op:
    if isinstance(op, Op):
        return op
    hint = f"; pc.Use({op!r}) uses a program by name" if isinstance(op, str) else ""
    raise ProgramError(f"expected an op such as pc.Add(...), got {type(op).__name__} {op!r}{hint}", path)


def _read_at(read: Callable[[Item], Read], item: Item, path: str) -> Read:
    """Return `read(item)`, prefixing errors with the path."""
    try:
        return read(item)
    except PatchclampError as error:
        raise error.under(path) from None


def _as_list(items: Any, path: str) -> Sequence[Any]:
    """Convert one item, several items, or None (no items) to a sequence."""
    if items is None:
        return ()
    if isinstance(items, (Op, Site, At, str)):
        return (items,)
    if isinstance(items, Mapping):
        raise ProgramError("expected a list, got a mapping: write a site's tokens as in pc.z[5] @ pc.prompt[-1]", path)
    if isinstance(items, Selection):
        raise ProgramError(f"expected a site, as in pc.resid_post @ {items}, got the selection {items}", path)
    items = as_plain(items, path)
    return list(items) if isinstance(items, Iterable) else (items,)


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, item in pairs:
        if key in fields:
            raise ProgramError(f"duplicate key {key!r}")
        fields[key] = item
    return fields
