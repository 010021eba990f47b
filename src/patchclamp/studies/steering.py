"""Steering vectors: a direction per layer from contrasting prompts, the layer where it works best, and a behaviour's
score by strength.

Three methods find a direction from rows of two classes. Directions are scaled so that adding a direction once moves the
negative class's mean to the positive class's, as measured along the direction. Equal scales are then equal strengths
for all three methods.

A behaviour is defined by a continuation that shows it, and optionally one that does not. Its score is the
log-probability of the first minus the log-probability of the second (`studies.teacher_forcing`); for one token each,
this is their logit difference. The strength curve shows the score as the vector is added with growing scale.

In the last layers a vector merely writes to the unembedding, and any layer's vector can break the text. So the chosen
layer is the earliest whose effect is within 10 % of the largest, excluding the last layers, and whose generated texts
stay likely for the unsteered model.

Control vectors are exchanged with llama.cpp and repeng as GGUF files of the architecture `controlvector`, with tensors
`direction.N`. llama.cpp adds `direction.N` to the stream after its layer N, counted from 0, and so does repeng with
`directions[N]`: this is `resid_post[N]`. (llama.cpp's tools begin with `direction.1`, the second layer. llama.cpp
cannot represent a direction of layer 0, and refuses a file that has one.)

Source: contrastive activation addition, Rimsky et al. 2023 (arXiv:2312.06681), section 4 for behaviour by multiplier;
representation engineering, Zou et al. 2023 (arXiv:2310.01405); propensity as a logit difference, Tan et al. 2024
(arXiv:2407.12404), section 3; llama.cpp, `common_control_vector_load` and `llama_adapter_cvec`; repeng,
`ControlVector.export_gguf`.

n positive rows · m negative rows · D row width · r rank of all rows · L layers · W vector width · P prompts · E edits
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, ShapeError, TokensError, UnsupportedSite
from patchclamp.language import Add, Capture, Op, Program, Site, Vector
from patchclamp.language.tokens import Tokens, TokensLike, every, parse_tokens, prompt, read_tokens
from patchclamp.language.values import as_array, as_file
from patchclamp.lm import LM, is_token_id
from patchclamp.plots import Chart, Curve, Curves
from patchclamp.plots.style import quoted, shorten, signed
from patchclamp.run import Run
from patchclamp.store.journal import Journal
from patchclamp.studies import inputs
from patchclamp.studies.inputs import EncodedPrompt
from patchclamp.studies.linear_fit import fit_logistic
from patchclamp.studies.metric import bare_ids, text_of
from patchclamp.studies.study import (
    Provenance,
    Show,
    StoredArray,
    Study,
    StudyResult,
    keeping,
    progress,
    provenance,
    recorded_runs,
)
from patchclamp.studies.teacher_forcing import Forced, forced_logprobs
from patchclamp.version import __version__

if TYPE_CHECKING:
    import pandas

Method = Literal["mean", "pca", "probe"]
RIDGE = 1.0  # the probe's, for rows scaled to a root mean square of 1


def check_method(method: str, positive: int, negative: int) -> None:
    """Raise `ProgramError` for PCA of unpaired prompts."""
    if method == "pca" and positive != negative:
        raise ProgramError(f"pca requires pairs of prompts, got {positive} positive and {negative} negative", "method")


def direction(method: str, positive_nD: np.ndarray, negative_mD: np.ndarray) -> np.ndarray:
    """Return the direction [D], fp64, from `method`.

    Raises: the errors of `check_method`, and `ProgramError` if the classes have the same mean along the direction.
    """
    check_method(method, len(positive_nD), len(negative_mD))
    positive_nD, negative_mD = np.asarray(positive_nD, np.float64), np.asarray(negative_mD, np.float64)
    raw_D = METHODS[method](positive_nD, negative_mD)
    unit_D = raw_D / (np.linalg.norm(raw_D) or 1.0)
    apart = float((positive_nD.mean(0) - negative_mD.mean(0)) @ unit_D)
    if apart == 0:
        raise ProgramError("positive and negative prompts give the same activations: no direction separates them")
    return unit_D * apart


def mean_difference(positive_nD: np.ndarray, negative_mD: np.ndarray) -> np.ndarray:
    """Return the positive class's mean minus the negative class's.

    Source: Rimsky et al. 2023 (arXiv:2312.06681), equation 1; Marks and Tegmark 2023 (arXiv:2310.06824).
    """
    return positive_nD.mean(0) - negative_mD.mean(0)


def pca(positive_nD: np.ndarray, negative_nD: np.ndarray) -> np.ndarray:
    """Return the first principal component of the pairs' differences, uncentred, because their mean is the signal.

    Shuffling the order within pairs, so that the differences have a mean of 0, gives PCA the same direction.
    Source: Zou et al. 2023 (arXiv:2310.01405), section 3.1.
    """
    return np.linalg.svd(positive_nD - negative_nD, full_matrices=False)[2][0]


def probe(positive_nD: np.ndarray, negative_mD: np.ndarray) -> np.ndarray:
    """Return the weights w of ridge-regularised logistic regression, which minimise Σ log(1 + exp(−y (w · x + b))) + ½
    ridge |w|², where x are centred rows, scaled to a root mean square of 1, and y is 1 or −1.

    Source: Hastie, Tibshirani and Friedman, The Elements of Statistical Learning, 4.4.1 and 18.3.5.
    """
    x_ND = np.concatenate([positive_nD, negative_mD])
    x_ND = x_ND - x_ND.mean(0)
    size = np.sqrt(np.mean(x_ND**2))
    if size == 0:
        return np.zeros(x_ND.shape[1])
    return fit_logistic(x_ND / size, np.arange(len(x_ND)) < len(positive_nD), RIDGE)[0]


METHODS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "mean": mean_difference, "pca": pca, "probe": probe,
}  # fmt: skip


class Check(msgspec.Struct, frozen=True):
    """The separation of held-out rows along a direction.

    accuracy: fraction of rows on the right side of the midpoint between the fitted rows' class means, with equal weight
        for each class
    separation: distance between the held-out class means, in pooled standard deviations (Cohen's d)
    """

    accuracy: float
    separation: float


def check(
    direction_D: np.ndarray, made_of: tuple[np.ndarray, np.ndarray], held_out: tuple[np.ndarray, np.ndarray]
) -> Check:
    """Check a direction on held-out rows; each pair is the positive class [n, D], then the negative one [m, D]."""
    middle = sum(float(np.mean(rows @ direction_D)) for rows in made_of) / 2
    positive, negative = (np.asarray(rows, np.float64) @ direction_D for rows in held_out)
    accuracy = (np.mean(positive > middle) + np.mean(negative <= middle)) / 2
    spread = np.sqrt((np.var(positive) + np.var(negative)) / 2)
    distance = positive.mean() - negative.mean()
    return Check(float(accuracy), float(distance / spread) if spread > 0 else float(np.sign(distance)) * np.inf)


ARCHITECTURE = "controlvector"
HINT, COUNT = f"{ARCHITECTURE}.model_hint", f"{ARCHITECTURE}.layer_count"


def write(path: str | Path, directions: Mapping[int, np.ndarray], model_hint: str) -> Path:
    """Write directions [D] by layer as a control vector in GGUF.

    Raises: `ProgramError` for layer 0, `PatchclampError` without the gguf package.
    """
    if 0 in directions:
        raise ProgramError("llama.cpp does not support directions at layer 0: omit it, as in layers=[1, 2]", "layers")
    writer = _package().GGUFWriter(str(as_file(path, "path")), ARCHITECTURE)
    try:
        writer.add_string(HINT, model_hint)
        writer.add_uint32(COUNT, len(directions))
        for layer, direction in sorted(directions.items()):
            writer.add_tensor(f"direction.{layer}", np.ascontiguousarray(direction, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except OSError as error:
        raise ProgramError(f"cannot write {path}: {error.strerror}", "path") from None
    finally:
        writer.close()
    return Path(path)


def read(path: str | Path) -> tuple[dict[int, np.ndarray], str]:
    """Read a control vector's directions [D] by layer, fp32, and the name of its model.

    Raises: `ProgramError` if it is not a control vector, `PatchclampError` without the gguf package.
    """
    package = _package()
    try:
        reader = package.GGUFReader(str(as_file(path, "path")))
        architecture, hint = _text(reader, "general.architecture"), _text(reader, HINT)
        tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError) as error:
        raise ProgramError(f"cannot read {path} as GGUF: {error}", "path") from None
    if architecture != ARCHITECTURE:
        raise ProgramError(f"expected GGUF of a {ARCHITECTURE}, got {architecture or 'no type'}: {path}", "path")
    directions = {}
    for name, tensor in tensors.items():
        layer = re.fullmatch(r"direction\.(\d{1,6})", name)
        if layer is None or tensor.ndim != 1 or tensor.dtype not in (np.float32, np.float16):
            raise ProgramError(f"expected directions [D], got {name} {list(tensor.shape)} {tensor.dtype}: {path}",
                               "path")  # fmt: skip
        directions[int(layer[1])] = tensor.astype(np.float32)
    if len({len(direction) for direction in directions.values()}) != 1:
        raise ProgramError(f"expected directions of equal width: {path}", "path")
    return dict(sorted(directions.items())), hint


def _text(reader: Any, key: str) -> str:
    field = reader.get_field(key)
    return "" if field is None else bytes(field.parts[-1]).decode("utf-8", "replace")


def _package() -> Any:
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError:
        raise PatchclampError("GGUF files require the gguf package: pip install gguf") from None


NAMES = {"mean": "difference of means", "pca": "first component of the pairs' differences", "probe": "linear probe"}
IMPORTED = "imported"  # the method of vectors from a file or another package


class PromptSet(msgspec.Struct, frozen=True):
    """A set of prompts that vectors were made from: their number, the number held out, and the hash of their token ids
    (`studies.inputs.content_hash`)."""

    count: int
    held_out: int
    content: str


class SteeringVectors(StudyResult, frozen=True, eq=False, kw_only=True):
    """`vectors` [L, W] fp32, one for each of `layers`, at `site`. Scale 1 moves the negative prompts' mean to the
    positive prompts' mean, along the direction.

    method: "mean", "pca", "probe" or "imported" · tokens: the selection, as text, whose rows were averaged
    accuracy, separation [L]: the `Check` on held-out prompts, NaN without any
    effect [L]: change of a behaviour's score on the held-out negative prompts when the layer's vector is added once
        (`strength_curve`), in nats; NaN without a behaviour
    fluency [L]: mean log-probability per token, under the unsteered model, of texts generated with the vector, minus
        the same for the unsteered model's own texts, in nats; None without a behaviour
    row_norm [L]: mean norm of the rows that were read, for comparison with the vectors' norms
    best: the layer chosen by effect and fluency (`chosen_layer`) or, without a behaviour, by the highest accuracy, ties
        broken by separation; None if no prompts were held out
    family: the model's site table, stored as a hint in GGUF files
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
    fluency: np.ndarray | None = None

    def vector(self, layer: int | None = None) -> np.ndarray:
        """Return a copy of a layer's vector [W], by default the best layer's."""
        layer = self.best if layer is None else layer
        if layer is None:
            raise ProgramError(f"the best layer is unknown: choose one of {list(self.layers)}", "layer")
        if len(chosen := self.chosen_layers(layer, "layer")) != 1:
            raise ProgramError(f"expected one layer, got {layer!r:.100}", "layer")
        return self.vectors[self.layers.index(chosen[0])].copy()

    def edits(
        self, scale: float = 1.0, *, layers: Iterable[int] | int | None = None, tokens: TokensLike = every
    ) -> tuple[Add, ...]:
        """Return edits for `lm.run(..., edits=vectors.edits(2.0))`, which add the vector at `layers`, by default at the
        best layer, or at all layers if no best is known, as llama.cpp does with a file.

        Raises: `ProgramError` for a layer that has no vector.
        """
        selection: Tokens = read_tokens(tokens, "tokens")
        return tuple(
            Add(self.vectors[self.layers.index(layer)], at=Site(self.site, layer), tokens=selection, scale=scale)
            for layer in self.chosen_layers(layers)
        )

    def chosen_layers(self, layers: Iterable[int] | int | None, path: str = "layers") -> list[int]:
        """Check that `layers` have vectors, and list them; by default the best layer, or all if no best is known."""
        if layers is None:
            return list(self.layers) if self.best is None else [self.best]
        chosen = inputs.numbers_of(layers, path)
        missing = [layer for layer in chosen if layer not in self.layers]
        if missing or not chosen:
            raise ProgramError(f"no vectors for layers {missing or chosen}; available: {list(self.layers)}", path)
        return chosen

    def directions(self, layers: Iterable[int] | int | None = None) -> dict[int, np.ndarray]:
        """Return copies of the vectors by layer, as in repeng's `ControlVector.directions`; all layers by default.

        Raises: `UnsupportedSite` for vectors of another site than `resid_post`.
        """
        if self.site != "resid_post":
            raise UnsupportedSite(f"control vectors require the site resid_post, got {self.site}", "site")
        chosen = self.layers if layers is None else self.chosen_layers(layers)
        return {layer: self.vectors[self.layers.index(layer)].copy() for layer in chosen}

    def to_gguf(self, path: str | Path, *, layers: Iterable[int] | int | None = None) -> Path:
        """Write a control vector for llama.cpp and repeng. By default it has every layer but 0, which the format lacks.
        llama.cpp's `--control-vector-scaled FILE:2` with `--control-vector-layer-range 12 12` is the same as
        `edits(2.0, layers=12)`. Raises: the errors of `directions` and `write`."""
        directions = self.directions(layers)
        if layers is None and len(directions) > 1:
            directions.pop(0, None)
        return write(path, directions, self.family)

    @classmethod
    def from_gguf(cls, path: str | Path) -> SteeringVectors:
        """Read a control vector of llama.cpp or repeng. Raises: the errors of `read`."""
        directions, hint = read(path)
        return cls.from_directions(directions, hint)

    @classmethod
    def from_directions(cls, directions: Mapping[int, Any], model_hint: str = "") -> SteeringVectors:
        """Build from vectors [D] by layer, as in repeng's `ControlVector.directions`; negative layers are refused.

        Raises: `ShapeError` if their widths differ, a layer is negative, or a vector is all zeros.
        """
        if not isinstance(directions, Mapping):
            raise ShapeError(f"expected a mapping of layers to vectors, got {type(directions).__name__}", "directions")
        model_hint = inputs.as_text(model_hint, "model_hint")
        layers = tuple(sorted(inputs.numbers_of(list(directions), "directions")))
        rows = [Vector.of(as_array(directions[layer], f"directions[{layer}]")).array() for layer in layers]
        zero = [layer for layer, row in zip(layers, rows, strict=True) if not row.any()]
        if zero:
            raise ShapeError("expected a non-zero vector, got all zeros", f"directions[{zero[0]}]")
        if not rows or layers[0] < 0 or {row.shape for row in rows} != {(rows[0].size,)}:
            raise ShapeError("expected vectors [D] of equal width, by layer from 0", "directions")
        unknown, none = np.full(len(layers), np.nan), PromptSet(0, 0, "")
        return cls(
            provenance=Provenance(model_hint, "", "float32", __version__), method=IMPORTED, site="resid_post",
            tokens="", layers=layers, vectors=np.stack(rows), accuracy=unknown, separation=unknown, effect=unknown,
            row_norm=unknown, best=None, positive=none, negative=none, chat=False, family=model_hint,
        )  # fmt: skip

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per layer: the vector's norm, its training rows' norm, and the held-out check."""
        import pandas

        return pandas.DataFrame({
            "layer": self.layers, "norm": np.linalg.norm(self.vectors, axis=1), "row_norm": self.row_norm,
            "accuracy": self.accuracy, "separation": self.separation, "effect": self.effect,
            "fluency": np.nan if self.fluency is None else self.fluency,
        })  # fmt: skip

    def picture(self) -> Curves:
        """Return plot data: the held-out check by layer."""
        if self.best is None:
            raise ProgramError("nothing to plot: no prompts were held out to check the layers", "held_out")
        layers = np.array(self.layers, np.float64)
        held = self.positive.held_out + self.negative.held_out
        separation = np.where(np.isfinite(self.separation), self.separation, np.nan)
        lengths = np.linalg.norm(self.vectors, axis=1).astype(np.float64)
        charts = []
        if not np.isnan(self.effect).any():
            effect = Curve("effect", layers, self.effect)
            charts.append(Chart("Effect on held-out negative prompts", "score, nats", (effect,), level=0.0,
                                level_label="no effect"))  # fmt: skip
        if self.fluency is not None:
            fluency = Curve("fluency", layers, self.fluency)
            charts.append(Chart("Fluency: log-probability of steered texts", "nats per token", (fluency,),
                                level=0.0, level_label="unsteered"))  # fmt: skip
        return Curves(
            title=f"Steering vectors by layer: {NAMES[self.method]}", x_label="layer",
            charts=(
                *charts,
                Chart("Held-out accuracy", "share", (Curve("accuracy", layers, self.accuracy),), y_range=(-0.02, 1.02),
                      level=0.5, level_label="chance"),
                *([Chart("Held-out separation", "standard deviations", (Curve("separation", layers, separation),))]
                  if not np.isnan(separation).all() else []),
                Chart("Norm", "norm", (Curve("vector", layers, lengths),
                                         Curve("activations, mean", layers, self.row_norm)), y_log=True),
            ),
            provenance=self.provenance.where,
            notes=(f"{self.site} at {self.tokens}; {self.positive.count} positive and {self.negative.count} "
                   f"negative prompts, {held} of them held out. Best: layer {self.best}.",),
        )  # fmt: skip

    def __repr__(self) -> str:
        best = "" if self.best is None else f", best layer {self.best}"
        return f"<SteeringVectors {self.method}: {len(self.layers)} layers of {self.site}{best}>"


class Behaviour(msgspec.Struct, frozen=True):
    """The token ids of each prompt's answer, and of its foil."""

    answers: list[tuple[int, ...]]
    foils: list[tuple[int, ...]] | None

    @classmethod
    def of(cls, lm: LM, answer: Any, foil: Any, prompts: int) -> Behaviour:
        """Read a text, a token id or a list of token ids for all prompts, or a list of texts, one per prompt."""
        foils = None if foil is None else _continuations(lm, foil, prompts, "foil")
        return cls(_continuations(lm, answer, prompts, "answer"), foils)

    def score(
        self, lm: LM, asked: list[EncodedPrompt], edits: Sequence[tuple[Op, ...]], batch: int, show: Show,
        journal: Journal | None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Return log-probabilities [P, E] of the answers and the foils (0 without foils), for every prompt under each
        of `edits`. The score is their difference. Values in `journal` are not recomputed."""
        sides = [self.answers] if self.foils is None else [self.answers, self.foils]
        items = [
            Forced(one.ids, side[p], edit, one.text)  # items that share a run are next to each other
            for p, one in enumerate(asked) for edit in edits for side in sides
        ]  # fmt: skip
        with progress("scoring", len(items), show) as advance:
            totals = [float(row.sum()) for row in forced_logprobs(lm, items, batch, advance, journal)]
        grids = np.array(totals).reshape(len(asked), len(edits), len(sides))
        return grids[:, :, 0], np.zeros(grids.shape[:2]) if self.foils is None else grids[:, :, 1]

    def question(self, edits: Sequence[tuple[Op, ...]]) -> dict[str, Any]:
        """Return everything that determines the scores, except the prompts, as plain data."""
        programs = [Program.of(list(edit)).fingerprint for edit in edits]
        return {"answers": self.answers, "foils": self.foils, "edits": programs}


def _continuations(lm: LM, given: Any, prompts: int, path: str) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt's continuation."""
    listed = isinstance(given, (list, tuple)) and bool(given) and all(isinstance(one, str) for one in given)
    ids = (
        [_ids(lm, one, f"{path}[{i}]") for i, one in enumerate(given)] if listed else [_ids(lm, given, path)] * prompts
    )
    if len(ids) != prompts:
        raise ProgramError(f"expected {prompts} texts, one per prompt, got {len(ids)}", path)
    return ids


def _ids(lm: LM, given: Any, path: str) -> tuple[int, ...]:
    if isinstance(given, str):
        ids = tuple(bare_ids(lm, given, path))
    else:
        ids = (given,) if is_token_id(given) else tuple(given) if isinstance(given, (list, tuple)) else ()
    if not ids or not all(is_token_id(token) and 0 <= token < lm.model.d_vocab for token in ids):
        raise ProgramError(f"expected text or token ids with at least one token, got {given!r}", path)
    return tuple(int(token) for token in ids)


NO_CHECK = Check(float("nan"), float("nan"))


class Steering(Study):
    """Make steering vectors from contrasting prompts, one per layer, and find the layer where it works best.

    With `answer`, every layer's vector is added once to every token of the held-out negative prompts: the best layer is
    the earliest within 10 % of the largest change of log p(answer) − log p(foil) whose texts stay fluent. Otherwise it
    is the one that best separates held-out prompts.

    Raises: `ProgramError` for a wrong argument, and the error of any run.
    """

    command = "steer"
    positional = 2

    positive: inputs.PromptFile
    """Prompts that show the behaviour: texts or token ids, or with `chat` texts or lists of messages."""
    negative: inputs.PromptFile
    """Prompts that do not show the behaviour; paired with the positive ones if there are as many."""
    method: Method = "mean"
    """mean (difference of means), pca (of the pairs' differences) or probe (logistic regression)."""
    site: inputs.SiteField = "resid_post"
    """Site as wide as the stream, where prompts are read and the vector is added."""
    layers: inputs.Layers = None
    """Layers for sites given without an index: a number, a list, or a range such as "0:12"; all by default."""
    tokens: inputs.Selected = prompt[-1]
    """Tokens to read in each prompt; the rows of several are averaged."""
    chat: inputs.Flag = False
    """Send each prompt as the user turn of a chat."""
    held_out: float = 0.25
    """Fraction of the prompts held out to check layers; with 0 there is no check and no best layer."""
    seed: inputs.Whole = 0
    """Seed of the held-out split."""
    answer: inputs.Answer = None
    """Continuation that shows the behaviour."""
    foil: inputs.Answer = None
    """Continuation that does not show the behaviour."""

    def check(self, curve: bool = False) -> None:
        """Raise errors that can be detected without a model. `curve`: True if prompts are scored under the vectors."""
        check_method(self.method, len(self.positive), len(self.negative))
        if self.answer is None and (self.foil is not None or curve):
            path = "answer" if self.foil is None else "foil"
            raise ProgramError("scoring a behaviour requires answer=, a continuation that shows it", path)
        if self.answer is not None and not self.held_out and not curve:
            raise ProgramError("requires held-out prompts: set held_out above 0", "answer")

    def _run(
        self, lm: LM, *, batch: inputs.Positive = 64, show_progress: inputs.Progress = None,
        resume: inputs.ResumeFile = None,
    ) -> SteeringVectors:  # fmt: skip
        positive = inputs.ask(lm, self.positive, self.chat, "positive")
        negative = inputs.ask(lm, self.negative, self.chat, "negative")
        sides = positive, negative
        self.check()
        named = _site(lm, self.site)
        numbers = inputs.layers_of(lm, named.name, self.layers)
        tests = _held_out(len(positive), len(negative), self.held_out, self.seed)
        captures = [Capture(Site(named.name, layer), read_tokens(self.tokens, "tokens")) for layer in numbers]
        answer, foil = (None if given is None else [_ids(lm, given, path)] * len(tests[1])
                        for given, path in ((self.answer, "answer"), (self.foil, "foil")))  # fmt: skip
        behaviour = None if answer is None else Behaviour(answer, foil)
        question = {
            "study": "steering_vectors", "prompts": [[one.ids for one in side] for side in sides],
            "method": self.method,
            "site": named.name, "layers": numbers, "tokens": str(parse_tokens(self.tokens)),
            "held_out": self.held_out, "seed": self.seed,
            "behaviour": None if behaviour is None else behaviour.question(()),
        }  # fmt: skip
        with keeping(lm, question, resume) as journal:
            with progress("reading", sum(map(len, sides)), show_progress) as advance:
                rows_NLD, norms = _read(lm, journal, [*positive, *negative], captures, batch, advance)
            vectors, checks = _fit(self.method, rows_NLD[: len(positive)], rows_NLD[len(positive) :], tests)
            kept = [negative[i] for i in tests[1]]
            effects, fluency = np.full(len(numbers), np.nan), None
            best = max(range(len(numbers)), key=lambda i: (checks[i].accuracy, checks[i].separation, -i))
            if behaviour is not None:
                adding = [(Add(of, at=Site(named.name, layer)),) for layer, of in zip(numbers, vectors, strict=True)]
                answer, foil = behaviour.score(lm, kept, [(), *adding], batch, show_progress, journal)
                scores = (answer - foil).mean(0)
                effects = scores[1:] - scores[0]
                fluency = _fluency(lm, kept[:FLUENT_PROMPTS], [(), *adding], batch, show_progress, journal)
                best = chosen_layer(numbers, effects, fluency, lm.model.layers)
        sets = [
            PromptSet(len(side), len(test), inputs.content_hash(side)) for side, test in zip(sides, tests, strict=True)
        ]
        return SteeringVectors(
            provenance=provenance(lm, (self.seed,)), method=self.method, site=named.name,
            tokens=str(parse_tokens(self.tokens)),
            layers=tuple(numbers), vectors=vectors.astype(np.float32),
            accuracy=np.array([one.accuracy for one in checks]),
            separation=np.array([one.separation for one in checks]),
            effect=effects, row_norm=norms, best=numbers[best] if len(tests[0]) else None, positive=sets[0],
            negative=sets[1], chat=self.chat, family=lm.model.family, fluency=fluency,
        )  # fmt: skip


steering_vectors: Callable[..., SteeringVectors] = Steering.short_form("steering_vectors")


FLUENT_PROMPTS, FLUENT_TOKENS = 8, 16  # texts from which fluency is measured
FLUENT = -2.0  # nats per token: the lowest fluency of a chosen layer
NEAR_BEST = 0.9


def chosen_layer(layers: Sequence[int], effects: np.ndarray, fluency: np.ndarray, count: int) -> int:
    """Return the index of the earliest fluent layer whose effect is within 10 % of the largest. The last eighth of the
    model's `count` layers is skipped if others were read; fluency is ignored if no layer is fluent."""
    early = [i for i, layer in enumerate(layers) if layer < count - max(count // 8, 1)] or list(range(len(layers)))
    fluent = [i for i in early if fluency[i] >= FLUENT] or early
    most = max(effects[i] for i in fluent)
    return next(i for i in fluent if effects[i] >= (NEAR_BEST * most if most > 0 else most))


class _Continuation(msgspec.Struct, frozen=True):
    """The record of a generated text."""

    token_ids: tuple[int, ...]


def _fluency(
    lm: LM, asked: list[EncodedPrompt], edits: Sequence[tuple[Op, ...]], batch: int, show: Show,
    journal: Journal | None,
) -> np.ndarray:  # fmt: skip
    """Return each edit's texts' mean log-probability per token under the unedited model, minus the first edit's."""
    items = [(one, edit) for edit in edits for one in asked]

    def call(part: Sequence[tuple[EncodedPrompt, tuple[Op, ...]]]) -> dict[str, Any]:
        return {"prompt": [one.prompt for one, _ in part], "edits": [list(edit) for _, edit in part],
                "max_tokens": FLUENT_TOKENS}  # fmt: skip

    def record(runs: Sequence[Run], part: Sequence[Any]) -> list[_Continuation]:
        return [_Continuation(tuple(run.token_ids)) for run in runs]

    with progress("writing texts", len(items), show, "texts") as advance:
        texts = recorded_runs(lm, journal, items, call, record, _Continuation, advance, batch)
    forced = [Forced(one.ids, text.token_ids, (), one.text) for (one, _), text in zip(items, texts, strict=True)]
    with progress("scoring texts", len(forced), show, "texts") as advance:
        means = [float(row.mean()) for row in forced_logprobs(lm, forced, batch, advance, journal)]
    by_edit = np.array(means).reshape(len(edits), len(asked)).mean(1)
    return by_edit[1:] - by_edit[0]


def _fit(
    method: str, positive_NLD: np.ndarray, negative_NLD: np.ndarray, tests: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, list[Check]]:
    """Return vectors [L, D] fitted to the training rows, and their checks on the held-out rows."""
    classes = positive_NLD, negative_NLD
    made_of = [np.delete(rows, test, axis=0) for rows, test in zip(classes, tests, strict=True)]
    held_out = [rows[test] for rows, test in zip(classes, tests, strict=True)]
    vectors, checks = [], []
    for layer in range(positive_NLD.shape[1]):
        first, second = (rows[:, layer] for rows in made_of)
        vectors.append(direction(method, first, second))
        kept = held_out[0][:, layer], held_out[1][:, layer]
        checks.append(check(vectors[-1], (first, second), kept) if len(tests[0]) else NO_CHECK)
    return np.stack(vectors), checks


def _site(lm: LM, site: str | Site) -> Site:
    named = inputs.layered_site(site)
    refs = lm.sites.resolve(named)
    if any(ref.layer is None for ref in refs):
        raise UnsupportedSite(f"expected a site with layers, got {named}", "site")
    if any(lm.sites.points[ref.point].width != lm.model.d_model for ref in refs):
        raise UnsupportedSite(f"expected a site as wide as the stream ({lm.model.d_model}), got {named}", "site")
    return named


def _held_out(positive: int, negative: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of each class's held-out prompts; pairs are held out together. Unless `share` is 0, each class has
    at least one held-out and one training prompt."""
    if not 0 <= (share := inputs.as_float(share, "held_out")) < 1:
        raise ProgramError(f"expected a fraction in [0, 1), got {share!r}", "held_out")
    counts = [round(share * n) for n in (positive, negative)]
    if share and (min(counts) < 1 or counts[0] == positive or counts[1] == negative):
        raise ProgramError(
            f"{share:g} of {positive} positive and {negative} negative prompts leaves a class without training or "
            "held-out prompts: pass more prompts, or held_out=0 for no check", "held_out"
        )  # fmt: skip
    draws = np.random.default_rng(seed)
    first = draws.permutation(positive)
    second = first if positive == negative else draws.permutation(negative)
    return np.sort(first[: counts[0]]), np.sort(second[: counts[1]])


class _Read(msgspec.Struct, frozen=True):
    """The record of a prompt: its mean row at each layer [L, D], and the mean norm of its rows [L]."""

    mean: StoredArray
    lengths: StoredArray


def _read(
    lm: LM, journal: Journal | None, asked: list[EncodedPrompt], captures: list[Capture], batch: int, advance: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return each prompt's mean row at each layer [N, L, D], and the mean norm [L] of all rows."""
    sites = [str(capture.at) for capture in captures]

    def call(part: Sequence[int]) -> dict[str, Any]:
        return {"prompt": [asked[i].prompt for i in part], "max_tokens": 1, "capture": captures}

    def record(runs: Sequence[Run], numbers: Sequence[int]) -> list[_Read]:
        fetched = lm.fetch(runs, sites)
        return [mean_rows(number, tensors) for number, tensors in zip(numbers, fetched, strict=True)]

    def mean_rows(number: int, tensors: dict[str, Any]) -> _Read:
        rows_LTD = [np.asarray(tensors[site], np.float64) for site in sites]
        if not len(rows_LTD[0]):
            raise TokensError(f"{captures[0].tokens} selects no token in prompt {number}", "tokens")
        rows_LTD = [rows.reshape(len(rows), -1) for rows in rows_LTD]  # flattens heads
        lengths = [np.linalg.norm(rows, axis=1).mean() for rows in rows_LTD]
        return _Read(StoredArray.of(np.stack([rows.mean(0) for rows in rows_LTD])), StoredArray.of(np.array(lengths)))

    read = recorded_runs(lm, journal, range(len(asked)), call, record, _Read, advance, batch)
    return np.stack([of.mean.array() for of in read]), np.mean([of.lengths.array() for of in read], axis=0)


SCALES = (-4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0)


class StrengthCurveResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """Log-probabilities of continuations under steering vectors, for P prompts and S scales.

    logprobs [P, S]: log-probability of all of `answers[p]`, in nats, with the vector times `scales[s]`
    foil_logprobs [P, S]: the same for `foils[p]`; NaN without foils
    vectors: description of the vectors · layers, tokens: where they were added
    """

    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    foils: tuple[str, ...] | None
    scales: tuple[float, ...]
    vectors: str
    layers: tuple[int, ...]
    tokens: str
    chat: bool
    logprobs: np.ndarray
    foil_logprobs: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        """The behaviour's score [P, S]: log p(answer) − log p(foil), or log p(answer) alone."""
        return self.logprobs if self.foils is None else self.logprobs - self.foil_logprobs

    @property
    def slope(self) -> float:
        """The slope of the least-squares line through the mean score, per unit of scale. It is positive if the vector
        steers as intended."""
        return float(np.polyfit(self.scales, self.scores.mean(0), 1)[0]) if len(self.scales) > 1 else float("nan")

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per prompt and scale."""
        import pandas

        return pandas.DataFrame([
            {"prompt": prompt, "scale": scale, "score": self.scores[p, s], "logprob": self.logprobs[p, s],
             "foil_logprob": self.foil_logprobs[p, s]}
            for p, prompt in enumerate(self.prompts)
            for s, scale in enumerate(self.scales)
        ])  # fmt: skip

    def picture(self) -> Curves:
        """Return plot data: the mean score by scale, with quartiles over prompts."""
        low, high = np.quantile(self.scores, (0.25, 0.75), axis=0)
        scales = np.array(self.scales)
        lines = [Curve("mean over prompts", scales, self.scores.mean(0), low, high)]
        answer = _shown(self.answers)
        score = f"log p({answer})" if self.foils is None else f"log p({answer}) − log p({_shown(self.foils)})"
        charts = [Chart(score, "nats", tuple(lines), note="The band is the interquartile range over prompts.")]
        if self.foils is not None:
            both = (Curve("answer", scales, self.logprobs.mean(0)), Curve("foil", scales, self.foil_logprobs.mean(0)))
            charts.append(Chart("Each continuation's log-probability", "nats", both, note="Means over prompts."))
        count, layers = len(self.prompts), ", ".join(map(str, self.layers))
        tokens = "every token" if self.tokens == "every" else self.tokens
        where = f"layer{'s' if len(self.layers) > 1 else ''} {layers}, on {tokens}"
        prompts = f"{count} prompt{'s' if count > 1 else ''}"
        return Curves(
            title="Behaviour score by steering strength", x_label="scale of the vectors", charts=tuple(charts),
            provenance=self.provenance.where,
            notes=(f"Steered by {self.vectors}, {where}; {prompts}; slope {signed(self.slope)} nats per scale.",),
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<StrengthCurveResult {self.vectors}: {self.slope:+.3f} nats by a scale of 1>"


class StrengthCurve(Study):
    """Score a behaviour under steering vectors of several strengths.

    Raises: `ProgramError` for a wrong argument, and the error of any run.
    """

    command = ""
    not_served = "its vectors are a Python object; run it in the client with pc.LM(url)"
    positional = 4

    vectors: inputs.PythonOnly
    """`SteeringVectors` to score."""
    prompts: inputs.PromptFile
    """Texts or token ids, or with `chat` texts or lists of messages."""
    answer: inputs.Answers
    """Continuation that shows the behaviour: text, a token id or a list of ids for all prompts, or a list of texts,
    one per prompt."""
    foil: inputs.Answers = None
    """Continuation that does not show the behaviour."""
    scales: inputs.Ascending = SCALES
    """Factors on the vectors, ascending; 0 is the unedited model."""
    layers: inputs.Layers = None
    """Layers to add the vectors at, as in `vectors.edits`."""
    tokens: inputs.Selected = every
    """Tokens to add the vectors at, as in `vectors.edits`; `generated` means the continuation."""
    chat: inputs.Flag = False
    """Send each prompt as the user turn of a chat."""

    def _run(
        self, lm: LM, *, batch: inputs.Positive = 256, show_progress: inputs.Progress = None,
        resume: inputs.ResumeFile = None,
    ) -> StrengthCurveResult:  # fmt: skip
        if not isinstance(self.vectors, SteeringVectors):
            raise ProgramError(
                f"expected steering vectors, got {type(self.vectors).__name__} {self.vectors!r:.100}", "vectors"
            )
        asked = inputs.ask(lm, self.prompts, self.chat)
        behaviour = Behaviour.of(lm, self.answer, self.foil, len(asked))
        edits = [self.vectors.edits(scale, layers=self.layers, tokens=self.tokens) if scale else ()
                 for scale in self.scales]  # fmt: skip
        question = {
            "study": "strength_curve", "prompts": [[one.ids, one.text] for one in asked], **behaviour.question(edits)
        }  # fmt: skip
        with keeping(lm, question, resume) as journal:
            logprobs, foil_logprobs = behaviour.score(lm, asked, edits, batch, show_progress, journal)
        return StrengthCurveResult(
            provenance=provenance(lm, self.vectors.provenance.seeds), prompts=tuple(one.shown for one in asked),
            answers=tuple(text_of(lm, one) for one in behaviour.answers), scales=self.scales,
            foils=None if behaviour.foils is None else tuple(text_of(lm, one) for one in behaviour.foils),
            vectors=f"{self.vectors.method} vectors of {self.vectors.site}",
            layers=tuple(self.vectors.chosen_layers(self.layers)),
            tokens=str(read_tokens(self.tokens, "tokens")), chat=self.chat, logprobs=logprobs,
            foil_logprobs=foil_logprobs if behaviour.foils else np.full(logprobs.shape, np.nan),
        )  # fmt: skip


strength_curve: Callable[..., StrengthCurveResult] = StrengthCurve.short_form("strength_curve")


def steered_texts(
    lm: LM, vectors: SteeringVectors, prompt: Any, scales: Sequence[float], chat: bool = False, max_tokens: int = 24
) -> dict[float, str]:
    """Return a prompt's greedy continuation under the vectors times each scale."""
    [asked] = inputs.ask(lm, [prompt], chat)
    edits = [list(vectors.edits(scale)) if scale else [] for scale in scales]
    runs = lm.run([asked.prompt] * len(edits), max_tokens=max_tokens, edits=edits)
    return {scale: run.text for scale, run in zip(scales, runs, strict=True)}


def _shown(texts: tuple[str, ...]) -> str:
    return quoted(shorten(texts[0], 24)) if len(set(texts)) == 1 else "its own"
