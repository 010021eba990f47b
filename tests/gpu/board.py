"""What the checks found: printed as it comes, and written down beside the machine's facts."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import importlib.util
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS: list[dict[str, Any]] = []
FILE: Path | None = None


def note(mode: str, what: str, held: bool | None, found: str) -> None:
    """Notes whether something holds; None: a fact about stock vLLM, which nothing of ours can break or mend."""
    RESULTS.append({"mode": mode, "check": what, "holds": None if held is None else bool(held), "found": found})
    told = {None: "    ", True: "ok  ", False: "FAIL"}[RESULTS[-1]["holds"]]
    print(f"{told} {mode:14} {what:58} {found}", flush=True)
    if FILE is not None:  # whole or not at all: the process may be stopped at any time
        FILE.with_suffix(".new").write_text(json.dumps({**facts(), "checks": RESULTS}, indent=1) + "\n")
        FILE.with_suffix(".new").replace(FILE)


@contextlib.contextmanager
def noted(mode: str, what: str) -> Iterator[None]:
    """A context that notes an error as a check that does not hold, and goes on."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        note(mode, what, False, f"{type(error).__name__}: {error}"[:600])


def facts() -> dict[str, str]:
    """The date, the GPU and the versions."""
    import torch
    import vllm

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"date": datetime.date.today().isoformat(), "gpu": gpu, "torch": torch.__version__,
            "vllm": vllm.__version__, "source": source()}  # fmt: skip


@functools.cache
def source() -> str:
    """Which code this is: a digest of the package's files, as `sha256sum` over them in order of name would see them."""
    folder = Path(importlib.util.find_spec("patchclamp").origin).parent  # type: ignore[union-attr, arg-type]
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
