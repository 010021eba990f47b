"""Arguments of studies, read and checked before anything runs: prompts, layers, positions, numbers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, SupportsIndex, TypeVar, get_args

import msgspec

from patchclamp.call import is_token_id
from patchclamp.engines.tokenizer import prompt_of
from patchclamp.errors import PatchclampError, ProgramError, TokensError, UnsupportedSite, unknown
from patchclamp.language import Op, Program, Range, Site
from patchclamp.language import prompt as whole_prompt
from patchclamp.language.ops import MAX_TOP
from patchclamp.language.program import from_dict, parse_json
from patchclamp.language.sae import SAE
from patchclamp.language.site import SPECS, At, parse_edited_site, parse_site
from patchclamp.language.structs import PublicStruct
from patchclamp.language.tokens import Tokens, TokensLike, as_integer, parse_index, parse_tokens
from patchclamp.language.values import as_file, as_flag, as_items, as_number, as_plain
from patchclamp.lm import LM
from patchclamp.plots.style import visible
from patchclamp.run import Run
from patchclamp.sites.map import Dictionary
from patchclamp.store.journal import Journal
from patchclamp.studies.metric import Metric
from patchclamp.studies.study import REQUIRED, Arg, Reporter, Resumable, as_lm, bind_call, fields_of


def layers_of(lm: LM, name: str, layers: Any, path: str = "layers") -> list[int]:
    """Return the requested layers of a site, ascending. `layers`: a number, a list, a range or text such as "0:12";
    None means all. Raises `UnsupportedSite` for layers without the site."""
    index = parse_index(layers) if isinstance(layers, str) else layers
    asked = list(index) if isinstance(index, (list, tuple, range)) else [index]
    try:
        refs = [
            ref
            for one in asked
            for ref in lm.sites.resolve(Site(name, Range.of(one) if isinstance(one, slice) else one))
        ]
    except PatchclampError as error:
        raise error.under(path) from None
    if not (numbers := sorted({ref.layer for ref in refs if ref.layer is not None})):
        raise UnsupportedSite(f"expected at least one layer of {name}, got none", path)
    return numbers


def layered_site(site: Any, path: str = "site") -> Site:
    """Read a site without layers, which are chosen separately. Raises `ProgramError` if it names layers."""
    try:
        named = parse_site(site)
    except PatchclampError as error:
        raise error.under(path) from None
    if named.layers is not None or named.index is not None:
        raise ProgramError(f"expected a site without layers, such as {named.name!r}; select layers with layers=", path)
    return named


def positions_of(run: Run, positions: Any, path: str = "positions") -> list[int]:
    """Return the requested positions of a run's prompt, in the given order, from a selection, a number, or a list of
    either; all if None. Raises `TokensError` for positions that are not in the prompt."""
    if positions is None:
        return list(range(len(run.prompt_token_ids)))
    chosen: list[int] = []
    positions = as_plain(positions, path)
    several = isinstance(positions, (list, tuple))
    for i, one in enumerate(positions if several else [positions]):
        try:
            chosen += [int(p) for p in run.select(selection(one))]
        except PatchclampError as error:
            raise error.under(f"{path}[{i}]" if several else path) from None
    if not chosen:
        raise TokensError("expected at least one position of the prompt, got none", path)
    return list(dict.fromkeys(chosen))


def selection(text: Any) -> Tokens:
    """Read a selection; numbers and ranges are positions of the prompt."""
    if isinstance(text, range):
        text = slice(text.start, text.stop, text.step)
    return whole_prompt[text] if is_token_id(text) or isinstance(text, (slice, list, tuple)) else parse_tokens(text)


class Column(PublicStruct, frozen=True):
    """Aligned positions of the clean and the corrupt prompt, patched together."""

    label: str
    clean: tuple[int, ...]
    corrupt: tuple[int, ...]


class Words(msgspec.Struct, frozen=True):
    """A prompt: its token ids, its tokens as text, and its whole text."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    text: str

    @property
    def last(self) -> int:
        return len(self.ids) - 1


def words_of(lm: LM, prompt: Any, path: str) -> Words:
    """Read a prompt, given as text or token ids."""
    try:
        read = _plain(lm, prompt)
    except (ProgramError, TokensError) as error:
        raise type(error)(error.message, path) from None
    if not read.ids:
        raise TokensError("expected a non-empty prompt", path)
    return Words(read.ids, tuple(lm.tokenizer.token_strings(read.ids)), read.shown)


def listed(prompts: Any) -> bool:
    """True for several prompts: a list of texts, or a list of token id lists."""
    return isinstance(prompts, (list, tuple)) and not (len(prompts) > 0 and is_token_id(prompts[0]))


def each_prompt(prompts: Any, path: str) -> list[tuple[Any, str]]:
    """Return the prompts with their paths. Raises `ProgramError` for an empty list."""
    if not listed(prompts):
        return [(prompts, path)]
    if not prompts:
        raise ProgramError("expected at least one prompt, got none", path)
    return [(one, path if len(prompts) == 1 else f"{path}[{i}]") for i, one in enumerate(prompts)]


def chosen_positions(lm: LM, words: Words, tokens: Any, path: str) -> tuple[int, ...]:
    """Return the positions of a prompt that a selection covers. Raises `TokensError` for an empty selection."""
    try:
        prompt = prompt_of(lm.tokenizer, words.ids, words.text, None)
        selected = prompt.select(selection(tokens), len(words.ids)).tolist()
    except PatchclampError as error:
        raise error.under(path) from None
    if not selected:
        raise TokensError(f"{tokens} selects nothing in a prompt of {len(words.ids)} tokens", path)
    return tuple(selected)


Alignments = Literal["last", "first", "each"]


class Match(PublicStruct, frozen=True, forbid_unknown_fields=True):
    """Pairs a part of the clean prompt with a part of the corrupt prompt, for subjects of different lengths.

    Use it as a position in a patching study: `positions=[pc.studies.Match(clean="span('Statue of Liberty')",
    corrupt="span('Big Ben')")]` patches the paired tokens together. With n and m tokens, "last" pairs the last
    min(n, m), "first" the first, and "each" requires n = m. Unpaired tokens stay unpatched, and are listed in the
    result (`skipped`). As JSON it is an object with these fields.

    clean, corrupt: selections of the two prompts
    align: "last", "first" or "each"
    """

    clean: Any
    corrupt: Any
    align: Alignments = "last"

    def __post_init__(self) -> None:
        if self.align not in get_args(Alignments):
            raise unknown("alignment", str(self.align), get_args(Alignments), "align")

    @classmethod
    def of(cls, value: Any, path: str) -> Match | None:
        """Read a match, or an object with its fields; return None for any other selection."""
        if isinstance(value, Mapping):
            try:
                value = msgspec.convert(value, cls)
            except msgspec.ValidationError as error:
                raise ProgramError(f"expected a Match with clean and corrupt: {error}", path) from None
        return value if isinstance(value, cls) else None

    def pairs(self, lm: LM, clean: Words, corrupt: Words, path: str) -> tuple[tuple[int, int], ...]:
        """Return the paired (clean, corrupt) positions, ascending."""
        one = sorted(chosen_positions(lm, clean, self.clean, f"{path}.clean"))
        other = sorted(chosen_positions(lm, corrupt, self.corrupt, f"{path}.corrupt"))
        if self.align == "each" and len(one) != len(other):
            raise TokensError(
                f'align="each" requires equal numbers of tokens, got {len(one)} clean and {len(other)} corrupt; '
                'use align="last" or "first"', path
            )  # fmt: skip
        count = min(len(one), len(other))
        return tuple(zip(*((of[:count] if self.align == "first" else of[-count:]) for of in (one, other)), strict=True))


Make = Callable[[str, tuple[int, ...], str], Column]
"""Makes a column from a label, positions of the patched prompt, and the selection's path in errors."""
MakeMatched = Callable[[str | None, Match, str], Column]
"""Makes a column from a label (None: the matched tokens), a match, and the match's path in errors."""


def columns_of(
    lm: LM, words: Words, all_positions: Sequence[int], positions: Any, number: int, count: int, make: Make,
    matched: MakeMatched | None = None,
) -> list[Column]:  # fmt: skip
    """Return the columns of prompt pair `number` of `count`: one per selection in `positions`, or per position if None.

    positions: selections of the patched prompt; a mapping gives them labels, and its values may be lists with one
        selection per pair
    matched: makes the column of a `Match`; None in studies of one prompt
    """
    if positions is None:
        return [make(words.tokens[p], (p,), "positions") for p in all_positions]
    columns: list[Column] = []
    for label, selection, path in _selections(positions, number, count):
        match = Match.of(selection, path)
        if match is None:
            chosen = chosen_positions(lm, words, selection, path)
            column = make("".join(words.tokens[p] for p in chosen) if label is None else label, chosen, path)
        elif matched is None:
            raise ProgramError("expected a selection, got a Match, which requires a clean and a corrupt prompt", path)
        else:
            column = matched(label, match, path)
        if any((other.clean, other.corrupt) == (column.clean, column.corrupt) for other in columns):
            raise TokensError(f"duplicate column: {selection} selects the same tokens as an earlier column", path)
        columns.append(column)
    return columns


def _selections(positions: Any, number: int, count: int) -> list[tuple[str | None, Any, str]]:
    """Return (label, selection, path) for every column of a pair."""
    positions = as_plain(positions, "positions")
    if isinstance(positions, Mapping):
        if {"clean", "corrupt"} <= positions.keys() <= {*Match.__struct_fields__}:
            raise ProgramError('expected column labels, got a Match: pass it in a list, [{"clean": …}]', "positions")
        chosen = []
        for label, selection in positions.items():
            path = f"positions[{label!r}]"
            selection = as_plain(selection, path)
            if isinstance(selection, (list, tuple)):
                if len(selection) != count:
                    raise ProgramError(
                        f"expected one selection for each of {count} prompts, got {len(selection)}; for several "
                        "positions in a column use one selection, such as pc.prompt[-2, -1]",
                        path,
                    )
                selection = selection[number]
            chosen.append((str(label), selection, path))
        return chosen
    several: Sequence[Any] = list(positions) if isinstance(positions, (list, tuple)) else [positions]
    return [(None, selection, f"positions[{i}]") for i, selection in enumerate(several)]


def labelled(column: Column, patched: str, has_corrupt: bool) -> tuple[int, ...]:
    """Return the positions that a column's label names: those of the patched prompt; for attention edges, the keys."""
    return column.clean if patched == "clean" and (has_corrupt or not column.corrupt) else column.corrupt


def same_columns(
    columns: Sequence[Sequence[Column]], patched: str, has_corrupt: bool, lengths: Sequence[int]
) -> tuple[Column, ...]:
    """Merge the columns of several pairs into the grid's. Labels that differ are replaced by the token's position, from
    the end if only that is the same in all pairs, or by the column's number.

    lengths: tokens of each pair's patched prompt

    Raises: `TokensError` if pairs have different numbers of columns.
    """
    for i, other in enumerate(columns):
        if len(other) != len(columns[0]):
            raise TokensError(
                f"pair {i} has {len(other)} patchable positions, pair 0 has {len(columns[0])}: for prompts of "
                "different lengths, choose columns with positions=['prompt[-1]', …]",
                "positions",
            )
    merged: list[Column] = []
    for number, [first, *others] in enumerate(zip(*columns, strict=True)):
        label = first.label
        if any(other.label != label for other in others):
            places = [labelled(column, patched, has_corrupt) for column in (first, *others)]
            ends = [tuple(p - length for p in place) for place, length in zip(places, lengths, strict=True)]
            same = next((each[0] for each in (places, ends) if len({*each}) == 1), None)
            label = f"column {number + 1}" if same is None else f"token {', '.join(map(str, same))}"
        merged.append(msgspec.structs.replace(first, label=label))
    return tuple(merged)


class Row(msgspec.Struct, frozen=True):
    """A site, its layer, and an index such as `3` or `0:64` if the row covers only part of the site.

    layers: the layers patched together, if there are several
    """

    site: str
    layer: int | None
    index: str = ""
    layers: tuple[int, ...] = ()

    @property
    def panel(self) -> str:
        """The name shared by the rows of all layers: `resid_pre`, `z[:, 3]`."""
        return f"{self.site}[:, {self.index}]" if self.index else self.site

    @property
    def sites(self) -> list[Site]:
        """The patched sites, layer by layer."""
        index = parse_index(self.index) if self.index else None
        return [Site(self.site, layer, index) for layer in self.layers or (self.layer,)]

    def __str__(self) -> str:
        inner = str(self.layer) + (f", {self.index}" if self.index else "")
        return self.site if self.layer is None else f"{self.site}[{inner}]"


def rows_of(
    lm: LM, sites: Any, layers: Any = None, group: int | None = None, window: int = 1,
    parse: Callable[[Any], Site] = parse_edited_site,
) -> list[Row]:  # fmt: skip
    """Return the rows of `sites`, without duplicates, ordered by site and index, then by layer.

    layers: layers for sites given without an index: None (all), a number, a list, or text such as "0:12"
    group: number of heads, neurons or experts per row; None: one row for the whole site
    window: number of adjacent layers patched together, centred on the row's and clipped to the model
    parse: parses a site

    Raises: `UnknownName`, `UnsupportedSite` and `ProgramError`, with the path in `sites`.
    """
    sites = [sites] if isinstance(sites, (str, Site)) else list(sites)
    chosen = which_layers(layers, lm.model.layers)
    rows: dict[Row, None] = {}
    for i, text in enumerate(sites):
        try:
            site = parse(text)
            for part in _parts(lm, site, group):
                rows.update(dict.fromkeys(_layered(lm, part, chosen, window)))
        except PatchclampError as error:
            raise error.under(f"sites[{i}]") from None
    return list(rows)


def which_layers(layers: Any, count: int) -> set[int]:
    """Return the selected layers of `count`. Raises `UnsupportedSite` if none is selected or one is out of range."""
    index = parse_index(layers) if isinstance(layers, str) else layers
    if index is None:
        return set(range(count))
    chosen: set[int] = set()
    for one in index if isinstance(index, (list, tuple, range)) else [index]:
        part = Range.of(one) if isinstance(one, slice) else one
        numbers = list(part.indices(count)) if isinstance(part, Range) else [part]
        ends = [end for end in part.ends if end is not None] if isinstance(part, Range) else []
        if any(not -count <= n < count for n in numbers) or any(not -count <= end <= count for end in ends):
            raise UnsupportedSite(f"layers={layers} is out of range for {count} layers (0..{count - 1})", "layers")
        chosen |= {n % count for n in numbers}
    if not chosen:
        raise UnsupportedSite(f"expected at least one layer (0..{count - 1}), got {layers}", "layers")
    return chosen


def _parts(lm: LM, site: Site, group: int | None) -> Iterator[Site]:
    """Split a site into groups of heads, neurons or experts; without `group`, yield the site itself."""
    if group is None:
        yield site
        return
    if not SPECS[site.name].index:
        raise ProgramError(f"{site.name} has no heads, neurons or experts to group", "group")
    lm.sites.resolve(site)  # raises for an index out of range
    parts = lm.sites.parts(site.name)
    assert parts is not None
    count = parts[0]
    index = site.index
    named = range(count) if index is None else index.indices(count) if isinstance(index, Range) else [index % count]
    for begin in range(0, len(named), group):
        some = named[begin : begin + group]
        yield Site(site.name, site.layers, some[0] if len(some) == 1 else Range(some[0], some[-1] + 1))


def _layered(lm: LM, site: Site, chosen: set[int], window: int) -> Iterator[Row]:
    everywhere = [ref.layer for ref in lm.sites.resolve(Site(site.name, None, site.index))]
    for ref in lm.sites.resolve(site):
        if ref.layer is None:
            yield Row(ref.name, None)
        elif site.layers is not None or ref.layer in chosen:
            first = ref.layer - window // 2  # the larger half of an even window is below the layer
            around = tuple(layer for layer in everywhere if layer is not None and first <= layer < first + window)
            yield Row(ref.name, ref.layer, ref.index, around if window > 1 else ())


def panels_of(rows: Sequence[Row]) -> list[str]:
    """Return the distinct panel names of rows, in order."""
    return list(dict.fromkeys(row.panel for row in rows))


def layers_in(rows: Sequence[Row]) -> tuple[int, ...]:
    """Return the layers of rows, ascending; only layer 0 if no row has a layer."""
    return tuple(sorted({row.layer for row in rows if row.layer is not None})) or (0,)


def one_each(values: Any, count: int, name: str) -> list[Any]:
    """Return one value for each of `count` prompts, given a list or a shared value."""
    listed = isinstance(values, (list, tuple))
    if listed and count > 1 and len(values) != count:
        raise ProgramError(f"expected one value, or one for each of {count} prompts, got {len(values)}", name)
    return list(values) if listed and len(values) == count else [values] * count


class Alignment(msgspec.Struct, frozen=True):
    """`pairs` of (clean, corrupt) positions, ascending, and each prompt's positions without a partner."""

    pairs: tuple[tuple[int, int], ...]
    clean_only: tuple[int, ...]
    corrupt_only: tuple[int, ...]


def align(clean: Sequence[int], corrupt: Sequence[int], matched: bool = False) -> Alignment:
    """Align prompts of equal length position by position, others by their common prefix and suffix; positions in
    between have no partner. Raises `TokensError` if nothing can be paired, unless the caller adds pairs (`matched`).
    """
    shorter = min(len(clean), len(corrupt))
    if len(clean) == len(corrupt):
        return Alignment(tuple((p, p) for p in range(shorter)), (), ())
    prefix = next((p for p in range(shorter) if clean[p] != corrupt[p]), shorter)
    rest = shorter - prefix
    suffix = next((s for s in range(rest) if clean[-1 - s] != corrupt[-1 - s]), rest)
    pairs = [(p, p) for p in range(prefix)]
    pairs += [(len(clean) - s, len(corrupt) - s) for s in range(suffix, 0, -1)]
    if not pairs and not matched:
        raise TokensError(
            f"cannot align the clean and corrupt prompts ({len(clean)} and {len(corrupt)} tokens): they share no first "
            "or last token; pass prompts that differ in the middle, or pair tokens with "
            "pc.studies.Match(clean=…, corrupt=…)", "positions"
        )  # fmt: skip
    return Alignment(
        tuple(pairs), tuple(range(prefix, len(clean) - suffix)), tuple(range(prefix, len(corrupt) - suffix))
    )


def with_pairs(alignment: Alignment, pairs: Iterable[tuple[int, int]]) -> Alignment:
    """Return an alignment with `pairs` added; they replace existing pairs of the same positions."""
    chosen = set(pairs)
    clean, corrupt = ({pair[side] for pair in chosen} for side in (0, 1))
    paired = chosen | {pair for pair in alignment.pairs if pair[0] not in clean and pair[1] not in corrupt}
    alone = [sorted({*only, *(pair[side] for pair in alignment.pairs)} - {pair[side] for pair in paired})
             for side, only in enumerate((alignment.clean_only, alignment.corrupt_only))]  # fmt: skip
    return Alignment(tuple(sorted(paired)), *map(tuple, alone))


def matched_label(written: str, read: str) -> str:
    """Return the label of matched tokens. Leading and trailing spaces of the tokens are made visible."""
    return f"{visible(written)} ← {visible(read)}"


class EncodedPrompt(msgspec.Struct, frozen=True):
    """A prompt as token ids; `text` is its source if known, and `shown` its form for display."""

    ids: tuple[int, ...]
    text: str | None
    shown: str

    @property
    def prompt(self) -> str | list[int]:
        """The prompt in a form that `lm.run` accepts."""
        return list(self.ids) if self.text is None else self.text


def ask(lm: LM, prompts: Sequence[Any], chat: bool = False, path: str = "prompts") -> list[EncodedPrompt]:
    """Encode prompts as token ids. With `chat` each is the text of a user turn, or a list of messages.

    Raises: `ProgramError` for anything but a list of prompts, and for an invalid prompt, with its path.
    """
    if not (prompts := as_items(prompts, path)):
        raise ProgramError("expected at least one prompt, got none", path)
    asked = []
    for i, prompt in enumerate(prompts):
        try:
            asked.append(_chat(lm, prompt) if chat else _plain(lm, prompt))
        except PatchclampError as error:
            raise error.under(f"{path}[{i}]") from None
    return asked


def _plain(lm: LM, prompt: Any) -> EncodedPrompt:
    if isinstance(prompt, str):
        return EncodedPrompt(tuple(lm.tokens(prompt)), prompt, prompt)
    prompt = as_plain(prompt)
    if not isinstance(prompt, (list, tuple)) or not all(map(is_token_id, prompt)):
        raise ProgramError(f"expected a prompt as text or token ids, got {type(prompt).__name__} {prompt!r:.100}")
    ids = tuple(int(i) for i in prompt)
    if outside := [token for token in ids if not 0 <= token < lm.model.d_vocab]:
        raise TokensError(f"token id {outside[0]} is out of range for a vocabulary of {lm.model.d_vocab}")
    return EncodedPrompt(ids, None, lm.tokenizer.decode(list(ids)))


def _chat(lm: LM, prompt: Any) -> EncodedPrompt:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, (list, tuple)) or not all(isinstance(one, dict) for one in messages) or not messages:
        raise ProgramError("expected text or a list of messages with role and content, with chat=True")
    return EncodedPrompt(tuple(lm.tokens(messages=messages)), None, str(messages[-1].get("content", "")))


def content_hash(asked: Iterable[EncodedPrompt]) -> str:
    """Return the SHA-256 of prompts, in hex: equal for the same token ids in the same order."""
    return hashlib.sha256(msgspec.json.encode([one.ids for one in asked])).hexdigest()


P = ParamSpec("P")
R = TypeVar("R")


def check_whole(value: Any, path: str, least: int = 0, most: float = 2**53) -> int:
    """Check that a value is an integer from `least` to `most`, and return it. Raises `ProgramError` otherwise."""
    if is_token_id(value) and value > most:
        raise ProgramError(f"expected an integer of at most {most}, got {value}", path)
    if not is_token_id(value) or value < least:
        raise ProgramError(f"expected an integer of at least {least}, got {value!r}", path)
    return int(value)


def as_sites(sites: Any, path: str) -> list[Any]:
    """Return one or several sites as a list. Raises `ProgramError` for anything else."""
    if not (items := [sites] if isinstance(sites, (str, Site, At, Op)) else as_items(sites, path)):
        raise ProgramError("expected at least one site, got none", path)
    return items


def as_text(text: Any, path: str) -> str:
    if not isinstance(text, str):
        raise ProgramError(f"expected text, got {type(text).__name__} {text!r:.100}", path)
    return text


def as_texts(texts: Any, path: str) -> list[str]:
    return [as_text(text, f"{path}[{i}]") for i, text in enumerate(as_items(texts, path))]


def as_feature_numbers(ids: Any, path: str) -> list[int]:
    """Check a list of distinct SAE feature ids."""
    numbers = [check_whole(one, f"{path}[{i}]") for i, one in enumerate(as_items(ids, path))]
    if len(set(numbers)) < len(numbers):
        raise ProgramError(f"expected distinct features, got {numbers}", path)
    return numbers


def as_float(value: Any, path: str) -> float:
    """Read a number as `as_number` does, with the path in its errors."""
    try:
        return as_number(value)
    except ProgramError as error:
        raise error.under(path) from None


def as_ascending(values: Any, path: str) -> tuple[float, ...]:
    """Check ascending, distinct numbers, such as strengths. An error's path names the invalid item."""
    numbers = tuple(as_float(value, f"{path}[{i}]") for i, value in enumerate(as_items(values, path)))
    if not numbers or list(numbers) != sorted(set(numbers)):
        raise ProgramError(f"expected ascending, distinct numbers, got {numbers}", path)
    return numbers


def as_seeds(seeds: Any, path: str) -> tuple[int, ...]:
    """Check one or more distinct seeds."""
    numbers = tuple(check_whole(seed, f"{path}[{i}]") for i, seed in enumerate(as_items(seeds, path)))
    if not 0 < len(set(numbers)) == len(numbers):
        raise ProgramError(f"expected at least one seed and no duplicates, got {list(numbers)}", path)
    return numbers


def as_positive(value: Any, path: str) -> float:
    if (number := as_float(value, path)) > 0:
        return number
    raise ProgramError(f"expected a number above 0, got {value!r}", path)


def as_path(path: Any, name: str) -> Any:
    """Read a path to a file, or a journal."""
    return path if isinstance(path, Journal) else as_file(path, name)


def as_prompt(prompt: Any, path: str) -> Any:
    """Read one prompt. Raises `ProgramError` for a list of prompts."""
    prompt = as_plain(prompt, path)
    ids = isinstance(prompt, (list, tuple)) and len(prompt) > 0 and all(map(is_token_id, prompt))
    image = isinstance(prompt, Mapping) and not prompt.keys().isdisjoint(("prompt", "prompt_token_ids"))
    if not ids and not image and not isinstance(prompt, str):
        raise ProgramError(f"expected one prompt (text or ids), got {type(prompt).__name__} {prompt!r:.100}", path)
    return prompt


def as_layers(layers: Any, path: str) -> Any:
    """Read layers: an integer, a range, a range as text, or a list of these."""
    try:
        if isinstance(layers, (slice, Range)):
            return _range(layers)
        if isinstance(layers, str):
            return layers if parse_index(layers) is not None else None
        layers = as_plain(layers, path)
        if isinstance(layers, SupportsIndex) and getattr(layers, "shape", ()) == ():
            return as_integer(layers)
        if not (items := as_items(layers, path)):
            raise ProgramError("expected at least one layer, got none", path)
        return [_range(one) if isinstance(one, (slice, Range)) else as_integer(one) for one in items]
    except ProgramError as error:
        raise error if error.path else error.under(path) from None


def _range(layers: slice | Range) -> Range:
    """Read a range with whole-number ends."""
    return Range.of(slice(layers.start, layers.stop, layers.step))


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function whose parameters are annotated like study fields; its arguments are parsed and checked before it
    starts. Raises `ProgramError` for a missing, unknown or surplus argument, and for an invalid value."""
    kinds = {name: one.kind for name, one in inspect.signature(function).parameters.items()}
    others = inspect.Parameter.VAR_KEYWORD in kinds.values()
    fields = fields_of(function, lambda kind: kind != inspect.Parameter.VAR_KEYWORD)
    ordered = [name for name in fields if kinds[name] == inspect.Parameter.POSITIONAL_OR_KEYWORD]
    required = [name for name, field in fields.items() if field.default is REQUIRED]

    @functools.wraps(function)
    def study(*args: P.args, **kwargs: P.kwargs) -> R:
        given = bind_call(function.__name__, list(fields), ordered, required, args, kwargs, others)
        read = {name: fields[name].value(value) if name in fields else value for name, value in given.items()}
        return function(**read)  # pyright: ignore[reportCallIssue]

    return study


def numbers_of(layers: Any, path: str = "layers") -> list[int]:
    """Return one or several layers as a list. Raises `ProgramError` for anything else."""
    layers = as_plain(layers, path)
    several = as_items(layers, path) if isinstance(layers, Iterable) else [layers]
    for layer in several:
        if not is_token_id(layer):
            raise ProgramError(f"expected an integer layer, got {layer!r}", path)
    return [int(layer) for layer in several]


# -- the types of study fields, each with its reader


def as_position(text: str) -> Any:
    """Parse a selection from the command line: a number, the text of a selection, or a `Match` as JSON."""
    if text.lstrip().startswith("{"):
        return msgspec.json.decode(text)
    return int(text) if re.fullmatch(r"\s*-?\d+\s*", text) else text


def prompts_in(file: str) -> list[str]:
    """Return a file's prompts, one per line; empty lines are skipped, and \\n is a line break."""
    prompts = [line.replace("\\n", "\n") for line in lines_of(Path(file)) if line.strip()]
    if not prompts:
        raise ProgramError(f"expected prompts, one per line, got an empty file: {file}")
    return prompts


def edits_in(text: str) -> list[Op]:
    """Parse a command-line option: one op or a list of ops as JSON, a .json file, or a mix of named programs."""
    if text.endswith(".json"):
        text = "\n".join(lines_of(Path(text)))
    if not text.lstrip().startswith(("{", "[")):
        return list(Program.parse(text).edits)
    data = parse_json(text)
    whole = isinstance(data, dict) and "edits" in data
    program = data if whole else {"edits": data if isinstance(data, list) else [data]}
    read = from_dict(program)
    if read.readout_path:
        raise ProgramError("expected edits only, got a capture, whose rows are not returned here", read.readout_path)
    return list(read.edits)


def sae_of(text: str) -> SAE | str:
    """Parse an SAE from the command line: its folder or file, or its name on a server."""
    return SAE.load(text) if Path(text).exists() else text


def as_sae(sae: Any, path: str) -> SAE | str:
    if not isinstance(sae, (SAE, str)):
        raise ProgramError(
            f"expected an SAE or the name of an attached SAE, got {type(sae).__name__} {sae!r:.100}", path
        )
    return sae


@contextlib.contextmanager
def placed_sae(lm: LM, sae: SAE | str, at: Any = None) -> Iterator[Dictionary]:
    """Attach an SAE for the duration of the context, unless it is already attached at that site."""
    known = lm.sites.dictionaries
    if isinstance(sae, str):
        if sae not in known:
            raise unknown("attached SAE", sae, known, "sae")
        yield known[sae]
        return
    for one in known.values():
        if one.card.content == sae.content and str(at or sae.site or one.card.at) == one.card.at:
            yield one
            return
    name = f"study-{sae.content[:16]}"
    lm.attach(sae, at, name=name)
    try:
        yield known[name]
    finally:
        lm.detach(name)


@contextlib.contextmanager
def attached(lm: LM, sae: SAE | str, at: Any = None) -> Iterator[tuple[SAE, Dictionary]]:
    """Attach like `placed_sae`, and also yield the SAE. Raises `ProgramError` for an SAE that only the server has."""
    with placed_sae(lm, sae, at) as where:
        if (own := where.sae if isinstance(sae, str) else sae) is None:
            raise ProgramError(f"only the server has the weights of {sae!r}: pass the SAE itself, pc.SAE.load(path), "
                               "or run the study on the server", "sae")  # fmt: skip
        yield own, where


def lines_of(file: Path) -> list[str]:
    """Return a text file's lines. Unlike `str.splitlines`, it does not split at U+2028, which JSON need not escape."""
    try:
        return file.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ProgramError(f"cannot read {file}: {error}") from None


def _receiver(text: str) -> str | list[str]:
    return text.split("+") if "+" in text else text


def as_match(value: Any, path: str) -> Match:
    match = Match.of(value, path)
    if match is None:
        raise ProgramError(f"expected a Match with clean and corrupt, got {type(value).__name__} {value!r:.100}", path)
    return match


def as_progress(show: Any, path: str) -> bool | Reporter:
    return show if isinstance(show, Reporter) else as_flag(show, path)


def _frozen(names: Any, path: str) -> Any:
    return names if isinstance(names, str) else as_texts(names, path)


Text = Annotated[str, Arg(as_text)]
MetricField = Annotated[Any, Arg(Metric.of)]
Whole = Annotated[int, Arg(check_whole)]
_at_least_one = functools.partial(check_whole, least=1, most=math.inf)
Positive = Annotated[int, Arg(_at_least_one)]
OptionalCount = Annotated[int | None, Arg(_at_least_one, int)]
Flag = Annotated[bool, Arg(as_flag)]
Prompt = Annotated[Any, Arg(as_prompt)]
Prompts = Annotated[Any, Arg(many=True)]
PromptFile = Annotated[Any, Arg(parse=prompts_in)]
Answer = Annotated[Any, Arg()]
Answers = Annotated[Any, Arg(many=True)]
Subject = Annotated[Any, Arg()]
Sites = Annotated[Any, Arg(as_sites, many=True, option="site")]
SiteField = Annotated[Any, Arg()]
SAEField = Annotated[Any, Arg(as_sae, sae_of)]
FeatureIds = Annotated[Any, Arg(as_feature_numbers, int, many=True, option="feature")]
Kept = Annotated[int, Arg(functools.partial(check_whole, least=1, most=MAX_TOP))]
Senders = Annotated[Any, Arg(as_sites, many=True, option="sender")]
Receivers = Annotated[Any, Arg(as_sites, _receiver, many=True, option="receiver")]
Frozen = Annotated[Any, Arg(_frozen, many=True)]
Layers = Annotated[Any, Arg(as_layers)]
Positions = Annotated[Any, Arg(parse=as_position, many=True)]
Position = Annotated[Any, Arg(parse=as_position)]
Selected = Annotated[TokensLike, Arg()]
Matched = Annotated[Any, Arg(as_match, as_position)]
ChosenTokens = Annotated[Any, Arg(as_items, many=True, option="token")]
Labels = Annotated[Any, Arg(as_texts, None)]
Parts = Annotated[Any, Arg(as_texts, many=True)]
Ascending = Annotated[Any, Arg(as_ascending, float, many=True, option="strength")]
Seeds = Annotated[Any, Arg(parse=int)]
Std = Annotated[float | None, Arg(as_positive, float)]
SourceField = Annotated[Any, Arg(option="source")]
MaskField = Annotated[Any, Arg(option="mask")]
OptionalText = Annotated[str | None, Arg(as_text)]
PythonOnly = Annotated[Any, Arg(parse=None, served=False)]
Progress = Annotated[bool | Reporter | None, Arg(as_progress)]
ResumeFile = Annotated[Resumable | None, Arg(as_path)]
OnLM = Annotated[LM | None, Arg(as_lm)]
