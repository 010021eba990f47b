"""Sparse autoencoders and transcoders in one format, independent of the package that trained them.

    N rows · D row width · F features · O output width (D, unless it is a transcoder with another width)

`sae_formats` folds each format's extras (decoder biases subtracted from the input, decoder norms, constant scales) into
these arrays.
"""

from __future__ import annotations

import functools
import hashlib
import os
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from patchclamp.errors import PatchclampError, ProgramError, ShapeError
from patchclamp.language.sae_formats import Fold, errors_of, read_parts, write_saelens
from patchclamp.language.site import SPECS, parse_site
from patchclamp.language.structs import PublicStruct
from patchclamp.language.values import as_array

if TYPE_CHECKING:
    import numpy as np

Normalize = Literal["none", "layer_norm", "rms"]
SHAPES = {
    "encoder": "FD", "encoder_bias": "F", "decoder": "FO", "decoder_bias": "O", "threshold": "F", "gain": "F",
    "offset": "F", "skip": "OD",
}  # fmt: skip
EPSILON = 1e-5  # added to layer_norm's standard deviation, as in SAELens


class SAE(PublicStruct, frozen=True, eq=False, dict=True):
    """A sparse autoencoder or transcoder, for example from a file: `pc.SAE.load(path)`.

    pre = encoder · row + encoder_bias. A feature is active where pre > threshold (0 if None), with the value
    relu(gain · pre + offset), or relu(pre) without a gain. With `k`, only the k largest values of a row are kept. The
    output is features · decoder + decoder_bias, plus skip · row.

    encoder: [F, D]. All arrays are fp32 and read-only
    encoder_bias, decoder, decoder_bias: [F], [F, O], [O]
    threshold: [F], or None
    gain, offset: [F], for gated autoencoders; otherwise both None
    k: the number of features kept per row (TopK), or None for all; ties keep the lower index
    normalize: the row's normalisation before the encoder, undone on the output: "none"; "layer_norm", (row -
        mean) / (std + 1e-5), with the unbiased standard deviation; "rms", row / sqrt(mean(row²))
    skip: [O, D], a transcoder's linear skip connection, applied to the unnormalised row; or None
    site: the site it was trained on, such as "resid_post[20]"; "" if the file does not specify one
    site_out: the site it writes; "" if the same as `site`. A transcoder reads `mlp_in` and writes `mlp_out`
    model: the model it was trained on, or ""

    Sources: Cunningham et al. 2023 (arXiv:2309.08600), Gao et al. 2024 (TopK, arXiv:2406.04093), Rajamanoharan et al.
    2024 (gated, arXiv:2404.16014; JumpReLU, arXiv:2407.14435), Dunefsky et al. 2024 (transcoders, arXiv:2406.11944).
    """

    encoder: np.ndarray
    encoder_bias: np.ndarray
    decoder: np.ndarray
    decoder_bias: np.ndarray
    threshold: np.ndarray | None = None
    gain: np.ndarray | None = None
    offset: np.ndarray | None = None
    k: int | None = None
    normalize: Normalize = "none"
    skip: np.ndarray | None = None
    site: str = ""
    site_out: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        for name, letters in SHAPES.items():
            if (given := getattr(self, name)) is not None:
                msgspec.structs.force_setattr(self, name, _frozen(given, name, letters, sizes))
        if (self.gain is None) != (self.offset is None):
            raise ProgramError("expected gain and offset together", "offset" if self.offset is None else "gain")
        if self.k is not None and not (type(self.k) is int and 1 <= self.k <= self.n_features):
            raise ProgramError(f"expected an integer from 1 to {self.n_features}, got {self.k!r:.100}", "k")
        for name in ("site", "site_out"):
            msgspec.structs.force_setattr(self, name, _one_site(getattr(self, name), name))
        if self.normalize not in get_args(Normalize):
            raise ProgramError(f"expected {', '.join(get_args(Normalize))}, got {self.normalize!r:.100}", "normalize")
        if self.normalize != "none" and len(self.decoder_bias) != self.width:
            raise ShapeError(f"normalize requires {self.width} outputs, got {len(self.decoder_bias)}", "decoder_bias")

    @property
    def n_features(self) -> int:
        return len(self.encoder)

    @property
    def width(self) -> int:
        """D, the width of input rows."""
        return self.encoder.shape[1]

    @property
    def is_local(self) -> bool:
        """True if each feature increases with its own pre-activation, and pre-activations are linear in the row."""
        rises = self.gain is None or bool((self.gain > 0).all())
        return self.k is None and self.normalize == "none" and rises

    @functools.cached_property
    def content(self) -> str:
        """SHA-256 of everything that affects results, in hex. Cached."""
        digest = hashlib.sha256(repr((self.k, self.normalize)).encode())
        for name in SHAPES:
            if (array := getattr(self, name)) is not None:
                digest.update(f"{name} {array.shape}".encode())
                digest.update(array)
        return digest.hexdigest()

    def encode(self, rows: Any) -> np.ndarray:
        """Return the features [N, F], fp32, of rows [N, D]."""
        import numpy as np

        mean, scale = self.moments(rows := self._rows(rows, "rows", self.width))
        normed = rows if scale is None else (rows - mean) / (scale + (EPSILON if self.normalize == "layer_norm" else 0))
        pre = normed @ self.encoder.T + self.encoder_bias
        values = pre if self.gain is None else self.gain * pre + self.offset
        is_off = pre <= (0 if self.threshold is None else self.threshold)  # False for NaN, which is kept
        values = np.where(is_off, 0, np.maximum(values, 0))
        if self.k is None or self.k == self.n_features:
            return values
        least = np.partition(values, -self.k, axis=1)[:, -self.k, None]  # the k-th largest
        above, ties = values > least, values == least
        kept = above | (ties & (ties.cumsum(1) <= self.k - above.sum(1, keepdims=True)))
        return np.where(kept | np.isnan(values), values, 0)

    def decode(self, features: Any, rows: Any = None) -> np.ndarray:
        """Return the output [N, O], fp32, for features [N, F]. Raises `ProgramError` without `rows` [N, D] if the SAE
        normalises or has a skip connection."""
        import numpy as np

        out = self._rows(features, "features", self.n_features) @ self.decoder + self.decoder_bias
        if self.normalize == "none" and self.skip is None:
            return out
        if rows is None:
            raise ProgramError("expected rows, since this SAE normalises or has a skip connection", "rows")
        if len(rows := self._rows(rows, "rows", self.width)) != len(out):
            raise ShapeError(f"expected {len(out)} rows, one per row of features, got {len(rows)}", "rows")
        mean, scale = self.moments(rows)
        out = out if scale is None else out * scale + mean
        return np.asarray(out if self.skip is None else out + rows @ self.skip.T, np.float32)

    def reconstruct(self, rows: Any) -> np.ndarray:
        """Return `decode(encode(rows), rows)`, the output [N, O] for rows [N, D]."""
        return self.decode(self.encode(rows), rows)

    def moments(self, rows: np.ndarray) -> tuple[np.ndarray | float, np.ndarray | None]:
        """Return each row's mean (0 unless `normalize` subtracts it), and its divisor (None: 1)."""
        import numpy as np

        if self.normalize == "none":
            return 0.0, None
        if self.normalize == "layer_norm":
            return rows.mean(1, keepdims=True), rows.std(1, ddof=1, keepdims=True)
        size = np.sqrt(np.square(rows).mean(1, keepdims=True))
        return 0.0, np.maximum(size, np.finfo(np.float32).tiny)  # a zero row stays zero

    def _rows(self, numbers: Any, name: str, width: int) -> np.ndarray:
        array = as_array(numbers, name)
        if array.ndim != 2 or array.shape[1] != width:
            raise ShapeError(f"expected [N, {width}], got {list(array.shape)}", name)
        return array

    @classmethod
    def load(cls, path: str | os.PathLike[str], **which: Any) -> SAE:
        """Load an SAE or transcoder from a folder or file; the format is detected.

        SAELens, Gemma Scope, Qwen-Scope, Llama Scope, dictionary_learning and EleutherAI sparsify are read without
        their packages; `.pt` files need PyTorch. docs/sae.md has the table.

        layer: the layer to read from a Qwen-Scope folder
        k: the number of active features, for Qwen-Scope files that do not specify it
        scale: the factor that scales rows to the training rows' norm, for files that lack it
        site, site_out, model: override the file's values

        Raises `ProgramError` or `ShapeError`, naming the file and the array, for anything that is not an SAE. Pickled
        code is rejected.
        """
        fields, fold, file = read_parts(path, which)
        with errors_of(file):
            return _folded(cls(**fields), fold)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save to a folder in the format of SAELens (cfg.json and sae_weights.safetensors), for `load` and SAELens.

        Raises `ProgramError` for an SAE that no SAELens class supports.
        """
        write_saelens(path, **msgspec.structs.asdict(self))

    def __repr__(self) -> str:
        kind = "" if self.k is None else f", k={self.k}"
        place = ", ".join(repr(text) for text in (self.site, self.site_out, self.model) if text)
        return f"SAE({self.n_features} features of {self.width}{kind}{', ' * bool(place)}{place})"


def _one_site(text: Any, path: str) -> str:
    """Return the text form of a single-layer site. Raises `ProgramError` for other sites."""
    if text == "":
        return text
    try:
        site = parse_site(text)
    except PatchclampError as error:
        raise error.under(path) from None
    if SPECS[site.name].layered != isinstance(site.layers, int):
        raise ProgramError(f"expected a site of one layer, such as 'resid_post[20]', got '{site}'", path)
    return str(site)


def _frozen(given: Any, name: str, letters: str, sizes: dict[str, int]) -> np.ndarray:
    """Return a read-only fp32 array whose shape agrees with `sizes`; new letters are added to `sizes`."""
    import numpy as np

    array = as_array(given, name)
    if isinstance(given, np.ndarray) and given.flags.writeable and np.may_share_memory(array, given):
        array = array.copy()  # the caller may change it later
    expected = [sizes.get(letter, letter) for letter in letters]
    fits = array.ndim == len(letters) and all(
        want in (got, str(want)) for want, got in zip(expected, array.shape, strict=True)
    )
    if not fits or 0 in array.shape:
        raise ShapeError(f"expected [{', '.join(map(str, expected))}], got {list(array.shape)}", name)
    sizes.update(zip(letters, array.shape, strict=True))
    if not np.isfinite(array).all():
        raise ShapeError("expected finite numbers, got NaN or infinity", name)
    array.flags.writeable = False
    return array


def _folded(sae: SAE, fold: Fold) -> SAE:
    """Return the SAE with a `Fold`'s operations folded into its weights."""
    import numpy as np

    def scaled(array: np.ndarray, by: float | np.ndarray) -> np.ndarray:
        return np.multiply(array, by, dtype=np.float64, out=np.empty_like(array), casting="same_kind")

    changed: dict[str, Any] = {}
    with np.errstate(all="ignore"):  # SAE rejects values that overflow
        if fold.subtract:
            bias = sae.decoder_bias.astype(np.float64)
            blocks = np.array_split(sae.encoder, 1 + sae.encoder.size // 2**24)  # each array is copied to fp64
            changed["encoder_bias"] = sae.encoder_bias - np.concatenate([block @ bias for block in blocks])
        if fold.unit_norm:
            norms = np.sqrt(np.einsum("fo,fo->f", sae.decoder, sae.decoder, dtype=np.float64))
            if not norms.all():
                raise ProgramError("expected nonzero decoder rows, got a row of zeros", "decoder")
            changed["encoder"] = scaled(sae.encoder, norms[:, None])
            changed["encoder_bias"] = changed.get("encoder_bias", sae.encoder_bias) * norms
            changed["decoder"] = scaled(sae.decoder, 1 / norms[:, None])
        if fold.scale_in != 1:
            changed["encoder"] = scaled(changed.get("encoder", sae.encoder), fold.scale_in)
        if fold.scale_out != 1:
            changed["decoder"] = scaled(changed.get("decoder", sae.decoder), 1 / fold.scale_out)
            changed["decoder_bias"] = scaled(sae.decoder_bias, 1 / fold.scale_out)
    return msgspec.structs.replace(sae, **changed) if changed else sae
