"""`patchclamp demo`: one patch sweep on a small real model, told step by step, in a minute or so on a laptop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from patchclamp.cli.arguments import Engine
from patchclamp.cli.console import OUT
from patchclamp.cli.loading import loaded

MODEL = "smollm2"
CLEAN, CORRUPT = "The Eiffel Tower is located in the city of", "The Colosseum is located in the city of"
ANSWER, FOIL = " Paris", " Rome"
SITES, METRIC = ("resid_pre", "attn_out", "mlp_out"), "logit_diff"
# the memory is for the keys and values of a few short prompts: it leaves a laptop usable
OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 2**28,
    },
    "transformers": {"dtype": "float32"},
}  # fmt: skip


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to put the pictures.")] = Path("patchclamp-demo"),
    engine: Engine = None,
) -> None:
    """Find where a small model keeps the difference between the Eiffel Tower and the Colosseum."""
    from patchclamp.cli.early import check_engine
    from patchclamp.cli.narrative import Story
    from patchclamp.cli.sweep_table import show_best, show_pictures
    from patchclamp.plots import check_targets
    from patchclamp.studies import patch_sweep

    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the libraries below would break into the story
    png, html, story = out / "sweep.png", out / "sweep.html", Story(OUT)
    check_engine(engine)
    check_targets(png, html)
    name = engine or story.choose_engine()
    story.explain(CLEAN, CORRUPT, ANSWER, FOIL)
    story.begins(f"Loading {MODEL} on {name}")
    with loaded(MODEL, name, OPTIONS.get(name, {})) as lm:
        story.ends(f"{lm.model.layers} layers of width {lm.model.d_model}, {lm.model.dtype}")
        story.begins(f"Patching {', '.join(SITES)}")
        result = patch_sweep(lm, clean=CLEAN, corrupt=CORRUPT, answer=ANSWER, foil=FOIL, sites=SITES, metric=METRIC)
        story.ends(f"{len(result.cells())} cells, one run each")
    heatmap = result.picture()
    show_best(OUT, heatmap, 5)
    OUT.print()
    show_pictures(OUT, heatmap, png, html)
