"""The page `docs/sites.md`, made from the tables: `make docs`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from patchclamp.language.site import (
    DIFFERENCES,
    EDITED_ELSEWHERE,
    ELSEWHERE,
    NNTERP,
    SITES,
    SPECS,
    TRANSFORMER_LENS,
    Difference,
)
from patchclamp.sites.map import LAYERS_WITH
from patchclamp.sites.tables import DECODERS, FAMILIES, Family, PointKind, Size, Tap
from tools.lens_table import TABLE
from tools.raw_hooks import Engine, raw

ENGINES: tuple[Engine, ...] = ("transformers", "vllm")
TITLES = {"transformers": "Transformers", "vllm": "vLLM"}
COUNTS: dict[Size, str] = {"D": "D", "V": "V", "Q": "H·E", "K": "K·E", "Z": "H·E", "M": "M", "X": "X"}

# what could not be run on both engines, and why
UNTRIED = {
    "Qwen3NextForCausalLM": "Proved on both engines, but compared in bfloat16 alone: vLLM's kernels of linear "
                            "attention for CPUs take nothing else",
    "Qwen3_5ForCausalLM": "On a CPU, vLLM ran the two Qwen3.5 classes as decoders of their multimodal classes",
    "MiniMaxM2ForCausalLM": "Its tensors were compared on no machine: vLLM's router for CPUs takes no sigmoid without "
                            "groups. Each side was proved alone, vLLM's with a softmax",
    "NemotronHForCausalLM": "Layers with experts were run on Transformers alone: vLLM has no kernel for CPUs of "
                            "experts without a gate",
}  # fmt: skip

HEAD = """# Sites, family by family

<!-- made by `make docs` from src/patchclamp/sites; a test says whether it is up to date -->

This page says what each site is, and where it lies on both engines. It says what a raw hook there would have
returned, and what TransformerLens and nnterp call the site. `patchclamp sites MODEL` proves the sites on a live
model. `patchclamp parity MODEL` compares both engines at each of them.

T positions of a request · N generated tokens · D model width · H query heads · K key/value heads · E head size (Ev
of a value, where it differs) · M MLP width · X experts · V vocabulary · l a layer, from 0

{sites}

**How to read the tables.** A site is tapped at a module's input or output. Arguments count from 0; where two are
named, as in "arguments 1 + 2", the site is their sum. Columns are half-open. Under tensor parallel every worker has
the whole of a *replicated* tensor, and only some heads or neurons of a *sharded* one. patchclamp puts these
together. The first table is llama's. The tables of other families have the sites that differ from it.

**What holds for every raw hook.** On Transformers a hook sees a padded batch, [B, T, D]. With patchclamp you get
the rows of one request. On vLLM a hook sees one step, [rows, D]: the rows of many requests, one request after the
other. Of a request these may be a chunk of the prompt or one new token, and they are never what came from the
prefix cache. When a CUDA graph is replayed, a hook does not run at all. Kernels that run later may write into the
tensor that a hook was given. `logits` are read from what the model returns, not at a module.
"""

WITHIN = """A decoder within a model that also reads images has its family's table, with other names before the modules.
What is `model.layers.0` in the table is `model.language_model.layers.0` on Transformers, and
`language_model.model.layers.0` on vLLM. Its requests take programs if they are text alone.
"""


def page() -> str:
    """The whole page."""
    families = [_section(family) for family in FAMILIES]
    rows = ([f"`{spec.name}`", spec.shape, spec.meaning] for spec in SPECS.values())
    meaning = _table(("site", "shape", "what it is"), rows)
    contents = [f"- [{family.name}](#{family.name}): {_classes(family)}" for family in FAMILIES]
    parts = [HEAD.format(sites=meaning), "## Families\n", "\n".join(contents) + "\n", WITHIN, *families, _aliases()]
    return "\n".join(parts)


# -- a family


def _classes(family: Family) -> str:
    """The classes with a family's table, and the models that also read images and whose decoder has it."""
    within = [name for name, decoder in DECODERS.items() if decoder.architecture in family.architectures]
    return ", ".join(family.architectures) + (f"; the decoder of {', '.join(within)}" if within else "")


def _section(family: Family) -> str:
    parts = [f"### {family.name}\n", _about(family), _places(family), "", "**A raw hook would have returned**\n",
             _hooks(family)]  # fmt: skip
    if family.lacks:
        parts += ["", "**Not there**\n", *(f"- `{word}`: {why}" for word, why in family.lacks.items())]
    named = [difference for difference in DIFFERENCES if family.name in difference.families]
    if named:
        parts += [
            "",
            "**Names that are another tensor elsewhere**\n",
            *(f"- {_difference(each, False)}" for each in named),
        ]
    return "\n".join(parts) + "\n"


def _places(family: Family) -> str:
    """The table of a family's sites; of those that are as in the first family, only their names."""
    first = {} if family is FAMILIES[0] else _rows(FAMILIES[0])
    rows = _rows(family)
    alike = [word for word, row in rows.items() if first.get(word) == row]
    own = [row for word, row in rows.items() if word not in alike]
    table = _table(("site", "shape", "tensor parallel", "on Transformers", "on vLLM"), own)
    return table if not alike else f"{table}\n\n{_as_first(alike)}"


def _rows(family: Family) -> dict[str, list[str]]:
    """By word: the cells of its row."""
    return {word: [f"`{word}`", _shape(family, word), _layout(family, word),
                   *(_where(family, word, engine) for engine in ENGINES)]
            for word in SITES if word in family.sites}  # fmt: skip


def _as_first(words: Iterable[str]) -> str:
    return f"{_words(words)}: as for [{FAMILIES[0].name}](#{FAMILIES[0].name})"


def _about(family: Family) -> str:
    sentences = [", ".join(f"`{name}`" for name in family.architectures) + "."]
    if family.needs:
        sentences.append("Only with " + " and ".join(f"`{name}={value}`" for name, value in family.needs.items()) + ".")
    if any(name in UNTRIED for name in family.architectures):
        sentences.append("; ".join(UNTRIED[name] for name in family.architectures if name in UNTRIED) + ".")
    if family.backend:
        sentences.append("vLLM runs it through its Transformers backend: rows are [1, rows, D].")
    return " ".join(sentences) + "\n"


def _hooks(family: Family) -> str:
    """A line for all words of which the same is to be said; of what is as in the first family, only that."""
    texts, first = _texts(family), _texts(FAMILIES[0])
    alike = [word for word, text in texts.items() if family is not FAMILIES[0] and first.get(word) == text]
    groups: dict[tuple[str, str], list[str]] = {}
    for word, text in texts.items():
        if word not in alike:
            groups.setdefault(text, []).append(word)
    lines = [f"- {_words(words)}: {_sides(*text)}" for text, words in groups.items()]
    if alike:
        lines.append(f"- {_as_first(alike)}")
    return "\n".join(lines)


def _texts(family: Family) -> dict[str, tuple[str, str]]:
    return {word: (raw(family, word, "transformers"), raw(family, word, "vllm"))
            for word in SITES if word in family.sites}  # fmt: skip


def _sides(transformers: str, vllm: str) -> str:
    if transformers == vllm:
        return f"{vllm}."
    return f"*Transformers*: {transformers}. *vLLM*: {vllm}."


def _shape(family: Family, word: str) -> str:
    shape = SITES[word].shape
    own = family.points[family.sites[word][0]].width == "Z"
    return shape.replace("E]", "Ev]") if own else shape


def _layout(family: Family, word: str) -> str:
    layout = family.points[family.sites[word][0]].layout
    if layout == "partial sum":
        return "not there: each worker has a part of the sum"
    return f"sharded by {SITES[word].index.rpartition('/value ')[2]}" if layout == "sharded" else layout


def _where(family: Family, word: str, engine: Engine) -> str:
    name, shift = family.sites[word]
    kind: PointKind = family.points[name]
    some = LAYERS_WITH[kind.layers].replace(", the", ";")
    if kind.elsewhere in family.points:
        some += f"; in the others `{kind.elsewhere}`"
    tap: Tap = getattr(kind, engine)
    if word == "logits":
        return "the model's `logits`" if engine == "transformers" else "`compute_logits`"
    if not kind.per_layer:
        return _border(tap, tap.module) + some
    if not SITES[word].layered:
        return _border(tap, tap.module.replace("{l}", "0")) + some
    if not shift:
        return _border(tap, tap.module, family.name == "falcon") + some
    last: Tap = getattr(family.points[f"{name}_end"], engine)
    return f"{_border(tap, tap.module.replace('{l}', '{l+1}'))}; after the last layer {_border(last, last.module)}"


def _argument(name: int | str) -> str:
    return f"`{name}`" if isinstance(name, str) else str(name)


def _border(tap: Tap, module: str, grouped: bool = False) -> str:
    """Where a tap is, as text. `grouped`: whether several queries read a key/value head."""
    moments = {
        "in": " input",
        "out": " output",
        "attention": ", what its attention op computes",
        "query": ", what its attention function reads",
    }
    text = f"`{module}`{moments[tap.moment]}"
    if tap.residual is not None:
        text += f", arguments {_argument(tap.hidden)} + {_argument(tap.residual)}"
    elif tap.moment == "in" and tap.hidden:
        text += f", argument {_argument(tap.hidden)}"
    text += ", of which it is handed a copy" if tap.copied else ""
    if tap.of and tap.mixed and grouped:
        text += f", the {('queries', 'key', 'value')[tap.part]} of each key/value head"
    elif tap.of and tap.mixed:
        text += f", the {('first', 'second', 'last')[tap.part]} third of each head's columns"
    elif tap.of:
        text += f", columns [{_sum(tap.of[: tap.part])}, {_sum(tap.of[: tap.part + 1])})"
    return text + (f", times `{tap.scale}`" if tap.scale else "")


def _sum(sizes: tuple[Size, ...]) -> str:
    """(Q, K, K) as (H+2K)·E, (M, M) as 2M."""
    of_head = {"Q": "H", "K": "K"}
    terms = [f"{sizes.count(size) if sizes.count(size) > 1 else ''}{of_head.get(size, COUNTS[size])}"
             for size in dict.fromkeys(sizes)]  # fmt: skip
    if not of_head.keys() & set(sizes):
        return "+".join(terms) or "0"
    assert of_head.keys() >= set(sizes), f"{sizes} are not all of heads"
    return f"{terms[0]}·E" if len(terms) == 1 else f"({'+'.join(terms)})·E"


# -- names


def _aliases() -> str:
    ours = [[f"`{word}`", _listed(TRANSFORMER_LENS, word), _listed(NNTERP, word)] for word in SPECS]
    lens = [[f"`{alias}`", f"`{_layered(site)}`"] for alias, site in TRANSFORMER_LENS.items()]
    nnterp = [[f"`{_layered(alias)}`", f"`{_layered(site)}`"] for alias, site in NNTERP.items()]
    edited = [[f"`{name}`", why.replace("{l}", "l")] for name, why in EDITED_ELSEWHERE.items()]
    refused = [[f"`{name}`", why.replace("{l}", "l")] for name, why in ELSEWHERE.items()]
    return "\n".join([
        "## Names in TransformerLens and nnterp\n",
        "These names are read wherever a site's text is, and stand for our site on every engine: "
        '`pc.site("layers_output[12]")` is `pc.resid_post[12]`. nnterp\'s take layers and ranges as ours do '
        "(`layers_output[3:5]`). What is printed, saved or sent is our name.\n",
        "### From ours\n", _table(("ours", "TransformerLens", "nnterp"), ours), "",
        "### From nnterp's\n", _table(("nnterp", "ours"), nnterp), "",
        "### From TransformerLens'\n", _table(("TransformerLens", "ours"), lens), "",
        "### Names that are read and not edited\n",
        "An edit by one of these names is an error that says this. `pc.site(name)` is our site, which can be edited.\n",
        _table(("name", "edits"), edited), "",
        "### Where they are another tensor\n",
        "TransformerLens' numbers are ours where its weights are not processed (`from_pretrained_no_processing`, or "
        "`TransformerBridge`). Its other ways of loading fold norms and biases into the weights and centre them, which "
        "changes the stream, `attn_out`, `mlp_out`, `v` and `z`.\n",
        *(f"- {_difference(difference)}" for difference in DIFFERENCES), "",
        *_measured(),
        "### Names that are no site\n",
        "Asking for one is an error that says this.\n", _table(("name", "it"), refused), "",
    ])  # fmt: skip


def _measured() -> list[str]:
    """The table that `tools.lens_table` has measured: by name, the families where it is not as our site."""
    said = json.loads(TABLE.read_text())
    models = {name: of for name, of in said["models"].items() if "family" in of}
    rows = [[f"`{alias}`", *(_words(sorted({of["family"] for of in models.values() if alias in of[kind]})) or "–"
                             for kind in ("capture", "edit", "absent"))] for alias in TRANSFORMER_LENS]  # fmt: skip
    left = [f"`{name}`" for name in said["models"] if name not in models]
    return [f"Measured by `python -m tools.lens_table` with TransformerLens {said['transformer_lens']} and "
            f"Transformers {said['transformers']}, on {len(models)} tiny random models: the families where a name "
            "captures other rows, where its rows are the same and an edit has another effect, and where "
            "TransformerLens lacks it. "
            f"Not run: {', '.join(left)}.\n",
            _table(("TransformerLens", "other rows", "other edits", "not there"), rows), ""]  # fmt: skip


def _listed(names: dict[str, str], word: str) -> str:
    return ", ".join(f"`{_layered(alias) if names is NNTERP else alias}`" for alias, site in names.items()
                     if site == word) or "–"  # fmt: skip


def _layered(name: str) -> str:
    """With its layer, where it takes one."""
    return f"{name}[l]" if SPECS[NNTERP.get(name, name)].layered else name


def _difference(difference: Difference, families: bool = True) -> str:
    where = f" on {_words(difference.families)}" if families and difference.families else ""
    return f"{_words(difference.aliases)}{where}: {difference.what}."


# -- Markdown


def _words(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _table(head: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    def lines() -> Iterator[str]:
        yield f"| {' | '.join(head)} |"
        yield "|" + "---|" * len(head)
        yield from (f"| {' | '.join(row)} |" for row in rows)

    return "\n".join(lines())


if __name__ == "__main__":
    print(page(), end="")
