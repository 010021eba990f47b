"""docs/sites.md: up to date with the tables, complete, and true to what the tables say."""

import json
import re
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from patchclamp.language.site import (
    DERIVED,
    DIFFERENCES,
    EDITED_ELSEWHERE,
    ELSEWHERE,
    NNTERP,
    SITES,
    SPECS,
    TRANSFORMER_LENS,
)
from patchclamp.sites.tables import FAMILIES, LLAMA
from tools.lens_table import TABLE
from tools.raw_hooks import raw
from tools.sites_page import _rows, _sum, page

FILE = Path(__file__).parents[2] / "docs" / "sites.md"
PAGE = page()


def section(name: str) -> str:
    return re.split(r"\n(?=##)", PAGE.partition(f"\n### {name}\n")[2])[0]


def own_rows(family: str, word: str) -> list[list[str]]:
    """The rows that a family's own table has of a site, each as cells: name, shape, layout, Transformers, vLLM."""
    lines = [line for line in section(family).splitlines() if line.startswith(f"| `{word}` |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def as_llama(family: str) -> set[str]:
    """The sites of which a family's section says, below its table, that they lie as llama's do."""
    places = section(family).partition("**A raw hook")[0]
    return {
        word for words in re.findall(r"^(`.*): as for \[llama\]", places, re.M) for word in re.findall(r"\w+", words)
    }


def row(family: str, word: str) -> list[str]:
    """The cells of a site's row, in the family's own table or in llama's."""
    (cells,) = own_rows("llama" if word in as_llama(family) else family, word)
    return cells


def hook_text(family: str, word: str) -> str:
    """What is said of a raw hook there."""
    lines = section(family).partition("**A raw hook")[2].partition("**Not there")[0].splitlines()
    (line,) = [line for line in lines if f"`{word}`" in line.partition(": ")[0]]
    return line.partition(": ")[2]


def test_the_file_is_up_to_date():
    assert FILE.read_text(encoding="utf-8") == PAGE, "the site tables have changed: run make docs"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_site_of_every_family_is_there_once(family):
    assert all(spec.shape and spec.meaning and word == spec.name for word, spec in SITES.items())
    for word in SITES:
        if word in family.sites:
            assert len(own_rows(family.name, word)) == (word not in as_llama(family.name))
            assert row(family.name, word) == _rows(family)[word]
            assert len(row(family.name, word)) == 5
            assert hook_text(family.name, word)
            assert raw(family, word, "transformers")
            assert raw(family, word, "vllm")
        else:
            assert f"- `{word}`: {family.lacks[word]}" in section(family.name)
    for architecture in family.architectures:
        assert f"`{architecture}`" in section(family.name)


def test_columns_are_counted_in_any_width():
    assert [_sum(sizes) for sizes in ((), ("Q",), ("Q", "K"), ("Q", "K", "K"))] == ["0", "H·E", "(H+K)·E", "(H+2K)·E"]
    assert [_sum(sizes) for sizes in (("M",), ("M", "M"), ("V", "D"))] == ["M", "2M", "V+D"]


def test_a_site_of_which_no_raw_hook_is_told_is_an_error():
    """A new site takes a sentence of its own, and gets no other's."""
    assert raw(LLAMA, "attn_in", "transformers") == "the site itself"
    with mock.patch.dict(SITES, gate=msgspec.structs.replace(SITES["neurons"], name="gate")):
        gated = msgspec.structs.replace(LLAMA, points=LLAMA.points | {"gate": LLAMA.points["neurons"]})
        with pytest.raises(KeyError, match="nothing is said of a raw hook at gate"):
            raw(gated, "gate", "vllm")


def test_other_families_show_what_differs():
    assert as_llama("llama") == set()
    assert as_llama("qwen3") == set(FAMILIES[0].sites) - {"q", "k"} - set(DERIVED)
    assert as_llama("gpt2") == {"logits"}


def test_places_are_those_of_the_tables():
    assert row("llama", "resid_post")[3:] == [
        "`model.layers.{l+1}` input; after the last layer `model.norm` input",
        "`model.layers.{l+1}` input, arguments 1 + 2; after the last layer `model.norm` input, arguments 0 + 1",
    ]
    assert row("llama", "v")[1:] == [
        "[T, K, E]", "sharded by head", "`model.layers.{l}.self_attn.v_proj` output",
        "`model.layers.{l}.self_attn.qkv_proj` output, columns [(H+K)·E, (H+2K)·E)",
    ]  # fmt: skip
    assert row("llama", "q")[4].endswith("columns [0, H·E)")
    assert row("llama", "k")[4].endswith("columns [H·E, (H+K)·E)")
    assert row("llama", "embed")[3] == "`model.layers.0` input"
    assert row("gpt2", "embed")[3] == "`transformer.wte` output"
    assert row("gpt_neox", "v")[3].endswith("query_key_value` output, the last third of each head's columns")
    assert row("granite", "mlp_out")[3].endswith("`model.layers.{l}.mlp` output, times `residual_multiplier`")
    assert row("granite", "resid_pre")[4].endswith("input, argument 1")
    assert row("qwen3_moe", "router")[3] == "`model.layers.{l}.mlp.gate` output; layers with experts"
    assert row("deepseek", "z")[1] == "[T, H, Ev]"
    assert row("mixtral", "logits")[3:] == ["the model's `logits`", "`compute_logits`"]


def test_what_a_raw_hook_would_have_returned():
    assert "a layer is handed (positions, hidden, residual) and returns (hidden, residual)" in hook_text(
        "llama", "resid_pre"
    )
    assert "but their sum" in hook_text("llama", "resid_mid")
    assert "a tuple of the output and the attention weights" in hook_text("llama", "attn_out")
    assert "side by side in one tensor, in a tuple with the bias" in hook_text("llama", "k")
    assert "*Transformers*: queries, keys and values side by side" in hook_text("phi3", "q")
    assert "before their norm" in hook_text("qwen3", "q")
    assert "heads before positions" in hook_text("gemma3", "k")
    assert "before the norm that follows" in hook_text("gemma2", "mlp_out")
    assert "times `residual_multiplier`" in hook_text("granite", "attn_out")
    assert "interleaved head by head" in hook_text("gpt_neox", "v")
    assert "a tuple of the output and the attention weights" in hook_text("gpt_neox", "attn_out")
    assert "(hidden, positions, residual)" in hook_text("gpt_oss", "resid_pre")
    assert "The experts are chosen by then" in hook_text("mixtral", "router")
    assert "√D" in hook_text("gemma2", "embed")
    assert hook_text("deepseek", "resid_post") == "as for [llama](#llama)"


def test_aliases_are_there_in_both_directions():
    names = PAGE.partition("## Names in TransformerLens and nnterp")[2]
    ours, _, theirs = names.partition("### From nnterp's")
    for alias, site in (TRANSFORMER_LENS | NNTERP).items():
        layer = "[l]" if SPECS[site].layered else ""
        shown = alias + layer if alias in NNTERP else alias
        (line,) = [line for line in ours.splitlines() if line.startswith(f"| `{site}` |")]
        assert f"`{shown}`" in line
        assert f"| `{shown}` | `{site}{layer}` |" in theirs
    for name in ELSEWHERE:
        assert f"| `{name}` |" in theirs


def test_the_differences_from_transformer_lens_are_those_that_were_measured():
    models = [of for of in json.loads(TABLE.read_text())["models"].values() if "family" in of]
    assert len(models) >= 40
    measured = {(of["family"], alias) for of in models for kind in ("capture", "edit") for alias in of[kind]}
    measured -= {(of["family"], alias) for of in models for alias in of["edit"] if alias in EDITED_ELSEWHERE}
    same = {(of["family"], alias) for of in models for alias in of["equal"]}
    written = {(family, alias) for each in DIFFERENCES for family in each.families for alias in each.aliases
               if alias in TRANSFORMER_LENS}  # fmt: skip
    assert measured <= written
    assert not written & same
