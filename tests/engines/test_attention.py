"""Attention patterns equal Transformers' eager attention, on either engine, however the prompt was computed."""

import gc
import json
import sys
import weakref

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.language.program import from_dict

from ..models import of_family
from ..reference.attention import eager, eager_model, edited
from .conftest import CHUNKED, PROMPTS

BOTH = pytest.mark.parametrize("engine", ["transformers", "vllm"])
NEW = {"max_tokens": 4, "sampling": {"ignore_eos": True}}
WITHIN = {"atol": 1e-5, "rtol": 0}
IDS = {"dtype": "float32", "skip_tokenizer_init": True, "prove": False, "max_model_len": 128}
# in the order of the docs: grouped heads, a soft cap and a window, windows alone, sinks, no rotary embedding, normed keys
FAMILIES = ["llama", "gemma2", "gemma3", "gpt_oss", "gpt2", "qwen3"]


def expected(net, run: pc.Run) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The pattern and the scores of each layer, [T, H, T]."""
    return eager(net, [*run.prompt_token_ids, *run.token_ids[:-1]])


@pytest.fixture(scope="module")
def plain(narrow):
    """The model of `narrow` with eager attention."""
    return eager_model(narrow.folder)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize(
    "name", [FAMILIES[0], "gemma2", *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES[2:])]
)
def test_whole_patterns_and_scores_of_families(name, engine, tmp_path, inspected_here):
    folder = of_family(tmp_path, name)
    options = {"enforce_eager": True, "max_num_batched_tokens": 32, "kv_cache_memory_bytes": 1 << 26}
    net = eager_model(folder)
    draw = np.random.default_rng(0)
    with pc.LM(folder, engine=engine, **IDS, **(options if engine == "vllm" else {})) as lm:
        prompts = [draw.integers(3, lm.model.d_vocab, length).tolist() for length in (70, 20, 1)]
        for run in lm.run(prompts, capture=[pc.pattern, pc.attn_scores], **NEW):
            patterns, scores = expected(net, run)
            assert run[pc.pattern].shape == (lm.model.layers, len(scores[0]), lm.sites.sizes.heads, len(scores[0]))
            for layer, (pattern, score) in enumerate(zip(patterns, scores, strict=True)):
                torch.testing.assert_close(run[pc.pattern[layer]], pattern, **WITHIN)
                found = run[pc.attn_scores[layer]]
                if name == "gpt_oss":  # which subtracts the largest, of the sink too, before its softmax
                    found, score = (each - each.amax(-1, keepdim=True) for each in (found, score))
                torch.testing.assert_close(found, score, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "falcon", "mistral"])  # ALiBi; one key for all heads; windows
def test_families_that_only_vllm_reads(name, tmp_path, inspected_here):
    folder = of_family(tmp_path, name)
    net = eager_model(folder)
    ids = np.random.default_rng(0).integers(3, 300, 50).tolist()
    with pc.LM(folder, engine="vllm", **IDS, enforce_eager=True, kv_cache_memory_bytes=1 << 26) as lm:
        run = lm.run(ids, capture=pc.pattern, max_tokens=1)
        for layer, expected_THT in enumerate(eager(net, ids)[0]):
            # the GELU of vLLM and of Transformers differ in BLOOM, by 5e-4, and so all later layers
            within = WITHIN if layer == 0 or name != "bloom" else {"atol": 1e-3, "rtol": 0}
            torch.testing.assert_close(run[pc.pattern[layer]], expected_THT, **within)


def test_keys_and_values_are_read_from_each_layout_of_vllms_cache():
    """As its CPU attention writes them; with AMX, 16-bit numbers have a layout of their own."""
    import vllm._custom_ops as ops

    from patchclamp.engines.vllm.compat.keys import LAYOUTS, of_block

    dtypes, tested = {"vec": torch.float32, "vec16": torch.bfloat16, "amx": torch.bfloat16}, 0
    for layout in LAYOUTS:
        if layout == "amx" and not torch.cpu._is_amx_tile_supported():
            continue
        for width in (32, 64, 96, 128):
            cache_RKNE = torch.zeros(3, 2, 2 * 64, width, dtype=dtypes[layout])
            given = [torch.randn(3 * 64, 2, width).to(cache_RKNE) for _ in range(2)]
            where = torch.arange(3 * 64)
            ops.cpu_attn_reshape_and_cache(*given, *cache_RKNE.chunk(2, 2), where, layout, k_scale=1.0, v_scale=1.0)
            for part, (blocks_RKNE, expected) in enumerate(zip(cache_RKNE.chunk(2, 2), given, strict=True)):
                found = of_block(blocks_RKNE[None], layout, part)
                assert torch.equal(found.transpose(2, 3).flatten(0, 2), expected), (layout, width, part)
                tested += 1
    assert tested >= 16


def test_patterns_and_knockouts_in_bfloat16(tmp_path, inspected_here):
    """As near to fp32 as rounding allows, on vLLM, with blocks read from a cached prefix, too."""
    folder = of_family(tmp_path, "llama")
    net = eager_model(folder)
    ids = np.random.default_rng(0).integers(3, 300, 70).tolist()
    options = IDS | {"dtype": "bfloat16", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "block_size": 32}
    edit = pc.Knockout(pc.prompt[3:9], pc.pattern[1], pc.prompt[20:])
    with pc.LM(folder, engine="vllm", **options) as lm:
        seen = pc.Capture(pc.pattern, pc.prompt[64:])
        plain, again, cut = (lm.run(ids, capture=[seen], edits=of, max_tokens=1) for of in ([], [], edit))
        assert again.cached_tokens
        assert torch.equal(plain[pc.pattern], again[pc.pattern])
        for run, removed in ((plain, None), (cut, {1: [(head, range(20, 70), range(3, 9)) for head in range(4)]})):
            _, patterns = edited(net, ids, removed)
            for layer, expected_THT in enumerate(patterns):
                torch.testing.assert_close(run[pc.pattern[layer]], expected_THT[64:], atol=0.03, rtol=0)
                torch.testing.assert_close(run[pc.pattern[layer]].sum(-1), torch.ones(6, len(expected_THT[0])))
        assert cut[pc.pattern[1]][..., 3:9].max() == 0
        assert (plain[pc.pattern[2]] - cut[pc.pattern[2]]).abs().max() > 0


@BOTH
def test_what_is_kept_of_a_row(narrow, plain, engine):
    lm = narrow.get(engine, "float32")
    whole, *_ = lm.run(PROMPTS, capture=[pc.pattern, pc.attn_scores[0, 1]], **NEW)
    one = whole[pc.pattern[2, 3]]
    assert torch.equal(one, whole[pc.pattern][2, :, 3])
    assert repr(whole).endswith("attention of 9 sites>")
    assert torch.equal(one, whole["blocks.2.attn.hook_pattern"][:, 3])
    assert torch.equal(whole[pc.pattern[2, 1:3]], whole[pc.pattern][2, :, 1:3])
    assert whole.positions(pc.pattern) == list(range(len(one)))
    torch.testing.assert_close(one.sum(-1), torch.ones(len(one)))
    chosen = [
        pc.Capture(pc.pattern[0], pc.prompt[-1], top=3),
        pc.Capture(pc.pattern[2, 3], pc.generated, keys="prompt[1:3]"),
        pc.Capture(pc.pattern[4], "prompt[-2:]", spans=["prompt[0]", pc.prompt[1:], pc.every]),
    ]
    kept, *_ = lm.run(PROMPTS, capture=chosen, **NEW)
    assert list(kept.attention) == ["pattern[0]", "pattern[2, 3]", "pattern[4]"]
    best, prompt = kept.attention["pattern[0]"], len(kept.prompt_token_ids)
    row = whole[pc.pattern[0]][prompt - 1]
    assert best.positions == [prompt - 1]
    torch.testing.assert_close(torch.from_numpy(best.values[0]), row.topk(3).values)
    torch.testing.assert_close(torch.from_numpy(best.values[0]), row.gather(1, torch.from_numpy(best.keys[0]).long()))
    torch.testing.assert_close(kept[pc.pattern[2, 3]], one[prompt:, 1:3])
    assert kept.attention["pattern[2, 3]"].keys.tolist() == [1, 2]
    sums = whole[pc.pattern[4]][prompt - 2 : prompt]
    spans = [sums[..., :1].sum(-1), sums[..., 1:prompt].sum(-1), torch.ones(2, lm.sites.sizes.heads)]
    torch.testing.assert_close(kept[pc.pattern[4]], torch.stack(spans, -1))
    with pytest.raises(pc.ProgramError, match=r"run.attention\['pattern\[0\]'\]"):
        kept[pc.pattern[0]]
    with pytest.raises(pc.MissingSource, match=r"pattern\[1\] .*pattern\[0\]"):
        kept[pc.pattern[1]]
    with pytest.raises(pc.MissingSource, match="pattern\\[2\\] was not captured"):
        kept[pc.pattern[2]]  # one head of it was


@BOTH
def test_a_query_that_sees_fewer_keys_than_asked_for_has_fewer(narrow, engine):
    lm = narrow.get(engine, "float32")
    [run] = lm.run([[5]], capture=pc.Capture(pc.attn_scores[1], top=4), max_tokens=2)
    found = run.attention["attn_scores[1]"]
    assert (found.keys[0, :, 1:] == -1).all()
    assert (found.keys[0, :, 0] == 0).all()
    assert np.isneginf(found.values[0, :, 1:]).all()
    for prompts in ([[5]], [[5], list(range(5, 25))]):  # alone, and beside a longer one
        run, *_ = lm.run(prompts, capture=pc.Capture(pc.pattern[1], pc.prompt, top=3), max_tokens=1)
        values = run.attention["pattern[1]"].values
        assert np.array_equal(values[0], np.eye(3)[np.zeros(values.shape[1], int)])
    [run] = lm.run(
        [[5]], capture=[pc.Capture(pc.pattern[0], pc.generated), pc.Capture(pc.pattern[1], top=1)], max_tokens=1
    )
    assert run[pc.pattern[0]].shape == (0, lm.sites.sizes.heads, 1)
    assert "pattern[1]" in run.attention
    assert "pattern[2]" not in run.attention
    assert run.attention.get(pc.z[0]) is None


@BOTH
def test_keys_that_a_run_ended_before_are_no_keys(narrow, engine):
    """The sum over them is 0, and the other sums are those of the run that reached them."""
    lm = narrow.get(engine, "float32")
    spans = pc.Capture(pc.pattern[1], pc.prompt, spans=["generated[2]", "prompt[0:2]"])
    [whole] = lm.run([PROMPTS[0]], capture=spans, **NEW)
    stop = {"stop_token_ids": [whole.token_ids[0]]}
    [ended] = lm.run(
        [PROMPTS[0]], capture=[spans, pc.Capture(pc.pattern[2], keys="generated[2]")], max_tokens=4, sampling=stop
    )
    assert len(ended.token_ids) == 1
    assert (ended[pc.pattern[1]][..., 0] == 0).all()
    torch.testing.assert_close(ended[pc.pattern[1]], whole[pc.pattern[1]], **WITHIN)
    assert (whole[pc.pattern[1]][..., 1] > 0).all()
    with pytest.raises(pc.TokensError) as raised:
        ended[pc.pattern[2]]
    assert raised.value.path == "keys"


@BOTH
@pytest.mark.parametrize("layers", [1, slice(1, 3)], ids=["a layer", "layers"])
def test_captures_of_one_site_are_read_by_their_paths(narrow, engine, layers):
    """Of one pattern its largest keys, its sums, and of a head some keys, whichever is last."""
    lm, at = narrow.get(engine, "float32"), pc.pattern[layers]
    captures = [pc.Capture(at, top=2), pc.Capture(pc.pattern[layers, 1], keys="prompt[0:2]"),
                pc.Capture(at, spans=["prompt[0]", "prompt[1:]"]), at]  # fmt: skip
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        [run] = lm.run([list(range(20, 32))], capture=[captures[i] for i in order], max_tokens=1)
        top, head, spans, whole = (run.attention[f"capture[{order.index(i)}]"] for i in range(4))
        rows = torch.from_numpy(whole.values)
        torch.testing.assert_close(torch.from_numpy(top.values), rows.topk(2).values)
        seen = top.keys >= 0
        found = np.take_along_axis(whole.values, np.where(seen, top.keys, 0).astype(np.int64), -1)
        np.testing.assert_array_equal(found[seen], top.values[seen])
        np.testing.assert_array_equal(head.values, whole.values[..., 1, :2])
        sums = torch.stack([rows[..., 0], rows[..., 1:].sum(-1)], -1)
        torch.testing.assert_close(torch.from_numpy(spans.values), sums)
        last = whole if order[-1] == 3 else top
        assert np.array_equal(run.attention["pattern[1]"].values, last.values if layers == 1 else last.values[0])
        assert len({*run.attention}) == len(list(run.attention)) == len(run.attention)
        assert {f"capture[{i}]" for i in range(2)} < {*run.attention}
        assert all(name in run.attention and len(run.attention[name].values) for name in run.attention)
        shown = run.attention.picture(f"capture[{order.index(3)}]")
        np.testing.assert_array_equal(dict(zip(shown.names, shown.maps, strict=True))["pattern[1, 2]"],
                                      whole.values[:, 2] if layers == 1 else whole.values[0, :, 2])  # fmt: skip


@BOTH
def test_layers_with_other_keys_are_read_one_at_a_time(narrow, engine):
    lm, keys = narrow.get(engine, "float32"), ["prompt[0:2]", "prompt[1:3]"]
    captures = [pc.Capture(pc.pattern[i], keys=of) for i, of in enumerate(keys)]
    [run] = lm.run([list(range(20, 32))], capture=[*captures, pc.Capture(pc.attn_scores[:2], top=1)], max_tokens=1)
    for read in (run.attention.__getitem__, run.read, run.positions):
        with pytest.raises(pc.ProgramError, match="differ between layers"):
            read(pc.pattern)
        read("pattern[1]")
    assert run.attention["attn_scores"].keys.shape == (2, 12, lm.sites.sizes.heads, 1)


@pytest.mark.parametrize("options", [{}, CHUNKED, {"async_scheduling": False}], ids=str)
def test_what_vllm_computed_before_is_read_from_its_cache(narrow, plain, options):
    """Chunks of 16 tokens, prefixes from the cache, and batchmates at other positions."""
    lm = narrow.get("vllm", "float32", **options)
    lm.run([list(range(5, 150))] * 2, max_tokens=1)
    prompts = [[*range(5, 150), *range(9, 9 + more)] for more in (3, 17, 30)]
    at = pc.Capture(pc.pattern[::5], pc.prompt[-2:] | pc.generated)
    runs = lm.run(prompts, capture=at, **NEW)
    assert all(run.cached_tokens for run in runs) == (options != CHUNKED)
    for run in runs:
        patterns, _ = expected(plain, run)
        where = run.positions(pc.pattern)
        assert where[:2] == [len(run.prompt_token_ids) - 2, len(run.prompt_token_ids) - 1]
        assert run.layers(pc.pattern) == [0, 5]
        for layer in (0, 5):
            torch.testing.assert_close(run[pc.pattern[layer]], patterns[layer][where], **WITHIN)


@BOTH
def test_reading_changes_nothing_and_other_captures_stay(narrow, engine):
    lm = narrow.get(engine, "float32")
    options = {"max_tokens": 4, "sampling": {"ignore_eos": True, "temperature": 1.0, "seed": 3, "n": 2}}
    read = [pc.q[3], pc.pattern[3], pc.Capture(pc.pattern[3, 0], top=1)]
    for prompt in PROMPTS:
        without, with_it = (lm.run(prompt, capture=capture, **options) for capture in (pc.q[3], read))
        assert len({tuple(run.token_ids) for run in with_it}) == 2
        for run, other in zip(without, with_it, strict=True):
            assert run.token_ids == other.token_ids
            torch.testing.assert_close(run[pc.q[3]], other[pc.q[3]], atol=1e-5, rtol=1e-5)
            assert other.sites == ["q[3]"]
            keys = torch.from_numpy(other.attention["pattern[3, 0]"].keys).long()
            assert torch.equal(keys[:, 0], other["capture[1]"][:, 0].argmax(-1))


@BOTH
def test_what_cannot_be_read_says_why(narrow, engine, monkeypatch):
    lm = narrow.get(engine, "float32")
    monkeypatch.setattr(sys.modules["patchclamp.plan.bound"], "MAX_ATTENTION_BYTES", 1 << 16)
    with pytest.raises(pc.CapacityError, match=r"capture\[0\].tokens: .*31 tokens"):
        lm.run(PROMPTS[1] + " and to", capture=pc.pattern)
    monkeypatch.undo()
    with pytest.raises(pc.UnsupportedSite, match=r"edits\[0\].value: pattern\[0\]"):
        lm.run(PROMPTS[0], edits=pc.Replace(pc.SameRun("pattern[0]"), at=pc.z[1]), max_tokens=1)
    monkeypatch.setattr(sys.modules["patchclamp.plan.bound"], "MAX_ATTENTION_BYTES", 20_000)
    with pytest.raises(pc.CapacityError, match=r"capture\[1\].tokens: .*pattern of 1 token"):
        lm.run(PROMPTS[0], capture=[pc.Capture(pc.pattern, pc.prompt[-1]), pc.Capture(pc.pattern, pc.prompt[-1])])
    monkeypatch.undo()
    for wrong in ("generated[5]", "prompt[99]", pc.span("Rome"), pc.role("user"), pc.token(1 << 20)):
        for keys, path in (({"keys": wrong}, "keys"), ({"spans": ["prompt", wrong]}, "spans[1]")):
            with pytest.raises(pc.TokensError) as raised:
                lm.run(PROMPTS[0], capture=pc.Capture(pc.pattern[0], **keys), **NEW)
            assert raised.value.path == f"capture[0].{path}"
        with pytest.raises(pc.TokensError) as raised:
            lm.run(PROMPTS[0], edits=pc.Knockout(wrong, pc.pattern[0], pc.prompt[-1]), **NEW)
        assert raised.value.path == "edits[0].keys"
    with pytest.raises(pc.UnsupportedSite, match="8 layers"):
        lm.run(PROMPTS[0], capture=pc.pattern[40])


@BOTH
def test_what_reads_many_runs_refuses_attention(narrow, engine):
    lm = narrow.get(engine, "float32")
    runs = lm.run(list(PROMPTS), capture=[pc.pattern[1], pc.z[1]], max_tokens=1)
    assert [list(each) for each in lm.fetch(runs)] == [["z[1]"]] * 3
    for read in (lm.fetch, lm.rows):
        with pytest.raises(pc.ProgramError, match=r"sites: .*pc.pattern\[1\]"):
            read(runs, pc.pattern[1])
    with pytest.raises(pc.ProgramError, match=r"capture\[0\]: .*lm.run"):
        lm.grade(PROMPTS[0], programs=[pc.Zero(pc.z[1])], score=[" Paris"], capture=pc.pattern[1])
    with pytest.raises(pc.MissingSource):
        lm.run(PROMPTS[0], edits=pc.Replace(pc.From(runs[0].key, "pattern[1]"), at=pc.z[1]), max_tokens=1)


def test_the_text_form_is_read_back(narrow):
    lm = narrow.get("transformers", "float32")
    captures = [{"type": "capture", "at": "pattern[1]", "tokens": "prompt[-1]", "spans": ["prompt[0]", "prompt[1:]"]}]
    program = from_dict(json.loads(json.dumps({"edits": [], "capture": captures})))
    [run] = lm.run([PROMPTS[0]], capture=program.capture, max_tokens=1)
    torch.testing.assert_close(run[pc.pattern[1]].sum(-1), torch.ones(1, lm.sites.sizes.heads))


def test_an_engine_on_transformers_is_freed(narrowed):
    """Other models have their attention shown to nobody, and what showed it ends with its engine."""
    with pc.LM(narrowed, engine="transformers") as lm:
        lm.run([[5, 6, 7]], capture=pc.pattern[1], max_tokens=2)
        keys, layers = lm.engine._keys, lm.engine._net.model.layers
        assert (keys.passes, keys._held) == (None, {})
        held = [weakref.ref(each) for each in (lm.engine.runtime, *(layer.self_attn for layer in layers))]
    del lm, keys, layers
    gc.collect()
    assert not any(each() for each in held)


def test_attention_within_chunks_is_refused(tmp_path):
    folder = of_family(tmp_path, "llama4", attention_chunk_size=8)
    with (
        pc.LM(folder, engine="transformers", **IDS) as lm,
        pytest.raises(pc.UnsupportedSite, match="chunked attention"),
    ):
        lm.run([[5, 6, 7]], capture=pc.pattern[1])


@BOTH
def test_pictures_have_the_numbers_of_the_run(narrow, engine, tmp_path, monkeypatch):
    lm = narrow.get(engine, "float32")
    captures = [
        pc.pattern[2:4],
        pc.pattern[5, 1],
        pc.Capture(pc.pattern[0], top=2),
        pc.Capture(pc.pattern[1], "prompt[0]"),
    ]
    [run] = lm.run([PROMPTS[0]], capture=[*captures, pc.attn_scores[2]], **NEW)
    shown, heads = run.attention.picture(), lm.sites.sizes.heads
    assert list(run.attention)[:3] == ["pattern[2]", "pattern[3]", "pattern[5, 1]"]
    assert shown.names[0] == "pattern[2], mean"
    assert shown.names[-1] == "pattern[5, 1]"
    assert len(shown.names) == 2 * (heads + 1) + 1  # neither the largest keys, nor scores, nor other queries
    assert shown.tokens == tuple(run.token_strings[:-1])
    of = dict(zip(shown.names, shown.maps, strict=True))
    np.testing.assert_array_equal(of["pattern[3, 2]"], run[pc.pattern[3, 2]])
    np.testing.assert_allclose(of["pattern[3], mean"], run[pc.pattern[3]].mean(1), atol=1e-6)
    first = run.attention.picture("pattern[1]")
    assert (first.queries, len(first.names)) == ((0,), heads + 1)
    assert run.attention.plot(tmp_path / "heads.png", "pattern[5, 1]").exists()
    assert "what attends to it" in run.attention._repr_html_()
    with pytest.raises(pc.ProgramError, match=r"names: expected whole patterns, got pattern\[0\]"):
        run.attention.picture("pattern[0]")
    monkeypatch.setattr("patchclamp.attention.MAX_SHOWN", 1)  # nothing is read for a cell of a notebook
    assert run.attention._repr_html_() is None
    assert len(run.attention.picture(pc.pattern[2]).names) == heads + 1
