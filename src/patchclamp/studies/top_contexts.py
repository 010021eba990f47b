"""The contexts of a data set where a feature of a sparse autoencoder is largest.

Contexts are read from a harvest of features, which the study makes unless one is given. Running the study again with
other `features` reuses the harvest.

Source: Bricken et al. 2023, "Towards monosemanticity"; Bills et al. 2023, "Language models can explain neurons".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from patchclamp.errors import ProgramError
from patchclamp.language import Features
from patchclamp.language.structs import PublicStruct
from patchclamp.language.values import as_file
from patchclamp.lm import LM
from patchclamp.plots import GridPanel, TokenGrid, style
from patchclamp.studies import inputs
from patchclamp.studies.harvest import Harvest, Harvested, as_harvested
from patchclamp.studies.harvest.recipe import StoredFeatures, TokenizedDocuments
from patchclamp.studies.study import Arg, Study, StudyResult, model_identity, provenance

if TYPE_CHECKING:
    import pandas


class FeatureContext(PublicStruct, frozen=True):
    """A token where a feature is large, with the tokens around it and the feature's value at each of them; `at` is the
    token's index in `tokens`, and `position` its position in the document."""

    feature: int
    document: int
    position: int
    tokens: tuple[str, ...]
    values: tuple[float, ...]
    at: int


class TopContextsResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """`contexts`: each feature's contexts, largest values first. `density` [features]: the fraction of tokens where
    each of the chosen `features` was kept. `folder`: the harvest, which has the features of all tokens under `name`."""

    folder: str
    sae: str
    name: str
    features: tuple[int, ...]
    density: np.ndarray
    contexts: tuple[FeatureContext, ...]

    def table(self) -> Any:
        """Return all features of all tokens as a `pyarrow.Table`: document, position, token_id, feature, value."""
        return Harvested(self.folder).features(self.name)

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per context: feature, value, document, position, token and text."""
        import pandas

        return pandas.DataFrame([
            {"feature": one.feature, "value": one.values[one.at], "document": one.document, "position": one.position,
             "token": one.tokens[one.at], "text": "".join(one.tokens)}
            for one in self.contexts
        ])  # fmt: skip

    def picture(self) -> TokenGrid:
        """Return plot data: a panel per feature, with a row per context and tokens coloured by the feature's value."""
        rows = [(str(one.feature), style.number(one.values[one.at]), style.visible(one.tokens[one.at]),
                 style.plain("".join(one.tokens))) for one in self.contexts]  # fmt: skip
        active = {one.feature for one in self.contexts}
        never = [feature for feature in self.features if feature not in active]
        silent = f" Not active in these documents: {', '.join(map(str, never))}." if never else ""
        return TokenGrid(
            title=f"Top contexts of {len(self.features)} features of {self.sae}", provenance=self.provenance.where,
            explained=f"Each row is a context around the token with the feature's largest value, at 0.{silent}",
            panels=tuple(self._panel(feature) for feature in self.features if feature in active or not active),
            table=(("feature", "value", "token", "context"), *rows),
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
            name=f"feature {feature}, active at {style.percent(share)} of tokens", row_name="document",
            column_name="token", rows=tuple(str(one.document) for one in contexts) or ("",), values=values,
            reaches=(0.0, None), columns=tuple(map(str, range(-width, width + 1))), texts=tuple(map(tuple, texts)),
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<TopContextsResult {len(self.contexts)} contexts of {len(self.features)} features, in {self.folder}>"


class TopContexts(Study):
    """Show the contexts of a data set where the chosen features are largest, from a given or a new harvest.

    Raises: `ProgramError` and `TokensError` for wrong arguments and documents, and the error of any run.
    """

    command = "contexts"
    not_served = "it writes files; run it in the client with pc.LM(url)"

    sae: inputs.SAEField
    """An SAE, or the name of an attached SAE; on the command line also an SAE's folder or file."""
    documents: Annotated[Any, Arg(served=False)] = None
    """Documents, as a harvest takes them: a file of text, JSON lines or Parquet, or a list of texts or token ids."""
    folder: Annotated[Any, Arg(as_file, served=False)] = None
    """Parent folder of the harvest of these documents."""
    harvest: Annotated[Any, Arg(as_harvested, served=False)] = None
    """Harvest with the SAE's features, instead of documents: its folder or a `Harvested`. The model is not run."""
    features: inputs.FeatureIds = ()
    """Features to show contexts of."""
    at: inputs.SiteField = None
    """Site that the SAE reads, if its file does not name it."""
    kept: inputs.Kept = 32
    """Number of largest features of each token to store, at most 128."""
    contexts: inputs.Positive = 10
    """Number of contexts per feature."""
    window: inputs.Whole = 8
    """Number of tokens to show on each side. Contexts of a feature do not contain each other's middle token."""
    column: inputs.OptionalText = None
    """Field or column with the documents; text by default."""
    context: inputs.OptionalCount = None
    """Maximum prompt length in tokens; the model's limit by default. Longer documents are split."""

    def _run(
        self, lm: LM, *, batch_tokens: inputs.OptionalCount = None, show_progress: inputs.Progress = None
    ) -> TopContextsResult:
        if self.harvest is None:
            data, stored = self._harvest(lm, batch_tokens, show_progress)
        else:
            data, stored = self.harvest, self._stored(lm)
        for feature in self.features:
            if feature >= stored.count or (stored.ids is not None and feature not in stored.ids):
                known = stored.ids or f"below {stored.count}"
                raise ProgramError(f"expected features {known}, got {feature}", "features")
        contexts, density, tokens = list[FeatureContext](), list[float](), data.documents
        active = data.features(stored.name, self.features)
        places = tokens.documents[active["document"].to_numpy()] + active["position"].to_numpy()
        for feature in self.features:
            here = active["feature"].to_numpy() == feature
            density.append(here.sum() / len(data))
            contexts += self._contexts(lm, tokens, feature, places[here], active["value"].to_numpy()[here])
        return TopContextsResult(
            provenance=provenance(lm), folder=str(data.folder), sae=str(self.sae), name=stored.name,
            features=tuple(self.features), density=np.array(density), contexts=tuple(contexts),
        )  # fmt: skip

    def _harvest(self, lm: LM, batch_tokens: int | None, show: Any) -> tuple[Harvested, StoredFeatures]:
        """Harvest the documents' features."""
        if self.documents is None or self.folder is None:
            raise ProgramError("expected documents and a folder, or a harvest", "documents")
        with inputs.placed_sae(lm, self.sae, self.at) as where:
            read = Features(where.card.name, top=min(self.kept, where.card.features))
            made = Harvest(documents=self.documents, folder=self.folder, sites=[read], column=self.column,
                           context=self.context, overlong="split")  # fmt: skip
            data = made.run(lm, batch_tokens=batch_tokens, show_progress=show).open()
        return data, data.stored_features(read.name)

    def _stored(self, lm: LM) -> StoredFeatures:
        """Return the given harvest's entry for the SAE's features."""
        for name in ("documents", "folder", "at", "kept", "column", "context"):
            if getattr(self, name) is not self.fields()[name].default:
                raise ProgramError("not supported with a harvest: omit it", name)
        data: Harvested = self.harvest
        if (model := data.manifest.recipe.model) != model_identity(lm)[0]:
            raise ProgramError(f"expected a harvest of {lm.model.name}, got one of {model}", "harvest")
        if data.missing:
            raise ProgramError(f"{len(data.missing)} shards are missing: run the harvest again", "harvest")
        if isinstance(self.sae, str):
            return data.stored_features(self.sae)
        for one in data.manifest.recipe.features:
            if one.sae == self.sae.content:
                return one
        raise ProgramError(f"{data.folder} has no features of this SAE", "sae")

    def _contexts(
        self, lm: LM, tokens: TokenizedDocuments, feature: int, places: np.ndarray, values: np.ndarray
    ) -> list[FeatureContext]:
        """Return a feature's contexts, given its values [n] at indices `places` [n] in the documents' ids."""
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
        """Return the configuration as plain data; documents that are not in a file are represented by their type."""
        documents = self.documents if isinstance(self.documents, (str, Path)) else type(self.documents).__name__
        return super().to_dict() | ({} if self.documents is None else {"documents": str(documents)})


top_contexts: Callable[..., TopContextsResult] = TopContexts.short_form("top_contexts")
