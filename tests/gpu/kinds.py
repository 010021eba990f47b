"""Kinds of engine: LoRA adapters, weights in fp8 and NVFP4, caches in fp8, drafts; each beside stock vLLM or a plain engine.

`changed` engine options, and a smaller `model`, are for machines without a GPU.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from patchclamp.engines.vllm.compat import configuration
from patchclamp.engines.vllm.compat.configuration import DRAFTERS
from patchclamp.plan.bound import NEVER
from patchclamp.plan.table import ProgramTable
from tests.gpu.board import note
from tests.gpu.engines import (
    BASE,
    COMPILED,
    PROMPTS,
    TOKENS,
    Stock,
    apart,
    attached,
    bits,
    fresh,
    started,
    surroundings,
)
from tests.gpu.modes import IEEE

PARTS = {
    "lora": "0.6b",
    "tp2 lora": "0.6b",
    "fp8": "8b",
    "fp8 cache": "8b",
    "nvfp4": "8b",
    "offload": "0.6b",
    "ngram": "",
    "v1 ngram": "",
}  # by part: the shape of its model
PARTS |= dict.fromkeys((f"{runner}{method}" for method in DRAFTERS[1:] for runner in ("", "v1 ")), "")
PARTS |= {"eagle 8b": ""}  # of a real shape
SIZES = [1, 2, 4, 8, 16, 64, 256]
GREEDY: dict[str, Any] = {"max_tokens": TOKENS, "sampling": {"ignore_eos": True}, "logprobs": True}
# the largest distance between rows in bf16, relative to their largest value: of one model, and with merged weights
NEAR, ROUNDED = 0.05, 0.1
CACHED_OFF = 0.02  # of a log-probability in bf16, with and without blocks of the cache


def kinds(part: str, model: str, **changed: Any) -> None:
    if part.removeprefix("v1 ").split()[0] in DRAFTERS:
        drafts(part, **changed)
    elif part.endswith("lora"):
        lora(part, model, **({"tensor_parallel_size": 2} if part.startswith("tp2") else {}), **changed)
    elif part == "offload":
        offload(part, model, **changed)
    else:
        fp8(part, model, **changed)


def _options(changed: dict[str, Any], **more: Any) -> dict[str, Any]:
    made = {**copy.deepcopy(BASE), "dtype": "bfloat16", **more}
    made["compilation_config"]["cudagraph_capture_sizes"] = SIZES
    return {**made, **changed}


def _answers(runs: list[Any]) -> list:
    return [[run.token_ids, [x.hex() for x in run.logprobs]] for run in runs]


def _far(ours: list[Any], theirs: list[Any], sites: list[str]) -> dict[str, float]:
    """How far captured rows are apart, by site word, at most; infinitely where they are not of the same positions."""
    far: dict[str, float] = {}
    for a, b in zip(ours, theirs, strict=True):
        for place in sites:
            same = a.positions(place) == b.positions(place)
            gap, word = apart(a[place], b[place]) if same else float("inf"), place.partition("[")[0]
            far[word] = gap if np.isnan(gap) else max(far.get(word, 0.0), gap)
    return far


def _told(far: dict[str, float]) -> str:
    return ", ".join(f"{word} {gap:.2g}" for word, gap in far.items())


def _near(far: dict[str, float], limit: float) -> bool:
    return bool(far) and all(gap <= limit for gap in far.values())


def _as_near(graphs: dict[str, float], eager: dict[str, float]) -> bool:
    """True if rows under graphs are as near the truth as an eager engine's, at every site."""
    return bool(eager) and all(graphs[word] <= 1.5 * eager[word] + 1e-3 for word in eager)


def _beside(graphs: dict[str, float], eager: dict[str, float]) -> str:
    return ", ".join(f"{word} {graphs[word]:.2g} ({eager[word]:.2g})" for word in eager)


def _stock(part: str, expected: list, lm: Any, adapters: list[str | None] | None = None) -> list[Any]:
    """Notes whether runs without programs are stock vLLM's, and returns them."""
    runs = lm.run(PROMPTS, lora=adapters, **GREEDY)
    gaps = [abs(float.fromhex(x) - y) for (_, theirs), run in zip(expected, runs, strict=True)
            for x, y in zip(theirs, run.logprobs, strict=True)]  # fmt: skip
    note(part, "1 off is stock, bit for bit", _answers(runs) == expected, f"logprobs up to {max(gaps):g} apart")
    return runs


def _decoded(
    part: str, lm: Any, sites: list[str], adapters: list[str | None] | None = None
) -> tuple[list[Any], list[Any]]:
    """Runs whose captures were made while tokens were generated, by graphs, and in one prefill of the same tokens."""
    import patchclamp as pc

    every = [pc.Site(name) for name in lm.sites.names if name != "logits"]
    edits = [pc.Add([0.5] * lm.model.d_model, pc.resid_post[1])]
    runs = lm.run(PROMPTS, lora=adapters, capture=every, edits=edits, **GREEDY)
    again = [p + run.token_ids[:-1] for p, run in zip(PROMPTS, runs, strict=True)]
    fed = lm.run(again, lora=adapters, capture=every, edits=edits, max_tokens=1)
    places = [place for place in sites if not place.startswith("logits")]
    return _read(runs, places), _read(fed, places)


def _read(runs: list[Any], sites: list[str]) -> list[Any]:
    """The runs, with what they captured brought here: their engine may end."""
    for run in runs:
        _ = [run[place] for place in sites], run.acted
    return runs


def _same_tokens(ours: list[Any], theirs: list[Any]) -> bool:
    return [run.token_ids for run in ours] == [run.token_ids for run in theirs]


# -- adapters


def _in_order(folder: Path) -> dict[str, str]:
    """A setting with which vLLM's kernels for adapters add up in one order: by default they do as it happens, and stock
    vLLM need not agree with itself."""
    import torch

    if not torch.cuda.is_available():
        return {}
    tile = {"block_m": 32, "block_n": 16, "block_k": 64, "split_k": 1, "num_warps": 4, "num_ctas": 1,
            "group_size_m": 8, "num_stages": 2, "max_nreg": None}  # fmt: skip
    by_slices = {str(slices): {"64": {"1024": {"16": tile}}} for slices in range(1, 5)}
    folder.mkdir(parents=True, exist_ok=True)
    card = torch.cuda.get_device_name().replace(" ", "_").replace("-", "_")
    (folder / f"{card}_SHRINK.json").write_text(json.dumps({"2": by_slices}))
    return {"VLLM_TUNED_CONFIG_FOLDER": str(folder)}


def lora(part: str, model: str, **changed: Any) -> None:
    """A base model and two adapters in one batch, with graphs: as stock, as an eager engine, as merged weights."""
    import patchclamp as pc
    from tests.engines.lora import adapter

    folder = Path(f"{COMPILED}/adapters")
    names = {name: adapter(model, folder / name, seed) for seed, name in enumerate("ab")}
    adapters = [None, names["a"], names["b"], names["a"]]
    options = _options(changed, enable_lora=True, max_loras=2, max_lora_rank=16, enable_prefix_caching=True)
    environ = _in_order(folder / "tiles")
    with contextlib.ExitStack() as running:
        stock = running.enter_context(Stock(model, options, adapters, **environ, **fresh("stock", part)))
        running.enter_context(surroundings({**environ, **fresh("ours", part)}))
        with pc.LM(model, engine="vllm", prove=False, numerics="stock", **options) as lm:
            started(part, lm)
            plain = _stock(part, stock.answer(), lm, adapters)
            different = len({str(run.token_ids) for run in lm.run([PROMPTS[2]] * 3, lora=adapters[:3], **GREEDY)})
            note(part, "adapters matter", different == 3, f"{different} of 3 texts differ")
            _mixed(part, lm, adapters)
            _blocks(part, lm, names["a"])
            asked, sites = _asked(lm), [str(ref) for ref in lm.sites.refs()]
            read = [_read(lm.run(PROMPTS, lora=adapters, max_tokens=1, **program), sites) for program in asked]
            lm.engine._engine.reset_prefix_cache()  # so that steps have the shapes that they had
            again = _answers(lm.run(PROMPTS, lora=adapters, **GREEDY)) == _answers(plain)
            note(part, "idle again after all that, bit for bit", again, "")
            far = _far(*_decoded(part, lm, sites, adapters), [site for site in sites if site != "logits"])
            note(part, "4 captures of generated tokens agree with one prefill of them", _near(far, NEAR), _told(far))
        with pc.LM(model, engine="vllm", prove=False, **{**options, "enforce_eager": True}) as eager:
            plainly = [_read(eager.run(PROMPTS, lora=adapters, max_tokens=1, **program), sites) for program in asked]
        # Two engines that round differently may be as far from each other as both are from the truth, so this distance
        # is reported, and the distances from the truth are checked.
        for what, runs, theirs in zip(("captured", "edited"), read, plainly, strict=True):
            note(part, f"  {what}, from an eager engine", None, _told(_far(runs, theirs, sites)))
    _as_merged(part, model, adapters, asked, [read, plainly], sites, folder)


def _asked(lm: Any) -> list[dict[str, Any]]:
    """A program that captures everything, and one that edits, too."""
    import patchclamp as pc

    v = np.random.default_rng(3).standard_normal(lm.model.d_model).astype(np.float32)
    every = [pc.Site(name) for name in lm.sites.names]
    edits = [pc.Add(v, pc.resid_post[0], pc.every[3:], scale=2.0), pc.Scale(0.5, pc.mlp_out[1])]
    return [{"capture": every}, {"capture": every, "edits": edits}]


def _mixed(part: str, lm: Any, adapters: list[str | None]) -> None:
    import patchclamp as pc

    rng = np.random.default_rng(5)
    hard = [pc.Add(rng.standard_normal(lm.model.d_model).astype(np.float32), pc.resid_post[0], scale=10.0)]
    noop = [pc.Add([0.0] * lm.model.d_model, pc.resid_post[0])]
    a, b = (lm.run(PROMPTS, lora=adapters, edits=[each, [], each, []], **GREEDY) for each in (noop, hard))
    note(part, "2 batchmates of edited requests are unchanged", all(bits(a[i]) == bits(b[i]) for i in (1, 3)), "")
    note(part, "  and the edited ones are not", all(bits(a[i]) != bits(b[i]) for i in (0, 2)), "")


def _blocks(part: str, lm: Any, adapter: str) -> None:
    """Cached blocks belong to an adapter and to the edits up to their end; nobody reads another's."""
    import patchclamp as pc

    ids = np.random.default_rng(6).integers(100, min(30_000, lm.model.d_vocab), 200).tolist()
    block = lm.engine._engine.vllm_config.cache_config.block_size
    at = pc.prompt[4 * block - 8 : 4 * block]  # the end of the fourth block
    kept, whole, v = 3 * block, (len(ids) - 1) // block * block, [1.0] * lm.model.d_model
    hard, noop = ([pc.Add(v, pc.resid_post[0], at, scale=scale)] for scale in (50.0, 0.0))
    expected = (
        ("edited, with the adapter", hard, adapter, 0), ("unedited after it", [], adapter, kept),
        ("without the adapter", [], None, 0), ("edited, without", hard, None, kept), ("unedited", [], adapter, whole),
        ("edited again", hard, adapter, whole), ("unedited, without", [], None, whole),
    )  # fmt: skip
    runs = {name: lm.run(ids, edits=e, lora=folder, **GREEDY) for name, e, folder, _ in expected}
    cached = {name: runs[name].cached_tokens for name, *_ in expected}
    right = all(cached[name] == count for name, _, _, count in expected)
    note(part, "6 blocks are shared by an adapter's own, up to the edit", right, json.dumps(cached))
    lm.engine._engine.reset_prefix_cache()
    lm.run(ids, edits=noop, lora=adapter, **GREEDY)  # fills the same blocks, in a step of the same shape
    clean = lm.run(ids, lora=adapter, **GREEDY)
    same = bits(clean) == bits(runs["unedited after it"]) and clean.cached_tokens == kept
    note(part, "6 unedited after edited is as never edited, bit for bit", same, f"{clean.cached_tokens} from the cache")
    moved = runs["edited, with the adapter"].logprobs != clean.logprobs
    # one first token, since a greedy text of random weights may change with the shape of a step
    cached_off = abs(runs["edited again"].logprobs[0] - runs["edited, with the adapter"].logprobs[0])
    told = ", ".join(f"{name} {run.logprobs[0]:.6f}" for name, run in {**runs, "clean": clean}.items())
    found = f"it moves: {moved}; from the cache {cached_off:.1e} off; the first log-probability: {told}"
    note(part, "  and the edit acts", moved and cached_off < CACHED_OFF, found)


def _as_merged(part: str, model: str, adapters: list[str | None], asked: list[dict[str, Any]],
               read: list[list[list[Any]]], sites: list[str], folder: Path) -> None:  # fmt: skip
    """Captures and edits with adapters against Transformers in fp32 with each adapter merged into the weights: what graphs
    make of them in bf16 is as near as what an eager engine does. `read`: by engine, by program, by prompt."""
    import patchclamp as pc
    from tests.engines.lora import merged

    worst: list[list[dict[str, float]]] = [[{} for _ in asked] for _ in read]
    unlike: dict[str, float] = {}
    for name in dict.fromkeys(adapters):
        path = model if name is None else merged(model, name, folder / f"merged-{Path(name).name}")
        with pc.LM(path, engine="transformers", dtype="float32", prove=False, skip_tokenizer_init=True) as hub:
            if name is None:
                unlike = _far([read[0][0][1]], [hub.run(PROMPTS[1], max_tokens=1, **asked[0])], sites)
            chosen = [i for i, other in enumerate(adapters) if other == name]
            for number, program in enumerate(asked):
                true = hub.run([PROMPTS[i] for i in chosen], max_tokens=1, **program)
                for engine, runs in zip(worst, read, strict=True):
                    for word, gap in _far([runs[number][i] for i in chosen], true, sites).items():
                        engine[number][word] = max(engine[number].get(word, 0.0), gap)
    for what, graphs, eager in zip(("captured", "edited"), *worst, strict=True):
        near = _as_near(graphs, eager) and _near(graphs, ROUNDED)
        note(part, f"4 {what}, as near fp32 and merged weights as an eager engine", near, _beside(graphs, eager))
    note(part, "  from the model without the adapter, for scale", None, _told(unlike))


# -- offloading


def offload(part: str, model: str, **changed: Any) -> None:
    """A cache too small for two prompts, whose blocks go to host memory and come back. Plain requests load them, as on
    stock vLLM; requests with programs load none, and are as on an engine without offloading. `changed`: another
    connector's options."""
    import patchclamp as pc

    ids = np.random.default_rng(5).integers(100, 30000, (4, 600)).tolist()
    options = _options({}, enable_prefix_caching=True, num_gpu_blocks_override=72)
    hard = [pc.Add([1.0] * 1024, pc.resid_post[0])]
    kept = {"capture": [pc.resid_post, pc.pattern[1] @ pc.prompt[-1]]}
    story = [{}, {"edits": hard}, {}, {"edits": hard}, {"edits": hard, **kept}, kept, {}]
    plain, programs = [0, 2, 6], [1, 3, 4, 5]  # of the story

    def told(lm: Any) -> list[Any]:
        runs = []
        for program in story:
            runs.append(lm.run(ids[0], **program, **GREEDY))
            if "capture" in program:
                _read(runs[-1:], ["resid_post[0]", "resid_post[3]", "pattern[1]"])
            for other in ids[1:]:  # which take all blocks
                lm.run(other, **GREEDY)
        return runs

    with contextlib.ExitStack() as running:
        stock = running.enter_context(
            Stock(model, options | (changed or OFFLOADED), None, ids * len(plain), **fresh("stock", part))
        )
        running.enter_context(surroundings(fresh("ours", part)))
        with pc.LM(model, engine="vllm", prove=False, **options) as lm:
            without = told(lm)
        with pc.LM(model, engine="vllm", prove=False, numerics="stock", **options, **(changed or OFFLOADED)) as lm:
            started(part, lm)
            answers = stock.answer()
            _stock(part, answers[: len(PROMPTS)], lm)
            note(part, "grades run as requests", "offloading" in lm.batch_refusal, lm.batch_refusal)
            ours = told(lm)
    cached = [run.cached_tokens for run in ours]
    loads = all((count >= 512) == (program == {}) for count, program in zip(cached[1:], story[1:], strict=True))
    note(part, "plain requests load from host memory, requests with programs load nothing", loads, f"{cached}")
    note(part, "without offloading nothing is left", not any(run.cached_tokens for run in without), "")
    mine, theirs = _answers([ours[at] for at in plain]), answers[len(PROMPTS) :: len(ids)]
    note(part, "plain requests that load are stock vLLM's, bit for bit", mine == theirs,
         f"{[a == b for a, b in zip(mine, theirs, strict=True)]}")  # fmt: skip
    a, b = ([of[at] for at in programs] for of in (ours, without))
    gaps = [float(np.abs(np.subtract(x.logprobs, y.logprobs)).max()) for x, y in zip(a, b, strict=True)]
    note(part, "3 every request with a program is as without offloading", _same_tokens(a, b) and max(gaps) < CACHED_OFF,
         f"logprobs up to {max(gaps):g} apart")  # fmt: skip
    moved = float(np.abs(np.subtract(ours[0].logprobs, ours[1].logprobs)).max())
    note(part, "  edits change the log-probabilities", moved > 10 * CACHED_OFF, f"{moved:g}")
    far = _far(ours[4:6], without[4:6], ["resid_post[0]", "resid_post[3]", "pattern[1]"])
    whole = all(run.positions("resid_post[0]") == list(range(600 + TOKENS - 1)) for run in ours[4:6])
    note(part, "4 captures have every position, and are near", whole and _near(far, NEAR), _told(far))


OFFLOADED = {"kv_offloading_size": 1.0}  # GiB


# -- fp8


def fp8(part: str, model: str, **changed: Any) -> None:
    """Weights quantised to fp8 while they are loaded, keys and values kept in fp8, or a checkpoint in NVFP4: sites proved,
    off is stock.

    fp8 rounds by the batch, so two exact engines differ. Rows are right if graphs are as near the model without fp8 as an
    eager engine is, and if rows of generated tokens are nearer to one prefill of them than fp8 is to the model. NVFP4 is
    of the weights alone: rows must also be near those of the weights that it stands for.
    """
    import patchclamp as pc
    from patchclamp.proving import prove

    how = {"fp8": {"quantization": "fp8"}, "fp8 cache": {"kv_cache_dtype": "fp8"}, "nvfp4": {}}[part]
    exact = part == "nvfp4"
    model, meant = _in_nvfp4(model) if exact else (model, model)
    options = _options({**how, **changed})
    with contextlib.ExitStack() as running:
        stock = running.enter_context(Stock(model, options, None, **fresh("stock", part)))
        running.enter_context(surroundings(fresh("ours", part)))
        with pc.LM(model, engine="vllm", prove=False, numerics="stock", **options) as lm:
            started(part, lm)
            plain = _stock(part, stock.answer(), lm)
            _moves(part, lm)
            asked, sites = _asked(lm), [str(ref) for ref in lm.sites.refs()]
            read = [_read(lm.run(PROMPTS, max_tokens=1, **program), sites) for program in asked]
            decoded = _decoded(part, lm, sites)
            _self_patches(part, lm)
            wrong = {proof.name: proof.note for proof in prove(lm, full=True) if not proof.holds}
            note(part, "every site is proved, in every layer", not wrong, json.dumps(wrong)[:600])
            again = _answers(lm.run(PROMPTS, **GREEDY)) == _answers(plain)
            note(part, "idle again after all that, bit for bit", again, "")
        with pc.LM(model, engine="vllm", prove=False, **{**options, "enforce_eager": True}) as eager:
            plainly = [_read(eager.run(PROMPTS, max_tokens=1, **program), sites) for program in asked]
        options = {name: value for name, value in options.items() if name not in how} | {"enforce_eager": True}
        with pc.LM(meant, engine="vllm", prove=False, **options) as whole:
            true = [_read(whole.run(PROMPTS, max_tokens=1, **program), sites) for program in asked]
    scale: dict[str, float] = {}
    for what, graphs, theirs, truth in zip(("captured", "edited"), read, plainly, true, strict=True):
        near, far = _far(graphs, truth, sites), _far(theirs, truth, sites)
        scale = scale or far
        right = _as_near(near, far) and (not exact or _near(near, ROUNDED))
        note(part, f"4 {what}, as near the model without {part[:5]} as an eager engine", right, _beside(near, far))
        note(part, f"  {what}, from an eager engine", None, _told(_far(graphs, theirs, sites)))
    far = _far(*decoded, [site for site in sites if site != "logits"])
    scale = dict.fromkeys(scale, NEAR) if exact else scale
    told = (
        "4 captures of generated tokens are near one prefill of them: as fp8 is near the model, or to bf16's rounding"
    )
    note(part, told, bool(far) and all(gap <= scale[word] for word, gap in far.items()),
         _beside(far, {word: scale[word] for word in far}))  # fmt: skip


def _in_nvfp4(model: str) -> tuple[str, str]:
    """A checkpoint of the model in NVFP4, and one of the weights that it stands for."""
    from tests.engines.quantised import quantised

    packed, plain = (Path(f"{model}-nvfp4-{name}") for name in ("packed", "plain"))
    if not packed.exists():
        quantised(model, "nvfp4", packed, plain)
    return str(packed), str(plain)


def _moves(part: str, lm: Any) -> None:
    """An Add moves the stream by what it adds, to the rounding of the pair that the stream is."""
    import patchclamp as pc

    v = np.random.default_rng(4).standard_normal(lm.model.d_model).astype(np.float32)
    at = pc.resid_post[1]
    run = lm.run(PROMPTS[2], edits=[pc.Capture(at), pc.Add(v, at), pc.Capture(at)], **GREEDY)
    gap = float(np.abs((run["edits[2]"] - run["edits[0]"]).numpy() - v).max())
    scale = float(run["edits[0]"].abs().max())
    note(part, "an Add moves the stream by what it says", gap <= 1e-5 * scale, f"{gap:.2g} off, of {scale:.2g}")
    moved = run.token_ids != lm.run(PROMPTS[2], **GREEDY).token_ids
    note(part, "  and what is generated", moved, "")


def _self_patches(part: str, lm: Any) -> None:
    import patchclamp as pc

    sites = [pc.Site(name) for name in lm.sites.names if name not in ("embed", "logits")]
    run = lm.run(PROMPTS[1], capture=sites, **GREEDY)
    changed = [site.name for site in sites
               if bits(lm.run(PROMPTS[1], edits=[pc.Replace(pc.From(run, site), at=site)], **GREEDY)) != bits(run)]  # fmt: skip
    note(part, "5 self-patches, site by site, change no bit", not changed, ", ".join(changed))


# -- drafts

WORDS = 12  # that an edit of the logits leaves to choose from, so that texts repeat themselves and drafts are right
LOOPS = [[3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4], [8, 9] * 6, list(range(3, 15)) * 4, [7] * 30]


def drafts(part: str, vocabulary: int = 32_000, dtype: str = "float32", **changed: Any) -> None:
    """An engine that drafts against one that does not, in fp32 with graphs: the same tokens, the same rows.

    Beside n-grams, logits are wider than a program of the kernel, so that sums over them go row by row. A model that
    drafts, and the one that it drafts for, are tiny: of few words, so that some drafts are right.
    """
    import patchclamp as pc

    model, how = _that_drafts(part, vocabulary)
    runner = "v1" if part.startswith("v1") else "v2"
    os.environ.update({**fresh("ours", part), **IEEE, "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2"))})
    options = _options(changed, dtype=dtype, max_model_len=512)  # the longest that tiny models have
    with pc.LM(model, engine="vllm", prove=False, **options) as plain:
        sites = [str(ref) for ref in plain.sites.refs()]
        conditions = _conditions(plain)
        programs = _programs(plain.model.d_model, plain.model.d_vocab) | conditions
        theirs = {name: _read(_runs(plain, edits), sites) for name, edits in programs.items()}
        free = plain.run(LOOPS, **_long())
        first = theirs["few words"][0].token_ids
        stops = [max(first, key=first.index)]  # the token that comes first as late as any
        cut = _read(_runs(plain, programs["few words"], stop_token_ids=stops), sites)
        drawn = {name: _sampled(plain, programs[name]) for name in ("logits", *list(conditions)[:1])}
    with pc.LM(model, engine="vllm", prove=False, allow_code=True, speculative_config=how, **options) as lm:
        started(part, lm, runner)
        n_grams_ahead = version("vllm") >= "0.33"  # 0.32 schedules n-grams one step after the other on V2, too
        expected = runner == "v2" and (how["method"] != "ngram" or n_grams_ahead)
        ahead = attached(lm)._most_ahead > 0
        note(part, "steps are scheduled before drafts are checked, where vLLM does that", ahead == expected, str(ahead))
        mine = lm.run(LOOPS, **_long())
        note(part, "without programs, the tokens of an engine that does not draft", _same_tokens(mine, free), "")
        with _undone(lm) as counts:
            for name, edits in programs.items():
                _compare(part, name, _runs(lm, edits), theirs[name], sites)
        note(part, "what rejected drafts decided is undone", sum(counts) > 0, f"{sum(counts)} decisions")
        acted = [run.acted for name in conditions for run in theirs[name]]
        note(part, "conditions hold for some", len({str(each) for each in acted}) > len(conditions), "")
        _compare(part, "stopped", _runs(lm, programs["few words"], stop_token_ids=stops), cut, sites)
        for name, tokens in drawn.items():
            _same_distribution(part, _sampled(lm, programs[name]), tokens, name)
        edited = [run.token_ids for run in theirs["noise"]] != [run.token_ids for run in theirs["few words"]]
        note(part, "edits matter", edited, "")
        _refused(part, lm)
        again = lm.run(LOOPS, **_long())
        note(part, "and without programs again", _same_tokens(again, free), "")


def _that_drafts(part: str, vocabulary: int) -> tuple[str, dict[str, Any]]:
    """A model, and how tokens are drafted for it."""
    from tests.drafters import drafting, eagle_of
    from tests.models import with_weights

    folder = Path(f"/tmp/model-{part.replace(' ', '-')}-{vocabulary}")
    method, _, shape = part.removeprefix("v1 ").partition(" ")
    if method == "ngram":
        model = with_weights(folder, "135m", 4, vocab_size=vocabulary)
        return model, {"method": method, "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    configuration.GPU_V1_DRAFTERS = DRAFTERS  # some are refused until they were tried there, which this is for
    folder.mkdir(exist_ok=True)
    if shape:
        (folder / "drafter").mkdir(exist_ok=True)
        model = with_weights(folder, shape, 4, vocab_size=vocabulary)
        return model, {
            "method": method,
            "model": eagle_of(model, folder / "drafter", 3 + WORDS),
            "num_speculative_tokens": 3,
        }
    return drafting(method, folder, 3 + WORDS)


def _long(**sampling: Any) -> dict[str, Any]:
    return {"max_tokens": 32, "sampling": {"ignore_eos": True, **sampling}, "logprobs": True}


def _programs(width: int, vocabulary: int) -> dict[str, list[Any]]:
    import patchclamp as pc

    rng = np.random.default_rng(0)
    row, more = (rng.standard_normal(size).astype(np.float32) for size in (width, vocabulary))
    few = np.full(vocabulary, -100.0, np.float32)
    few[3 : 3 + WORDS] = 0.0
    these = pc.Add(few, pc.logits)
    return {
        "few words": [these],
        "generated": [these, pc.Add(row, pc.resid_post[1], pc.generated, scale=0.5)],
        "logits": [these, pc.Add(more, pc.logits, pc.generated[5:12], scale=2.0)],
        "noise": [these, pc.Noise(0.5, at=pc.mlp_out, seed=7, relative=True)],
        "noise of logits": [these, pc.Noise(0.005, at=pc.logits, seed=9, relative=True)],
        "logits, at the row's length": [these, pc.Add(more, pc.logits, scale=0.1, norm="match")],
        "clamped logits": [these, pc.Clamp(more, pc.logits, low=5.0)],
        "a token": [these, pc.Scale(0.2, pc.resid_pre[2], pc.token(5))],
    }


def _conditions(plain: Any) -> dict[str, list[Any]]:
    """A program for each of some conditions and scopes: decided at the prompt's end, or at tokens that few drafts are."""
    import patchclamp as pc

    noisy = _programs(plain.model.d_model, plain.model.d_vocab)["noise of logits"]  # most drafts are wrong
    weights = np.random.default_rng(5).standard_normal((3, plain.model.d_model)).astype(np.float32)
    late, last = (
        pc.Probe(weights, at=pc.resid_post[0], tokens=tokens, name="p") for tokens in (pc.generated, pc.prompt)
    )
    scores = np.concatenate([run.probes["p"].numpy() for run in plain.run(LOOPS, edits=noisy, capture=late, **_long())])
    ends = np.stack([run.probes["p"].numpy()[-1] for run in plain.run(LOOPS, edits=noisy, capture=last, max_tokens=1)])
    push, made = pc.Scale(-1.0, pc.resid_post[1]), {}
    for i in range(len(weights)):
        onwards, prompt = late[i] > float(np.quantile(scores[:, i], 0.95)), last[i] > float(np.median(ends[:, i]))
        made[f"from a token on, probe {i}"] = [*noisy, pc.When(onwards, push, scope="onwards")]
        made[f"where the prompt meets it, probe {i}"] = [*noisy, pc.When(prompt, push, scope="prompt")]
    return made


@contextlib.contextmanager
def _undone(lm: Any) -> Iterator[list[int]]:
    """The number of decisions that each planned step undoes, read from the device before it does."""
    counts, unsettled = list[int](), ProgramTable.unsettled
    tables = getattr(attached(lm).runtime.step, "tables", None)  # None on a CPU

    def counted(table: ProgramTable, *step: Any) -> np.ndarray:
        since, latches = unsettled(table, *step), table.latches
        if tables is not None:
            latches = tables.latches.cpu().numpy().reshape(latches.shape)
        counts.append(int(np.count_nonzero((latches >= since[:, None]) & (latches < NEVER))))
        return since

    ProgramTable.unsettled = counted
    try:
        yield counts
    finally:
        ProgramTable.unsettled = unsettled


def _runs(lm: Any, edits: list[Any], **sampling: Any) -> list[Any]:
    import patchclamp as pc

    return lm.run(LOOPS, edits=edits, capture=[pc.Site(name) for name in lm.sites.names], **_long(**sampling))


def _compare(part: str, name: str, ours: list[Any], theirs: list[Any], sites: list[str]) -> None:
    drafted, right = (sum(column) for column in zip(*(run.drafts for run in ours), strict=True))
    few = name == "stopped"  # tokens, among which no draft need be right
    note(part, f"{name}: drafts are right and wrong", drafted > right >= 1 - few, f"{right} of {drafted} right")
    gaps = [abs(x - y) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    same = _same_tokens(ours, theirs) and [run.acted for run in ours] == [run.acted for run in theirs]
    note(part, f"{name}: the same tokens, and ops acted alike", same, f"logprobs {max(gaps):.2g} apart")
    if same:
        far = _far(ours, theirs, sites)
        note(part, f"{name}: captures are those of what stays", _near(far, 1e-3), _told(far))


def _sampled(lm: Any, edits: list[Any]) -> np.ndarray:
    """Tokens [N, T] that were sampled."""
    sampling = {"temperature": 1.0, "seed": 3, "n": 400, "ignore_eos": True}
    return np.array([run.token_ids for run in lm.run(LOOPS[1], edits=edits, sampling=sampling, max_tokens=8)])


def _same_distribution(part: str, ours: np.ndarray, theirs: np.ndarray, name: str) -> None:
    """Notes whether tokens at some positions have one distribution: a chi-square test of two samples."""
    told, same = [], True
    for position in (1, 3, 7):
        counts = np.stack([np.bincount(tokens[:, position], minlength=3 + WORDS) for tokens in (ours, theirs)])
        expected = counts.sum(0) / 2
        chi_square = ((counts - expected) ** 2 / expected.clip(1e-9)).sum()
        degrees = int((expected > 0).sum()) - 1
        same = same and chi_square < degrees + 4 * (2 * max(degrees, 1)) ** 0.5
        told.append(f"{chi_square:.1f} of {degrees}")
    note(part, f"{name}: sampled tokens have the distribution that they have without drafts", same, ", ".join(told))


def _refused(part: str, lm: Any) -> None:
    import patchclamp as pc

    try:
        told = str(lm.run(LOOPS[0], edits=[pc.Apply(lambda rows: rows, pc.resid_post[1])], **_long()).error)
    except pc.PatchclampError as error:
        told = str(error)
    named = "Apply is not supported" in told
    note(part, "code is refused by name", named, told[:200])
