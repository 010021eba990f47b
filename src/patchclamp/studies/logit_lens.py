"""The logit lens: which token would the model predict if it stopped after this layer?

Every layer's stream, at every position, goes through the model's own final norm and unembedding.

Source: nostalgebraist 2020, "interpreting GPT: the logit lens" (LessWrong); the tuned lens and its KL, Belrose et al.
2023 (arXiv:2303.08112), equations 2 and 3.

L layers · P positions · D model width · V vocabulary · K likeliest tokens, or rows of a matrix that replaces the
unembedding · C chosen tokens
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from patchclamp.call import is_token_id
from patchclamp.engines.base import Wanted
from patchclamp.errors import NotFinite, PatchclampError, ProgramError, ShapeError, UnsupportedSite, unknown
from patchclamp.language import Lens, Site
from patchclamp.language import prompt as whole_prompt
from patchclamp.language.ops import Translator
from patchclamp.language.site import SPECS, parse_site
from patchclamp.language.structs import PublicStruct
from patchclamp.language.values import as_array
from patchclamp.lm import LM
from patchclamp.plots import GridPanel, TokenGrid, style
from patchclamp.proving import lens_difference
from patchclamp.run import Run
from patchclamp.studies import inputs
from patchclamp.studies.metric import single_token
from patchclamp.studies.readout import LAST, MAX_FLOATS, Way, readout_of
from patchclamp.studies.study import StoredArray, Study, StudyResult, keeping, progress, provenance, recorded

if TYPE_CHECKING:
    import pandas
    import torch

Colour = Literal["probability", "kl", "entropy"]
COLOURS: dict[str, str] = {
    "probability": "probability of the likeliest token",
    "kl": "KL divergence of the layer from the final layer, nats",
    "entropy": "entropy, nats",
}


class Guess(PublicStruct, frozen=True):
    """A token that a layer predicts, and its probability."""

    token_id: int
    token: str
    probability: float


class LogitLensResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """`top_ids`, `top_probs` [L, P, K]: the likeliest tokens, best first. `ranks`, `logprobs` [L, P, C]: the chosen
    tokens' ranks (0: the likeliest) and log-probabilities. `kl` [L, P]: Σ p · log(p / q) in nats, with p the final
    layer's distribution, and q this layer's distribution through the lens. `entropy` [L, P]: entropy of q, in nats.

    lens: description of the lens · readout, about: kind of readout, and its description
    positions: prompt position of each column · texts: every token in the result, by id
    """

    prompt: str
    prompt_tokens: tuple[str, ...]
    prompt_token_ids: tuple[int, ...]
    site: str
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    texts: dict[int, str]
    lens: str
    readout: str
    about: str
    top_ids: np.ndarray
    top_probs: np.ndarray
    ranks: np.ndarray
    logprobs: np.ndarray
    kl: np.ndarray
    entropy: np.ndarray

    def top(self, layer: int, position: int) -> list[Guess]:
        """Return the likeliest tokens at a layer and a prompt position; negative numbers count from the end."""
        at = (_index_of(self.layers, layer, self.layers[-1] + 1, "layer"),
              _index_of(self.positions, position, len(self.prompt_tokens), "position"))  # fmt: skip
        pairs = zip(self.top_ids[at].tolist(), self.top_probs[at].tolist(), strict=True)
        return [Guess(token, self.texts[token], probability) for token, probability in pairs]

    def rank(self, token: str | int) -> np.ndarray:
        """Return a chosen token's rank, by text or id, at every layer and position [L, P]; 0 is the likeliest."""
        return self.ranks[:, :, self._chosen(token)]

    def probability(self, token: str | int) -> np.ndarray:
        """Return the probability of a chosen token at every layer and position [L, P]."""
        return np.exp(self.logprobs[:, :, self._chosen(token)])

    def _chosen(self, token: str | int) -> int:
        names = self.tokens if isinstance(token, str) else self.token_ids
        if (not isinstance(token, str) and not is_token_id(token)) or token not in names:
            raise unknown("chosen token", token, [str(name) for name in names], "token")
        return names.index(token)  # pyright: ignore[reportArgumentType]

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per layer and position: token, likeliest next token, KL, entropy, and each chosen token's rank
        and probability."""
        import pandas

        rows = [
            {
                "layer": layer, "position": position, "token": self.prompt_tokens[position],
                "top_token": self.texts[int(self.top_ids[l, p, 0])], "top_probability": float(self.top_probs[l, p, 0]),
                "kl": float(self.kl[l, p]), "entropy": float(self.entropy[l, p]),
                **{f"rank of {name!r}": int(self.ranks[l, p, c]) for c, name in enumerate(self.tokens)},
                **{f"probability of {name!r}": float(np.exp(self.logprobs[l, p, c]))
                   for c, name in enumerate(self.tokens)},
            }
            for l, layer in enumerate(self.layers) for p, position in enumerate(self.positions)  # noqa: E741
        ]  # fmt: skip
        return pandas.DataFrame(rows)

    def picture(self, *colours: Colour) -> TokenGrid:
        """Return plot data: a panel for each quantity in `colours`, with the likeliest token in each cell."""
        return TokenGrid(
            title=f"{self.lens[0].upper()}{self.lens[1:]} at {self.site}: next-token predictions by layer",
            explained="Each cell is the likeliest next token of one layer at one position, read off its stream.",
            provenance=f"{self.provenance.where} · {self.about}", prompt=self.prompt_tokens,
            panels=tuple(self._panel(colour) for colour in colours or ("probability", "kl")),
        )  # fmt: skip

    def _panel(self, colour: Colour) -> GridPanel:
        if str(colour) not in COLOURS:
            raise unknown("colour", str(colour), list(COLOURS), "colour")
        values = {"probability": self.top_probs[:, :, 0], "kl": self.kl, "entropy": self.entropy}[colour]
        up, across = range(len(self.layers)), range(len(self.positions))
        visible = {token: style.visible(text) for token, text in self.texts.items()}
        return GridPanel(
            name=COLOURS[colour], row_name="layer", column_name="token of the prompt", reaches=(0.0, None),
            rows=tuple(map(str, self.layers)),
            columns=tuple(style.visible(self.prompt_tokens[position]) for position in self.positions),
            values=np.array(values, np.float64), strong="high" if colour == "probability" else "low",
            texts=tuple(tuple(visible[token] for token in row) for row in self.top_ids[:, :, 0].tolist()),
            notes=tuple(tuple(self._note(layer, p) for p in across) for layer in up),
        )  # fmt: skip

    def _note(self, l: int, p: int) -> str:  # noqa: E741
        """Return the hover text of a cell."""
        tops = ", ".join(
            f"{style.visible(self.texts[int(token)])} {100 * probability:.1f} %"
            for token, probability in zip(self.top_ids[l, p], self.top_probs[l, p], strict=True)
        )
        chosen = "".join(
            f"\n{style.visible(name)}: rank {self.ranks[l, p, c]}, {100 * np.exp(self.logprobs[l, p, c]):.2g} %"
            for c, name in enumerate(self.tokens)
        )
        return f"{tops}\nKL {self.kl[l, p]:.2f}, entropy {self.entropy[l, p]:.2f} nats{chosen}"

    def __repr__(self) -> str:
        best = self.top(self.layers[-1], self.positions[-1])[0]
        ends = f"{best.token!r} {best.probability:.2f}"
        return f"<LogitLensResult {self.site} × {len(self.positions)} positions: ends on {ends}>"


def _index_of(known: tuple[int, ...], number: int, count: int, path: str) -> int:
    """Return the index of a layer or position; negative numbers count from the end."""
    wanted = number + count if is_token_id(number) and number < 0 else number
    if not is_token_id(number) or wanted not in known:
        raise unknown(path, number, map(str, known), path)
    return known.index(wanted)


HOST_ROWS, DEVICE_ROWS = 1 << 8, 1 << 12  # rows read together, rounded down to whole positions


class LogitLens(Study):
    """Read every layer and position of a prompt through the model's final norm and unembedding.

    Raises: `ModelError` if `readout="weights"` does not reproduce the logits, `ShapeError` for matrices that do not
    fit, `UnsupportedSite` for a site of another width, and the error of the run.
    """

    command = "lens"
    positional = 1

    prompt: inputs.Prompt
    """Prompt, as text or token ids."""
    tokens: inputs.ChosenTokens = ()
    """Tokens, as text or id, whose rank and probability are reported in every cell; with `unembedding`, row labels."""
    site: inputs.SiteField = "resid_post"
    """Site as wide as the stream, such as resid_post or resid_mid."""
    layers: inputs.Layers = None
    """Layers of sites without an index: by default all, or the translators' layers; a number, a list, or a range such
    as "0:12"."""
    positions: inputs.Positions = None
    """Positions to read: a selection or a list; all by default."""
    top: inputs.Positive = 5
    """Number of likeliest tokens to keep per cell."""
    translators: inputs.PythonOnly = None
    """Tuned or Jacobian lens: a mapping from layers to A [D, D] or (A, b [D]), the result of `fit_lens`, or its file.
    The readout gets A h + b in place of the stream h."""
    unembedding: inputs.PythonOnly = None
    """Matrix [K, D] to use instead of the model's unembedding, after its final norm."""
    labels: inputs.Labels = None
    """Names of the rows of `unembedding`."""
    readout: Way | None = None
    """device: apply the model's own norm and unembedding on its device, in its dtype; weights: apply its weights on the
    host, in fp32; engine: one request per cell. By default the first that is supported and reproduces the model's
    logits; device supports neither translators nor another unembedding."""

    def _run(
        self, lm: LM, *, show_progress: inputs.Progress = None, resume: inputs.ResumeFile = None
    ) -> LogitLensResult:
        import torch

        from patchclamp.engines.lenses import LENS_VALUES, lens_values, translation

        at, prompt = checked_site(lm, self.site), self.prompt
        chosen_layers, maps = _translated_layers(lm, at, self.layers, self.translators)
        run = lm.run(prompt, max_tokens=1, capture=[Site(at.name, layer) @ whole_prompt for layer in chosen_layers]
                     + [LAST @ whole_prompt])  # fmt: skip
        columns = inputs.positions_of(run, self.positions)
        shape = None, lm.model.d_model
        own_VD = None if self.unembedding is None else _tensor(self.unembedding, shape, "unembedding")
        names = _labels(own_VD, self.labels)
        chosen = [_chosen(lm, token, names, i) for i, token in enumerate(self.tokens)]
        streams = [LAST, *(Site(at.name, layer) for layer in chosen_layers)]
        if self._on_device(lm):
            way, about = "device", "the model's own norm and unembedding, where it runs"
            wanted = [Wanted(run.key, lm.sites.resolve(site)[0].point) for site in streams]

            def read(some: list[int]) -> dict[str, np.ndarray]:
                return lm.engine.read_streams(wanted, [columns[i] for i in some], self.top, chosen)
        else:
            through = readout_of(lm, self.readout, run.prompt_token_ids)
            way, about = through.way, through.about
            translate = [translation(None, "cpu"), *(translation(maps.get(layer), "cpu") for layer in chosen_layers)]
            rows_GPD = torch.stack([to(_rows(run, site, columns)) for to, site in zip(translate, streams, strict=True)])

            def read(some: list[int]) -> dict[str, np.ndarray]:
                rows_ND = rows_GPD[:, some].flatten(0, 1)
                logits = through.logits(rows_ND) if own_VD is None else [through.normed(rows_ND) @ own_VD.T]
                return lens_values(torch.cat([*logits]).unflatten(0, (len(streams), -1)), self.top, chosen)

        question = {
            "study": "logit_lens", "prompt": run.prompt_token_ids, "site": at.name, "layers": chosen_layers,
            "positions": columns, "tokens": chosen, "top": self.top, "readout": way,
            "maps": [(of.matrix.content, None if of.bias is None else of.bias.content) for of in maps.values()],
            "unembedding": None if own_VD is None else hashlib.sha256(own_VD.numpy().tobytes()).hexdigest(),
        }  # fmt: skip
        most = DEVICE_ROWS if way == "device" else min(HOST_ROWS, MAX_FLOATS // lm.model.d_vocab)
        together = max(most // len(streams), 1)
        parts: list[dict[str, StoredArray]] = []
        with (keeping(lm, question, resume) as journal,
              progress("reading", len(columns), show_progress) as advance):  # fmt: skip
            for begin in range(0, len(columns), together):
                some = [*range(begin, min(begin + together, len(columns)))]

                def compute(some: list[int] = some) -> list[dict[str, StoredArray]]:
                    return [{name: StoredArray.of(value) for name, value in read(some).items()}]

                parts += recorded(journal, 1, dict[str, StoredArray], compute)
                advance(len(some))
        run.close()
        measured: dict[str, Any] = {
            name: np.concatenate([part[name].array() for part in parts], 1) for name in LENS_VALUES
        }
        if not np.isfinite(measured["entropy"]).all():
            raise NotFinite(f"the lens at {at.name} has non-finite logits: use bfloat16 or float32 if rows overflow")
        ids = sorted({*chosen, *np.unique(measured["top_ids"]).tolist()})
        texts = names or lm.tokenizer.token_strings(ids)
        texts = {token: texts[token if names else i] for i, token in enumerate(ids)}
        strings = tuple(lm.tokenizer.token_strings(run.prompt_token_ids))
        lens = "logit lens" if self.translators is None else "translated lens"
        return LogitLensResult(
            provenance=provenance(lm), prompt=prompt if isinstance(prompt, str) else "".join(strings),
            prompt_tokens=strings, prompt_token_ids=tuple(run.prompt_token_ids), site=at.name,
            layers=tuple(chosen_layers),
            positions=tuple(columns), tokens=tuple(texts[token] for token in chosen), token_ids=tuple(chosen),
            texts=texts,
            lens=lens if own_VD is None else f"{lens} through a matrix of {len(own_VD)} rows",
            readout=way, about=about,
            **measured,
        )  # fmt: skip

    def _on_device(self, lm: LM) -> bool:
        """True if the engine unembeds the streams. Raises `ProgramError` if `readout="device"` is not possible."""
        if self.readout not in ("device", None):
            return False
        if not lm.engine.unembeds:
            why = f"the {lm.model.engine} engine does not unembed streams on its device"
        elif self.translators is not None or self.unembedding is not None:
            why = "translators= and unembedding= are not supported on the device"
        else:
            why = lens_difference(lm)
        if why and self.readout == "device":
            raise ProgramError(f"{why}: use readout='weights'", "readout")
        return not why


logit_lens: Callable[..., LogitLensResult] = LogitLens.short_form("logit_lens")


def _translated_layers(lm: LM, at: Site, layers: Any, translators: Any) -> tuple[list[int], dict[int, Translator]]:
    """Return the layers to read (by default all layers, or all with a translator), and their translators by layer."""
    if translators is None:
        return inputs.layers_of(lm, at.name, layers), {}
    chosen = None if layers is None else tuple(inputs.layers_of(lm, at.name, layers))
    lens = Lens(Site(at.name, chosen), translators=translators)
    lens.check_width(lm.model.d_model)
    maps = {one.layer: one for one in lens.translators or ()}
    return inputs.layers_of(lm, at.name, [*maps], "translators"), maps


def _tensor(numbers: Any, shape: tuple[int | None, ...], path: str) -> torch.Tensor:
    import torch

    tensor = torch.from_numpy(as_array(numbers, path).copy())
    if not tensor.isfinite().all():
        raise ShapeError("expected finite numbers, got NaN or infinity", path)
    fits = tensor.dim() == len(shape) and all(n in (None, m) for n, m in zip(shape, tensor.shape, strict=True))
    if not fits or not tensor.numel():
        wanted = ", ".join("K" if n is None else str(n) for n in shape)
        raise ShapeError(f"expected shape [{wanted}], got {list(tensor.shape)}", path)
    return tensor


def _labels(own_VD: torch.Tensor | None, labels: Sequence[str] | None) -> list[str] | None:
    """Return the row labels of a matrix that replaces the unembedding; None without one."""
    if own_VD is None:
        if labels is not None:
            raise ProgramError("labels require unembedding=, whose rows they name", "labels")
        return None
    if labels is None:
        return [f"row {i}" for i in range(len(own_VD))]
    if len(labels) != len(own_VD):
        raise ProgramError(f"expected {len(own_VD)} labels, one per row, got {len(labels)}", "labels")
    return list(labels)


def _chosen(lm: LM, token: str | int, names: list[str] | None, number: int) -> int:
    """Return the id of a chosen token, or the row with that label."""
    path = f"tokens[{number}]"
    if names is not None:
        if token not in names:
            raise ProgramError(f"unknown label {token!r}; available: {', '.join(names[:8])}", path)
        return names.index(token)  # pyright: ignore[reportArgumentType]
    return single_token(lm, token, path)


def checked_site(lm: LM, site: Site | str) -> Site:
    """Return a site after checking that it is as wide as the stream and has one row per layer."""
    try:
        at = parse_site(site)
    except PatchclampError as error:
        raise error.under("site") from None
    if at.layers is not None or at.index is not None or not SPECS[at.name].layered or SPECS[at.name].width != "D":
        wide = [name for name in lm.sites.names if SPECS[name].layered and SPECS[name].width == "D"]
        raise UnsupportedSite(f"{at}: expected a site as wide as the stream ({', '.join(wide)}), without brackets; "
                              "select layers with layers=", "site")  # fmt: skip
    return at


def _rows(run: Run, site: Site, positions: list[int]) -> torch.Tensor:
    import torch

    return torch.as_tensor(run[site]).float()[positions]
