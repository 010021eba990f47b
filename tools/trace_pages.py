"""The pages `docs/recipes.md` and `docs/coming_from.md`, made from the code that is tested: `make docs`."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.recipes import RECIPES, explicit, traced
from tools.nnsight_snippets import SNIPPETS, body

DOCS = Path(__file__).parents[1] / "docs"
MADE = "<!-- made by `make docs` from {}; a test says whether it is up to date -->"
RECIPES_HEAD = f"""# Recipes

{MADE.format("tests/recipes")}

Whole journeys are scripts in `examples/`, which are tests, too: `journey_features.py` (harvest, train an SAE, find a
feature, steer with it, evaluate), `journey_monitor.py` (fit a probe, serve with it, raise an alert from the metrics),
`journey_ablation.py` (find a direction, search for an ablation, evaluate, export, serve),
and `train_with_probe_reward.py` ([GRPO on a probe's score](training.md)).

The usual interventions, each as a [trace](tracing.md) and as a program written by hand. Both give the same values. The
tests run all of them on Transformers, on vLLM and over HTTP, and compare every value, within 10⁻⁴ in fp32. They take
their layers from the model's depth, so they run on any model. All of them begin with:

```python
{{imports}}
```

{{contents}}

"""
COMING_HEAD = f"""# Coming from another library

{MADE.format("tools/trace_pages.py and tools/nnsight_snippets.py")}

Their snippet, then ours. What a trace is, and which names and shapes it has, is on [the tracing page](tracing.md).

## nnsight and nnterp

These were run side by side on 25 November 2026: nnterp 1.3.0 on nnsight 0.6.3, and ours, both on Transformers 5 with
SmolLM2 in fp32 on a CPU, by `python -m tools.nnsight_snippets`. All values were within 1.1e-6 of each other. Where both
packages are installed beside patchclamp, `tests/engines/test_nnsight.py` runs them all. In front of all of them stand
`model = StandardizedTransformer(name)` and `lm = pc.LM(name)`.

What differs:

- **No order.** There, lines must name modules in the order in which the model computes, or it is an `OutOfOrderError`.
  Here they may name them in any order, and count in the model's: what is written at layer 3 acts on what was saved at
  layer 5 on a line above it. A patch across prompts needs no barrier.
- **No tuples.** There, `layers[5].self_attn.output` is a tuple, and `output[0]` its tensor. Here `.output` is the
  tensor itself, [T, D], and `output[0]` its first token. For `model.layers[5].self_attn.output[0][:] = 0` write
  `t.layers[5].attn.output = 0`. Brackets after a token's number, `output[0][:]` and `output[0][-1]`, are an error that
  says so; `output[0] = value` writes the first token.
- **No rewriting.** There, the block's source is read and run elsewhere, later. Here it runs as it stands, once. So `if`
  on a value, `print` of its numbers and `torch.relu(h)` are errors at their line. Compute after the trace, or use
  `.apply(fn)`.
- **Logits** have a row for each token that is sampled: `model.logits[0, -1]` is `t.logits[-1]`. With several prompts
  nnterp's `model.logits` has those of all prompts, also inside an invoke; here an invoke's are its own.
- **Padding.** A prompt's tensors have its own tokens, and none that pad a batch.
- **Steps.** `tracer.iter[3]` is `t.generated[2]`: the first step is the prompt. `tracer.all()` is `t.all()`.
- **Attention weights** are captured, not traced: `lm.run(prompt, capture=pc.pattern[5])`
  ([attention patterns](guide.md#attention-patterns)). `t.attention_probabilities` is an error that says so.
- A write may read an earlier layer; some such writes take [two runs](tracing.md#within-one-run).
"""
COMING_TAIL = """## TransformerLens

[Its names](sites.md#names-in-transformerlens-and-nnterp) are read wherever a site's name is, where they are the same
tensor. TransformerLens was not installed beside ours for this page.

```python
logits, cache = model.run_with_cache(prompt)                       # theirs
cache["resid_post", 5]
model.run_with_hooks(prompt, fwd_hooks=[("blocks.5.attn.hook_z", hook)])
```

```python
with lm.trace(prompt) as t:                                        # ours
    cache = t.cache()                                              # or some: t.cache(pc.resid_post, pc.z)
    logits = t.logits.save()
cache["blocks.5.hook_resid_post"]                                  # or cache[pc.resid_post[5]]
with lm.trace(prompt) as t:
    t.layers[5].attn.z[3] = 0                                      # in place of a hook
```

- A hook is Python on a tensor. What it does is mostly one line of a trace; for the rest there is `.apply(fn)`.
- `W_K` and `W_V` have the checkpoint's key and value heads; TransformerLens repeats them for each query head.
- The weights are not folded or centred: values are the model's own, as of TransformerLens'
  `from_pretrained_no_processing`.
- `cache["resid_post", 5]` is [T, D], not [1, T, D]. Logits are those of sampled tokens.
- `hook_pattern` and `hook_attn_scores` are [`pattern` and `attn_scores`](guide.md#attention-patterns), which are
  read, and patterns edited by [`Knockout`, `Scale` and `Replace`](guide.md#attention-knockouts). `hook_result` does not
  exist.
- circuitsvis' attention patterns are [`run.attention`](guide.md#attention-patterns) in a notebook, and
  `run.attention.to_html`; the head scores of its demos are [`head_scores`](guide.md#studies-of-attention).

## vllm-lens

vllm-lens was not installed beside ours for this page; its words are those of its README.

```python
client.generate(prompt, capture_layers=[15]).activations           # theirs
steering = SteeringVector(activations=v, layer_indices=[15], scale=4.0)
SamplingParams(max_tokens=8, extra_args={"apply_steering_vectors": [steering]})
Hook(fn=lambda ctx, h: h.clamp(-8, 8), layer_indices=[15, 16])
```

```python
with lm.trace(prompt, max_tokens=8) as t:                          # ours
    t.all().layers[15].output += 4.0 * v
    activations = t.all().layers[15].output.save()
with pc.LM(model, allow_code=True).trace(prompt) as t:
    t.all().layers[15:17].output.apply(lambda h: h.clamp(-8, 8))
```

- `layer_indices` name layers whose output is edited: `t.layers[15].output`. With `pre=True` it is `t.layers[15].input`.
- `position_indices` are brackets. `norm_match` has no op: scale the vector by the norm of a first trace.
- Hooks run where vLLM is eager. Here all but `.apply` runs with CUDA graphs and torch.compile on.
- A server runs no code of its clients. Programs are data, and `.apply` is for an engine in your own process.
"""


def recipes_page() -> str:
    """All recipes, as traces and as programs."""
    contents = " · ".join(f"[{_heading(name)}](#{name.replace('_', '-')})" for name in RECIPES)
    head = RECIPES_HEAD.format(imports=_imports(), contents=contents)
    return head + "\n".join(_recipe(name) for name in RECIPES)


def coming_page() -> str:
    """Snippets of other libraries beside ours."""
    pairs = [f"### {name}\n\n{_code(body(theirs))}\n{_code(body(ours))}" for name, (theirs, ours) in SNIPPETS.items()]
    return COMING_HEAD + "\n" + "\n".join(pairs) + "\n" + COMING_TAIL


def _imports() -> str:
    source = inspect.getsource(explicit)
    constants = re.findall(r"^(?:LAST|LOGITS) = .*$", source, re.M)
    prompts = re.findall(r"^(?:CLEAN, CORRUPT|ORACLE) = .*$", inspect.getsource(traced), re.M)
    return "\n".join(["import torch", "", "import patchclamp as pc", "", *prompts, *constants])


def _recipe(name: str) -> str:
    recipe = RECIPES[name]
    about = inspect.getdoc(recipe.traced) or ""
    return f"## {_heading(name)}\n\n{about}\n\n{_code(_source(recipe.traced))}\n{_code(_source(recipe.explicit))}"


def _source(function: Callable[..., Any]) -> str:
    """A function without its docstring."""
    source = inspect.getsource(function)
    return re.sub(r'\n    """.*?"""\n', "\n", source, count=1, flags=re.S).strip()


def _code(source: str) -> str:
    return f"```python\n{textwrap.dedent(source).strip()}\n```\n"


def _heading(name: str) -> str:
    return name.replace("_", " ").capitalize()


def write() -> None:
    (DOCS / "recipes.md").write_text(recipes_page(), encoding="utf-8")
    (DOCS / "coming_from.md").write_text(coming_page(), encoding="utf-8")


if __name__ == "__main__":
    write()
