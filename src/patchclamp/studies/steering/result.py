"""Steering vectors as a result: a vector a layer, how they were made and checked, and their way into a run.

L layers · W numbers of a vector
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from patchclamp import __version__
from patchclamp.errors import ProgramError, ShapeError, UnsupportedSite
from patchclamp.language import Add, Site, Vector
from patchclamp.language.tokens import Tokens, TokensLike, every, read_tokens
from patchclamp.language.values import as_array
from patchclamp.studies.inputs import as_text, numbers_of
from patchclamp.studies.steering import gguf
from patchclamp.studies.study import Provenance, StudyResult

if TYPE_CHECKING:
    import pandas

    from patchclamp.plots import Curves

IMPORTED = "imported"  # the method of vectors that came from elsewhere


class PromptSet(msgspec.Struct, frozen=True):
    """Prompts that vectors were made of: how many, how many of them were held out, and the hash of their token ids
    (`studies.prompts.content_hash`)."""

    count: int
    held_out: int
    content: str


class SteeringVectors(StudyResult, frozen=True, eq=False, kw_only=True):
    """`vectors` [L, W] fp32, one for each of `layers`, at `site`; scale 1 moves the negative prompts' mean to the
    positive ones', along the direction.

    method: "mean", "pca", "probe" or "imported" · tokens: which of a prompt were read, as text; of several the mean
    accuracy, separation [L]: of the held-out prompts (`directions.Check`), NaN where none were held out
    effect [L]: how much the layer's vector, added once, moves the score of a behaviour on the held-out negative
        prompts (`strength_curve`), in nats; NaN where no behaviour was given
    row_norm [L]: the mean length of the rows that were read: how large a vector is beside them
    best: the layer of the largest effect, or without a behaviour of the highest accuracy, among equals of the largest
        separation; None if nothing was held out
    family: the model's site table, which GGUF files have as a hint
    """

    method: str
    site: str
    tokens: str
    layers: tuple[int, ...]
    vectors: np.ndarray
    accuracy: np.ndarray
    separation: np.ndarray
    effect: np.ndarray
    row_norm: np.ndarray
    best: int | None
    positive: PromptSet
    negative: PromptSet
    chat: bool
    family: str

    def vector(self, layer: int | None = None) -> np.ndarray:
        """The vector [W] of a layer, of the best one if not given: a copy."""
        layer = self.best if layer is None else layer
        if layer is None:
            raise ProgramError(f"no layer is known to be the best: name one of {list(self.layers)}", "layer")
        if len(chosen := self._chosen(layer, "layer")) != 1:
            raise ProgramError(f"expected one layer, got {layer!r:.100}", "layer")
        return self.vectors[self.layers.index(chosen[0])].copy()

    def edits(
        self, scale: float = 1.0, *, layers: Iterable[int] | int | None = None, tokens: TokensLike = every
    ) -> tuple[Add, ...]:
        """Edits for `lm.run(..., edits=vectors.edits(2.0))`: the vector is added at the best layer, or where none is
        known at all of them, as llama.cpp does with a file; or at `layers`.

        Raises: `ProgramError` for a layer that has no vector.
        """
        selection: Tokens = read_tokens(tokens, "tokens")
        return tuple(
            Add(self.vectors[self.layers.index(layer)], at=Site(self.site, layer), tokens=selection, scale=scale)
            for layer in self._chosen(layers)
        )

    def _chosen(self, layers: Iterable[int] | int | None, path: str = "layers") -> list[int]:
        if layers is None:
            return list(self.layers) if self.best is None else [self.best]
        chosen = numbers_of(layers, path)
        missing = [layer for layer in chosen if layer not in self.layers]
        if missing or not chosen:
            raise ProgramError(f"there are vectors of layers {list(self.layers)}, not of {missing or chosen}", path)
        return chosen

    def directions(self, layers: Iterable[int] | int | None = None) -> dict[int, np.ndarray]:
        """Copies of the vectors by layer, as repeng's `ControlVector.directions` has them; of the layers that `edits`
        takes.

        Raises: `UnsupportedSite` for vectors of another site than `resid_post`.
        """
        if self.site != "resid_post":
            raise UnsupportedSite(f"control vectors act after a layer, at resid_post; these are of {self.site}", "site")
        return {layer: self.vectors[self.layers.index(layer)].copy() for layer in self._chosen(layers)}

    def to_gguf(self, path: str | Path, *, layers: Iterable[int] | int | None = None) -> Path:
        """Writes a control vector for llama.cpp and repeng: with `--control-vector-scaled FILE:2` llama.cpp does what
        `edits(2.0)` of the same layers does here. Raises: as `directions` and `gguf.write`."""
        return gguf.write(path, self.directions(layers), self.family)

    @classmethod
    def from_gguf(cls, path: str | Path) -> SteeringVectors:
        """Reads a control vector of llama.cpp or repeng. Raises: as `gguf.read`."""
        directions, hint = gguf.read(path)
        return cls.from_directions(directions, hint)

    @classmethod
    def from_directions(cls, directions: Mapping[int, Any], model_hint: str = "") -> SteeringVectors:
        """From vectors [D] by layer, as repeng's `ControlVector.directions`; layers may count from the end nowhere.

        Raises: `ShapeError` where they are not of one width.
        """
        if not isinstance(directions, Mapping):
            raise ShapeError(f"expected vectors by layer, got {type(directions).__name__}", "directions")
        model_hint = as_text(model_hint, "model_hint")
        layers = tuple(sorted(numbers_of(list(directions), "directions")))
        rows = [Vector.of(as_array(directions[layer], f"directions[{layer}]")).array() for layer in layers]
        zero = [layer for layer, row in zip(layers, rows, strict=True) if not row.any()]
        if zero:
            raise ShapeError("expected a direction, got all zeros", f"directions[{zero[0]}]")
        if not rows or layers[0] < 0 or {row.shape for row in rows} != {(rows[0].size,)}:
            raise ShapeError("directions are vectors [D] of one width, by layer, counted from 0", "directions")
        unknown, none = np.full(len(layers), np.nan), PromptSet(0, 0, "")
        return cls(
            provenance=Provenance(model_hint, "", "float32", __version__), method=IMPORTED, site="resid_post",
            tokens="", layers=layers, vectors=np.stack(rows), accuracy=unknown, separation=unknown, effect=unknown,
            row_norm=unknown, best=None, positive=none, negative=none, chat=False, family=model_hint,
        )  # fmt: skip

    def to_frame(self) -> pandas.DataFrame:
        """One row a layer: the vector's length, that of the rows it was made of, and the held-out check."""
        import pandas

        return pandas.DataFrame({
            "layer": self.layers, "norm": np.linalg.norm(self.vectors, axis=1), "row_norm": self.row_norm,
            "accuracy": self.accuracy, "separation": self.separation, "effect": self.effect,
        })  # fmt: skip

    def curves(self) -> Curves:
        """The held-out check against the layer, with the texts of its picture."""
        from patchclamp.studies.steering.curves import of_layers

        return of_layers(self)

    def plot(self, path: str | Path) -> Path:
        """Draws the held-out check against the layer into a PNG (or any format of matplotlib)."""
        from patchclamp.plots import curves_png

        return curves_png(self.curves(), path)

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained page: the held-out check against the layer, with hover."""
        from patchclamp.plots import curves_html

        return curves_html(self.curves(), path)

    def __repr__(self) -> str:
        best = "" if self.best is None else f", best layer {self.best}"
        return f"<SteeringVectors {self.method}: {len(self.layers)} layers of {self.site}{best}>"
