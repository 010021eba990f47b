"""The recipe says what a data set is made of; its hash names the data set's folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from patchclamp.studies.harvest.filters import Filters

FORMAT = 1
NAME_DIGITS = 16
NORMS = "norms of whole rows"


class StoredSite(msgspec.Struct, frozen=True):
    """A site of the data set.

    name: such as "resid_post[3]"
    width: numbers of a stored row
    captured: numbers of a captured row
    projection: the hash of the matrix between them, "" without one
    """

    name: str
    width: int
    captured: int
    projection: str = ""

    @property
    def file(self) -> str:
        """Its file's name in a shard."""
        words = self.name.replace("]", "").replace("[", ".").replace(", ", ".").replace(":", "-")
        return f"{words}.safetensors"


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a data set is made of. Whatever changes a byte of it is here.

    model: hub id, or the last name of a folder · weights: of a folder's files, as `studies.study` hashes them; ""
    of a hub id · engine, settings: what computed it, with version · documents: hash of all tokens, and
    of where documents and prompts begin · sites · dtype: of the stored rows · sums: whether a row is the sum over a
    document · filters · seed · parts · shard_rows
    """

    model: str
    weights: str
    engine: str
    settings: str
    weights_dtype: str
    documents: str
    sites: tuple[StoredSite, ...]
    dtype: str
    sums: bool
    filters: Filters
    seed: int
    parts: int
    shard_rows: int
    format: int = FORMAT

    @property
    def norms(self) -> StoredSite | None:
        """The norms of whole rows, a number for each site, where caps need them and rows are stored reduced. With sums
        they are 0 of a document that has rows within the caps, and else NaN. Its files are not part of the data set."""
        reduced = self.sums or any(site.projection for site in self.sites)
        return StoredSite(NORMS, len(self.sites), 0) if reduced and self.filters.caps_norms else None

    @property
    def written(self) -> tuple[StoredSite, ...]:
        """What is written while a part is being filled."""
        return self.sites if self.norms is None else (*self.sites, self.norms)

    def place(self, folder: Path, site: StoredSite) -> Path:
        """The file of a site in a shard that is being filled in `folder`; that of norms is beside the folder."""
        return folder.with_name(f"{folder.name}.{site.file}") if site.name == NORMS else folder / site.file

    @property
    def name(self) -> str:
        """The hash that names the folder."""
        content = msgspec.json.encode(self, order="deterministic")
        if self.norms is not None:  # 0.1.0 compared the caps with reduced rows: its folders must not be resumed
            content += NORMS.encode()
        return hashlib.sha256(content).hexdigest()[:NAME_DIGITS]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`harvest.json`: the recipe, and what there will be when all is done.

    documents, tokens, cut_tokens: of the data set · part_rows: rows of each part, before caps on norms
    """

    recipe: Recipe
    documents: int
    tokens: int
    cut_tokens: int
    part_rows: tuple[int, ...]

    @property
    def shards(self) -> list[str]:
        """The names of all shards, in order."""
        size = self.recipe.shard_rows
        counts = [-(-rows // size) for rows in self.part_rows]
        return [shard_name(part, shard) for part, count in enumerate(counts) for shard in range(count)]


def shard_name(part: int, shard: int) -> str:
    return f"shard-{part:04d}-{shard:05d}"


def part_of(name: str) -> int:
    """The part that a shard of that name is of."""
    return int(name.split("-")[1])
