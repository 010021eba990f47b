"""Writes `docs/models.md`: which text decoders of vLLM's registry have sites without a table of ours, as tried here.

    python -m tools.native_models                 every one that Transformers can make a tiny model of
    python -m tools.native_models bloom mamba2    some of them, printed and not written
    python -m tools.native_models --page FILES    the page, of what earlier runs printed
    python -m tools.native_models --gpu           its section of families on a GPU, of the files in benchmarks/results

Each is a tiny random model in fp32, in a process of its own: found, proved on vLLM, and compared with Transformers.
Classes with a table are tried as if they had none.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "models.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- begin: families on a GPU -->", "<!-- end: families on a GPU -->"
LIMIT_S = 240
STREAM = ("embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "final_norm", "logits")
PLAIN = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
             intermediate_size=256, vocab_size=512, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
             pad_token_id=0, num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2,
             moe_intermediate_size=64, moe_num_experts=4, moe_k=2)  # fmt: skip
_LATENT = dict(num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=64, qk_nope_head_dim=128, qk_rope_head_dim=64,
               v_head_dim=128, head_dim=64, n_group=1, topk_group=1)  # fmt: skip
_LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32)
_MOE = dict(n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1)
# by model type: settings that differ, and some that checkpoints have and Transformers' class does not know
SETTINGS: dict[str, dict[str, Any]] = {
    "afmoe": dict(score_func="sigmoid", n_group=1, topk_group=1, num_dense_layers=1), "axk1": _LATENT | _MOE,
    "cohere2_moe": dict(sliding_window=8), "deepseek_v32": _LATENT | _MOE,
    "exaone4": dict(sliding_window=8, sliding_window_pattern=4), "exaone_moe": dict(sliding_window=8, **_MOE),
    "falcon": dict(num_kv_heads=4), "gptj": dict(rotary_dim=8),
    "falcon_h1": dict(mamba_d_ssm=256, mamba_n_heads=8, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=16),
    "glm4_moe": dict(head_dim=32, **_MOE), "glm4_moe_lite": _LATENT | _MOE, "glm_moe_dsa": _LATENT | _MOE,
    "granitemoehybrid": dict(mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16, shared_intermediate_size=64,
                             layer_types=["mamba", "attention", "mamba", "attention"]),
    "granitemoeshared": dict(shared_intermediate_size=64), "hy_v3": _MOE,
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, mamba_d_state=16),
    "lfm2": dict(block_dim=128, layer_types=["conv", "full_attention"] * 2, conv_bias=False, block_ff_dim=256),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2, num_dense_layers=1),
    "longcat_flash": _LATENT, "mamba2": dict(num_heads=8, head_dim=32, state_size=16, n_groups=1),
    "minicpm3": _LATENT, "minimax_m2": dict(rotary_dim=16), "olmo_hybrid": _LINEAR,
    "nemotron_h": dict(mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=16, n_groups=1),
    "qwen3_next": _LINEAR, "qwen3_5_text": _LINEAR, "qwen3_5_moe_text": _LINEAR,
    "zamba2": dict(layer_types=["mamba", "hybrid"] * 2, hybrid_layer_ids=[1, 3], n_mamba_heads=8, mamba_headdim=32),
}  # fmt: skip


def decoders() -> dict[str, str]:
    """The Transformers model types that vLLM has a class of its own for, each with the class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    types: dict[str, str] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        named = name in _TEXT_GENERATION_MODELS
        if named and f"{kind}_text" not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            types[kind] = name
    return dict(sorted(types.items()))


def tiny(kind: str) -> dict[str, Any]:
    """A tiny config of a model type: of `PLAIN` what its config has, and its own settings."""
    from transformers import CONFIG_MAPPING

    kind_of_config = CONFIG_MAPPING[kind]
    names = {*kind_of_config().to_dict(), *kind_of_config.attribute_map}
    return {name: value for name, value in PLAIN.items() if name in names} | SETTINGS.get(kind, {})


def tried(kind: str) -> dict[str, Any]:
    """What comes of one: site words that are proved and equal, and why others are not."""
    import patchclamp as pc
    from tests.models import no_table, of_config

    options: dict[str, Any] = dict(enforce_eager=True, max_model_len=128, block_size=32, kv_cache_memory_bytes=1 << 26,
                                   skip_tokenizer_init=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, no_table(decoders()[kind]):
        try:
            of_config(Path(folder), kind, tiny(kind))
        except Exception as error:
            return {"made": False, "error": _line(error)}
        try:
            with pc.LM(folder, engine="vllm", dtype="float32", **options) as lm:
                names, why = lm.sites.names, {**lm.sites.family.lacks, **lm.sites.withdrawn}
        except Exception as error:
            return {"made": True, "error": _line(error)}
        told = {"made": True, "names": names, "why": why}
        try:
            prompts = [list(range(5, 25)), list(range(100, 112))]
            result = pc.studies.parity(folder, prompts=prompts, max_tokens=3, **options)
        except Exception as error:
            return told | {"error": _line(error)}
        equal = [site.name for site in result.sites if site.worst <= result.bounds.rows]
        return told | {"equal": equal, "problems": list(result.problems), "left_out": list(result.left_out)}


def _line(error: Exception) -> str:
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:600]


def in_a_process(kind: str) -> dict[str, Any]:
    """`tried` in a process of its own, which may crash."""
    command = [sys.executable, "-m", "tools.native_models", "--one", kind]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=dict(os.environ))
    except subprocess.TimeoutExpired:
        return {"made": True, "error": f"it took longer than {LIMIT_S} s"}
    found = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if not found:
        return {"made": True, "error": f"the process ended with {ran.returncode}: {ran.stderr.strip()[-300:]}"}
    return json.loads(found[-1])


def page(results: dict[str, dict[str, Any]]) -> str:
    """`docs/models.md`, of results by model type."""
    import transformers
    import vllm

    classes = decoders()
    kinds = {classes[kind]: kind for kind in sorted(results, reverse=True) if results[kind]["made"]}  # one of each
    rows = [_row(kind, name, results[kind]) for name, kind in reversed(kinds.items())]
    tried, whole = len(kinds), sum("names" in results[kind] for kind in kinds.values())
    versions = f"vLLM {vllm.__version__}, Transformers {transformers.__version__}, CPU"
    return f"""# Models without a table

<!-- made by `python -m tools.native_models` -->

For a decoder without a table patchclamp looks for the sites in the model's class: it runs the class once on tensors
without data, follows what is added to the stream, and proves on the live model what it finds. This is so for vLLM's own
classes, for vLLM's Transformers backend, and on Transformers. What is not found is refused, and says why.
[Classes with a table](sites.md) have more sites; here they were tried as if they had none.

The table shows the results of tiny random models in fp32 ({versions}). Of {tried} classes
of vLLM's own, {whole} have a proved stream. *Equal* are the sites that agree with Transformers within 10⁻⁴ in every
layer. The stream is `embed`, `resid_pre`, `resid_post`, `final_norm` and `logits`.

| class | stream | `attn_out` | `mlp_out` | `resid_mid` | others | remarks |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}

- **equal**: proved on vLLM, and equal to Transformers. **proved**: on vLLM. **–**: not there; the remark says why.
- Some need a GPU, and some read settings that Transformers' own configuration lacks and a checkpoint's has; these were
  not tried further.
- Stock vLLM 0.32.0 itself fails on its CPU build for `GraniteMoeHybridForCausalLM` and `FalconH1ForCausalLM` with
  prompts longer than one block, and for `Mamba2ForCausalLM` with prefix caching.
- A class that is refused may run with `model_impl="transformers"`, and the error says so where it may.
- In layers whose mixer is no attention there is no `attn_out`; an error lists the layers that have it.

{on_a_gpu()}
"""


def on_a_gpu() -> str:
    """The section of `docs/models.md` on the parts of `tests.gpu.families`: the newest result of each."""
    from tests.gpu.families import PARTS

    newest: dict[str, tuple[tuple[str, bool], dict[str, Any], list[dict[str, Any]]]] = {}
    for file in sorted(RESULTS.glob("gpu_check*.json")):
        facts = json.loads(file.read_text())
        for part in PARTS:
            checks = [check for check in facts.get("checks", ()) if check["mode"] == part]
            rank = facts.get("date", ""), any(" apart" in check["found"] for check in checks)  # ran to its end
            if checks and (part not in newest or rank >= newest[part][0]):
                newest[part] = rank, {**facts, "file": file.name}, checks
    rows = [_gpu_row(part, *newest[part][1:]) for part in PARTS if part in newest]
    missing = "; ".join(part.removeprefix("sites ") for part in PARTS if part not in newest)
    return f"""{BEGIN}

## Families on a GPU

Models of real shapes, a few layers deep, with random weights and a vocabulary of 32,000, served by vLLM with CUDA
graphs and `torch.compile`. Every site of every layer is compared with Transformers on the same GPU, and so is one edit
at each site. `python -m tests.gpu.check --out DIR --parts "sites gpt_oss;sites phi3"` runs parts, and `python -m
tools.native_models --gpu` makes this table of the newest result of each.

| part | shape of | layers | smaller | dtype | sites | proved | rows | edits | vLLM | GPU | date | failed |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

- **rows**: the largest ‖a − b‖ / ‖b‖ of a row, b from Transformers. **edits**: the largest difference between the
  changes of the logits. With numbers in brackets both are medians (of rows, the largest median of a site in a layer),
  and b is from Transformers in fp32, or in float64 if the part is in fp32; in brackets are those of Transformers in the
  part's dtype. **worst** is then the largest of a row. Gemma 4 in fp32 is compared in this way where its rows are more
  than 1e-4 apart.
- In gemma4_moe the worst row is at `mlp_out[1]`: the 8th and the 9th expert of some tokens are 3e-6 apart, as far as
  rounding moves a score, and the other expert changes the row. 269 of its 21,623 rows are beyond 1e-4 from float64, and
  261 of Transformers'.
- Nemotron-H is compared with Transformers without its lower limit of time steps, which the published models do not have
  ([transformers#48989](https://github.com/huggingface/transformers/pull/48989)). With it,
  `patchclamp parity` finds rows up to about 1e-2 apart in fp32.
- **proved**: the sites were also proved on the live model, in every layer; **–**: this was not tried.
- The published sizes are kept except where *smaller* says otherwise.
- Not run yet: {missing or "none"}.

{END}"""


def _gpu_row(part: str, facts: dict[str, Any], checks: list[dict[str, Any]]) -> str:
    from tests.gpu.families import PARTS, PROVED
    from tests.models import SHAPES

    chosen, shape = PARTS[part], SHAPES[PARTS[part].shape]
    told = " ".join(check["found"] for check in checks)
    numbers = {name: found[1] if (found := re.search(pattern, told)) else "–" for name, pattern in {
        "sites": r"(\d+) sites, \d+ places", "rows": r"rows ([\d.e+-]+)", "edits": r"edits ([\d.e+-]+)",
        "plain rows": r"in (?:bf16|fp32): rows ([\d.e+-]+)",
        "plain edits": r"in (?:bf16|fp32): rows \S+ edits ([\d.e+-]+)",
        "worst": r"worst rows ([\d.e+-]+)", "plain worst": r"worst rows [^;]* and ([\d.e+-]+)",
    }.items()}  # fmt: skip
    rows, edits = (numbers[name] + (f" ({numbers[f'plain {name}']})" if numbers["plain rows"] != "–" else "")
                   for name in ("rows", "edits"))  # fmt: skip
    rows += f", worst {numbers['worst']} ({numbers['plain worst']})" if numbers["worst"] != "–" else ""
    proved = [check["holds"] for check in checks if check["check"] == PROVED]
    failed = [f"{check['check']}: {check['found']}" for check in checks if check["holds"] is False]
    cells = [part.removeprefix("sites "), shape["of"], chosen.layers, shape.get("reduced", ""), chosen.dtype,
             numbers["sites"], "–" if not proved else "yes" if all(proved) else "no", rows, edits, facts["vllm"],
             facts["gpu"].removeprefix("NVIDIA "), f"[{facts['date']}](../benchmarks/results/{facts['file']})",
             _plain("; ".join(failed))]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _row(kind: str, name: str, result: dict[str, Any]) -> str:
    if "names" not in result:
        return f"| `{name}` | – | – | – | – | | {_plain(result['error'])} |"
    ends = ("embed", "resid_pre", "resid_post", "final_norm", "logits")
    states = [_state(ends, result), *(_state((word,), result) for word in ("attn_out", "mlp_out", "resid_mid"))]
    others = ", ".join(f"`{word}`" for word in result["names"] if word not in STREAM)
    why = [f"`{word}`: {result['why'][word]}" for word in ("attn_out", "mlp_out", "resid_mid") if word in result["why"]]
    why += result.get("problems", [])[:1] + ([result["error"]] if "error" in result else [])
    return f"| `{name}` | {' | '.join(states)} | {others} | {_plain('; '.join(why))} |"


def _state(words: tuple[str, ...], result: dict[str, Any]) -> str:
    if not set(words) <= set(result["names"]):
        return "–"
    return "equal" if set(words) <= set(result.get("equal", ())) else "proved"


def _plain(text: str) -> str:
    """A reason as a cell of a table, without what every reason says."""
    text = re.sub(r"\s+", " ", text.replace("it has no site table, and ", "").replace("|", "/"))
    return re.sub(r"^(\w+): (no site table for .* derived from its modules|vLLM stopped): ", "", text)[:260]


def main() -> None:
    """Tries model types, or with `--page FILE` and `--gpu` writes the page, or its section, of earlier results."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(tried(sys.argv[2])))
        return
    if sys.argv[1:2] == ["--gpu"]:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + on_a_gpu() + rest.partition(END)[2])
        return
    if sys.argv[1:2] == ["--page"]:
        lines = [line for file in sys.argv[2:] for line in Path(file).read_text().splitlines()]
        results = {line.partition(" ")[0]: json.loads(line.partition(" ")[2]) for line in lines}
    else:
        results = {}
        for kind in sys.argv[1:] or decoders():
            results[kind] = in_a_process(kind)
            print(kind, json.dumps(results[kind]), flush=True)
    if not sys.argv[1:] or sys.argv[1] == "--page":
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
