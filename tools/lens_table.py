"""Compare TransformerLens' names with our sites, on a tiny random model of every family: `tools/lens_table.json`.

    python -m tools.lens_table

Needs TransformerLens 4.3, which patchclamp does not depend on. For each name that both have, in fp32 on a CPU: the rows
it captures, and the logits after the same vector is added there in layer 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

import patchclamp as pc
from patchclamp.errors import describe_error
from patchclamp.language.site import TRANSFORMER_LENS
from tests.models import FAMILIES, MORE, of_family, with_words

IDS = [5, 9, 17, 33, 65, 129]
TABLE = Path(__file__).with_suffix(".json")
LAYER, BOUND = 1, 1e-3  # rounding is below 1e-5


def compared(name: str, folder: Path) -> dict:
    """The family, and the names whose captures and edits are equal, whose captures or edits are not, and those that
    TransformerLens lacks."""
    from transformer_lens.model_bridge import TransformerBridge  # pyright: ignore[reportMissingImports]

    of_family(folder, name)
    with_words(str(folder), 512)
    ours: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by name: rows [T, W] and logits [1, V] after the edit
    with pc.LM(str(folder), engine="transformers", dtype="float32") as lm:  # first, for TransformerLens patches classes
        for alias, site in TRANSFORMER_LENS.items():
            at = pc.Site(site, LAYER if "{l}" in alias else None)
            try:
                rows = lm.run(IDS, max_tokens=1, capture=at)[at].reshape(len(IDS), -1)
            except pc.PatchclampError:
                continue
            logits = lm.run(IDS, max_tokens=1, edits=[pc.Add(added(rows), at)], capture="logits")["logits"]
            ours[alias] = torch.as_tensor(rows).clone(), torch.as_tensor(logits).clone()
        family = lm.sites.family.name
    theirs = TransformerBridge.boot_transformers(str(folder), device="cpu", dtype=torch.float32)
    found: dict[str, list[str]] = {"equal": [], "capture": [], "edit": [], "absent": []}
    with torch.no_grad():
        cache = theirs.run_with_cache(torch.tensor([IDS]))[1]
        for alias, (rows, logits) in ours.items():
            place = alias.format(l=LAYER)
            captured = cache[place] if place in cache else None  # noqa: SIM401  an ActivationCache
            if captured is None or captured.numel() != rows.numel():
                found["absent" if captured is None else "capture"].append(alias)
                continue

            v = torch.from_numpy(added(rows))

            def add(h, hook, v=v):
                return h + v.reshape(h.shape[2:])

            moved = theirs.run_with_hooks(torch.tensor([IDS]), fwd_hooks=[(place, add)])[0, -1:]
            same = apart(rows, captured.reshape(rows.shape)) < BOUND
            found["capture" if not same else "equal" if apart(logits, moved) < BOUND else "edit"].append(alias)
    return {"family": family, **found}


def added(rows) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(rows.shape[-1]).astype(np.float32)


def apart(a, b) -> float:
    a, b = a.float(), b.float()
    return float(((a - b).norm(dim=1) / b.norm(dim=1)).max())


def main() -> None:
    models = {}
    for name in sys.argv[1:] or [*FAMILIES, *MORE]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                models[name] = compared(name, Path(folder))
            except Exception as error:
                models[name] = {"not run": describe_error(error)[:200].splitlines()[0]}
        print(name, json.dumps(models[name]), file=sys.stderr)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(of)}" for name, of in models.items())
    versions = ", ".join(f'"{name}": "{version(name)}"' for name in ("transformer_lens", "transformers"))
    TABLE.write_text(f'{{{versions}, "models": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
