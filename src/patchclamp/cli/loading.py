"""A model for the length of a command: loaded under a spinner, closed however the command ends."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from patchclamp.cli.console import ERR

if TYPE_CHECKING:
    from patchclamp.lm import LM


@contextmanager
def loaded(model: str, engine: str | None, options: dict[str, Any], prove: bool = True) -> Iterator[LM]:
    """An `LM`. vLLM's own logging is kept to errors unless the environment says otherwise."""
    _quieten_vllm()
    with ERR.status(f"loading {model} …"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of one library to another: nothing a user can act on
        from patchclamp.lm import LM

        lm = LM(model, engine, prove=prove, **options)
    with lm:
        yield lm


def _quieten_vllm() -> None:
    """Newer vLLM reads its logging level only once it starts, and warns while it is imported."""
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR").upper()
    logging.getLogger("vllm").setLevel(logging.getLevelNamesMapping().get(level, logging.ERROR))
