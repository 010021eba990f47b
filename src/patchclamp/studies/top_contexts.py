"""Features of a data set, on disk, and the contexts in which a feature of a sparse autoencoder is largest.

The active features of every token are written to Parquet files, with the columns document, position, token_id, feature
and value, in the order of the documents. A file is complete or missing, so a stopped run continues at the next one.
Contexts are then read from the files: the same study with other `features` runs nothing again.

Source: Bricken et al. 2023, "Towards monosemanticity"; Bills et al. 2023, "Language models can explain neurons".
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from patchclamp.errors import ProgramError
from patchclamp.language import Features
from patchclamp.language.structs import PublicStruct
from patchclamp.language.values import as_file, as_items
from patchclamp.lm import LM
from patchclamp.plots import GridPanel, TokenGrid, style
from patchclamp.run import FeaturesResult, Run
from patchclamp.store.system import write_whole
from patchclamp.studies import inputs
from patchclamp.studies.harvest.recipe import TokenizedDocuments, documents_of, needed, read_tokens
from patchclamp.studies.study import (
    Arg,
    Study,
    StudyResult,
    json_of,
    model_identity,
    progress,
    provenance,
    recorded_runs,
)

if TYPE_CHECKING:
    import pandas


SHARD_PROMPTS = 4096  # in a file


class FeatureContext(PublicStruct, frozen=True):
    """A token at which a feature is large, with the tokens around it and the feature's value at each; `at` is its own
    place among them, and `position` its place in the document."""

    feature: int
    document: int
    position: int
    tokens: tuple[str, ...]
    values: tuple[float, ...]
    at: int


class TopContextsResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """`contexts` of every feature, by its value, largest first. `density` [features]: the share of tokens at which each
    of the chosen `features` is among those kept. `folder` has the Parquet files of all features."""

    folder: str
    sae: str
    features: tuple[int, ...]
    density: np.ndarray
    contexts: tuple[FeatureContext, ...]

    def table(self) -> Any:
        """All features of all tokens, as a `pyarrow.Table`: document, position, token_id, feature, value."""
        return needed("pyarrow.parquet").read_table(self.folder)

    def to_frame(self) -> pandas.DataFrame:
        """One row per context: feature, value, document, position, token and text."""
        import pandas

        return pandas.DataFrame([
            {"feature": one.feature, "value": one.values[one.at], "document": one.document, "position": one.position,
             "token": one.tokens[one.at], "text": "".join(one.tokens)}
            for one in self.contexts
        ])  # fmt: skip

    def picture(self) -> TokenGrid:
        """Plot data: a panel per feature, whose rows are its contexts, with tokens coloured by its value."""
        rows = [(str(one.feature), style.number(one.values[one.at]), style.visible(one.tokens[one.at]),
                 style.plain("".join(one.tokens))) for one in self.contexts]  # fmt: skip
        return TokenGrid(
            title=f"Top contexts of {len(self.features)} features of {self.sae}", provenance=self.provenance.where,
            explained="Each row is a context, with the token at which the feature is largest in the middle.",
            panels=tuple(map(self._panel, self.features)), table=(("feature", "value", "token", "continuation"), *rows),
        )  # fmt: skip

    def _panel(self, feature: int) -> GridPanel:
        contexts = [one for one in self.contexts if one.feature == feature][::-1]  # the first row is at the bottom
        width = max((max(one.at, len(one.tokens) - 1 - one.at) for one in contexts), default=0)
        values = np.full((max(len(contexts), 1), 2 * width + 1), np.nan)
        texts = [[""] * (2 * width + 1) for _ in values]
        for r, one in enumerate(contexts):
            here = slice(width - one.at, width - one.at + len(one.tokens))
            values[r, here], texts[r][here] = one.values, map(style.visible, one.tokens)
        share = self.density[self.features.index(feature)]
        return GridPanel(
            name=f"feature {feature}, at {style.percent(share)} of tokens", row_name="document", column_name="token",
            rows=tuple(str(one.document) for one in contexts) or ("",), values=values, reaches=(0.0, None),
            columns=tuple(map(str, range(-width, width + 1))), texts=tuple(map(tuple, texts)),
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<TopContextsResult {len(self.contexts)} contexts of {len(self.features)} features, in {self.folder}>"


def _ids(ids: Any, path: str) -> list[int]:
    return [inputs.check_whole(one, f"{path}[{i}]") for i, one in enumerate(as_items(ids, path))]


class TopContexts(Study):
    """Write the active features of a data set to disk, and show the contexts in which some are largest.

    Raises: `ProgramError` and `TokensError` for wrong arguments and documents, and the error of any run.
    """

    command = "contexts"
    not_served = "it writes files; run it with pc.LM of the server's URL"

    sae: inputs.SAEField
    """An SAE, or the name of an attached one; on the command line also its folder or file."""
    documents: Annotated[Any, Arg(served=False)]
    """Documents, as a harvest takes them: a file of text, JSON lines or Parquet, or a list of texts or token ids."""
    folder: Annotated[Any, Arg(as_file, served=False)]
    """Parent of the data set's folder, whose name is the hash of everything that its numbers depend on."""
    features: Annotated[Any, Arg(_ids, int, many=True, option="feature")] = ()
    """Features to show contexts of."""
    at: inputs.SiteField = None
    """Site that the SAE reads, if its file does not say it."""
    kept: inputs.Positive = 32
    """Largest features of each token to write, at most 128."""
    contexts: inputs.Positive = 10
    """Contexts of each feature."""
    window: inputs.Whole = 8
    """Tokens to show on both sides. Contexts of a feature do not overlap in the middle."""
    column: inputs.OptionalText = None
    """Field or column with the documents; text by default."""
    context: inputs.OptionalCount = None
    """Maximum prompt length in tokens; the limit of the model by default. Longer documents are split."""

    def _run(self, lm: LM, *, batch: inputs.Positive = 256, show_progress: inputs.Progress = None) -> TopContextsResult:
        arrow, parquet = needed("pyarrow"), needed("pyarrow.parquet")
        tokens = read_tokens(lm, documents_of(self.documents, self.column), self.context, "split")
        with inputs.attached(lm, self.sae, self.at) as (sae, where):
            if self.features and max(self.features) >= sae.n_features:
                raise ProgramError(f"expected features below {sae.n_features}, got {max(self.features)}", "features")
            made = {"made": msgspec.to_builtins(provenance(lm)), "weights": model_identity(lm)[1]}
            question = {**made, "documents": tokens.digest, "sae": sae.content, "at": where.card.at, "kept": self.kept}
            name = hashlib.sha256(json_of(question).encode()).hexdigest()[:16]
            place, prompts = Path(self.folder) / name, len(tokens.prompts) - 1
            place.mkdir(parents=True, exist_ok=True)
            read = Features(where.card.name, top=min(self.kept, sae.n_features))

            def call(which: Sequence[int]) -> dict[str, Any]:
                return {"prompt": [tokens.prompt(i) for i in which], "max_tokens": 1, "capture": [read]}

            def found(runs: Sequence[Run], _: Sequence[int]) -> list[FeaturesResult]:
                lm.lens(runs)
                return [run.features[read.name] for run in runs]

            with progress("reading features", prompts, show_progress, "prompts") as advance:
                for number, first in enumerate(range(0, prompts, SHARD_PROMPTS)):
                    path, content = place / f"features-{number:05d}.parquet", io.BytesIO()
                    here = range(first, min(first + SHARD_PROMPTS, prompts))
                    if path.exists():
                        advance(len(here))
                        continue
                    results = recorded_runs(lm, None, here, call, found, FeaturesResult, advance, batch)
                    parquet.write_table(arrow.table(_columns(tokens, here, results)), content, compression="zstd")
                    write_whole(path, content.getvalue())
        contexts, density = list[FeatureContext](), list[float]()
        for feature in self.features:
            active = parquet.read_table(place, filters=[("feature", "=", feature)])
            density.append(len(active) / len(tokens.ids))
            where_active = tokens.documents[active["document"].to_numpy()] + active["position"].to_numpy()
            contexts += self._contexts(lm, tokens, feature, where_active, active["value"].to_numpy())
        return TopContextsResult(
            provenance=provenance(lm), folder=str(place), sae=repr(sae), features=tuple(self.features),
            density=np.array(density), contexts=tuple(contexts),
        )  # fmt: skip

    def _contexts(
        self, lm: LM, tokens: TokenizedDocuments, feature: int, places: np.ndarray, values: np.ndarray
    ) -> list[FeatureContext]:
        """The contexts of a feature, which has these values at these places in the documents' ids."""
        value_of = dict(zip(places.tolist(), values.tolist(), strict=True))
        contexts: list[FeatureContext] = []
        shown: list[int] = []
        for place in places[np.argsort(-values, kind="stable")].tolist():
            document = int(tokens.document_of(np.array(place)))
            begin, end = tokens.documents[document : document + 2].tolist()
            if any(begin <= other < end and abs(place - other) <= self.window for other in shown):
                continue
            first, stop = max(begin, place - self.window), min(end, place + self.window + 1)
            texts = tuple(lm.tokenizer.token_strings(tokens.ids[first:stop].tolist()))
            near = tuple(value_of.get(i, 0.0) for i in range(first, stop))
            contexts.append(FeatureContext(feature, document, place - begin, texts, near, place - first))
            shown.append(place)
            if len(shown) == self.contexts:
                break
        return contexts

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain data; of documents that are not in a file, only their type."""
        file = isinstance(self.documents, (str, Path))
        return super().to_dict() | {"documents": str(self.documents) if file else type(self.documents).__name__}


top_contexts: Callable[..., TopContextsResult] = TopContexts.short_form("top_contexts")


def _columns(tokens: TokenizedDocuments, prompts: range, results: Sequence[FeaturesResult]) -> dict[str, np.ndarray]:
    """The columns of a file: the active features of some prompts."""
    places, features, values = [], [], []
    for prompt, found in zip(prompts, results, strict=True):
        row, rank = np.nonzero(found.values)
        places.append(tokens.prompts[prompt] + np.array(found.positions)[row])
        features.append(found.ids[row, rank])
        values.append(found.values[row, rank])
    place = np.concatenate(places)
    document = tokens.document_of(place)
    return {
        "document": document, "position": (place - tokens.documents[document]).astype(np.int32),
        "token_id": tokens.ids[place], "feature": np.concatenate(features), "value": np.concatenate(values),
    }  # fmt: skip
