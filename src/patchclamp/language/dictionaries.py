"""Dictionaries: sparse autoencoders and transcoders attached to a model's sites, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from patchclamp.errors import ProgramError
from patchclamp.language.sae import SAE

PRECISIONS = ("float32", "model")  # dtype of an SAE's matrices; "model": the model's dtype


class FeatureRows(NamedTuple):
    """Weights of features of a local SAE (`SAE.is_local`). Values: q = encoder · row + bias if q > threshold, else 0.

    encoder, decoder: [k, D], [k, O] · bias, threshold: [k]
    """

    encoder: np.ndarray
    bias: np.ndarray
    threshold: np.ndarray
    decoder: np.ndarray

    @classmethod
    def of(cls, sae: SAE, ids: Sequence[int]) -> FeatureRows:
        """Select the features `ids`; a gated SAE's gain and offset are folded into encoder, bias and threshold."""
        some = list(ids)
        encoder, bias = sae.encoder[some].astype(np.float64), sae.encoder_bias[some].astype(np.float64)
        threshold = np.zeros(len(some)) if sae.threshold is None else sae.threshold[some].astype(np.float64)
        if sae.gain is not None and sae.offset is not None:
            gain, offset = sae.gain[some].astype(np.float64), sae.offset[some].astype(np.float64)
            encoder, bias, threshold = gain[:, None] * encoder, gain * bias + offset, gain * threshold + offset
        encoder, bias, threshold = (each.astype(np.float32) for each in (encoder, bias, np.maximum(threshold, 0)))
        return cls(encoder, bias, threshold, sae.decoder[some])


class DictionaryCard(msgspec.Struct, frozen=True):
    """Metadata of an attached SAE, for binding the programs that use it.

    at, to: the text forms of the sites that the SAE reads and writes
    features: the number of features
    is_local: True if each feature depends on a single product with the row (`SAE.is_local`)
    normalizes: True if rows are normalised before the encoder, and outputs scaled back
    content: the SAE's content hash (`SAE.content`)
    dtype: the dtype of the SAE's matrices and input rows
    """

    name: str
    at: str
    to: str
    features: int
    is_local: bool
    normalizes: bool
    content: str
    dtype: str = "float32"


class FeatureReader(msgspec.Struct, frozen=True, tag="features"):
    """Reads features of the SAE `name`: each row's largest features, or the features `ids`.

    content: the SAE's content hash; "" accepts any SAE with this name
    first: the first column that the SAE reads, if it reads only part of a row
    """

    name: str
    ids: tuple[int, ...] | None = None
    content: str = ""
    first: int = 0


class SAEOption(NamedTuple):
    """An SAE that an engine attaches when it starts: `NAME=PATH`, or `NAME=PATH@SITE`.

    site: the site that the SAE reads; "": the site given in the SAE's file
    """

    name: str
    path: str
    site: str = ""

    @classmethod
    def of(cls, words: str) -> SAEOption:
        """Parse an option's text. Raises `ProgramError` if it is malformed."""
        name, equals, rest = words.partition("=")
        path, _, site = rest.rpartition("@") if "@" in rest else (rest, "", "")
        if not (name.strip() and equals and path.strip()):
            raise ProgramError(f"expected NAME=PATH@SITE, such as l20=./sae@resid_post[20], got {words!r:.200}")
        return cls(name.strip(), path.strip(), site.strip())


def to_file(sae: SAE, path: str) -> None:
    """Write an SAE in patchclamp's format, for another process (`SAE.save` writes SAELens' format)."""
    from safetensors.numpy import save_file

    fields = msgspec.structs.asdict(sae)
    arrays = {name: each for name, each in fields.items() if isinstance(each, np.ndarray)}
    rest = {name: each for name, each in fields.items() if name not in arrays}
    save_file({name: np.ascontiguousarray(each) for name, each in arrays.items()}, path,
              {"fields": msgspec.json.encode(rest).decode()})  # fmt: skip


def of_file(path: str) -> SAE:
    """Read a file written by `to_file`."""
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  a file, not a dict
        return SAE(**arrays, **msgspec.json.decode(file.metadata()["fields"]))
