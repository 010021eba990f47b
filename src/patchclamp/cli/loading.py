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
    with quietly(), ERR.status(f"loading {model} …"):
        from patchclamp.proving.prove import ProvedLM

        lm = ProvedLM(model, engine, prove=prove, **options)
    with lm:
        yield lm


@contextmanager
def quietly() -> Iterator[None]:
    """Without what libraries have to say to each other."""
    _quieten_vllm()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # nothing that a user can act on
        yield


def _quieten_vllm() -> None:
    """Newer vLLM reads its logging level only once it starts, and warns while it is imported."""
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR").upper()
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for results
    logging.getLogger("vllm").setLevel(logging.getLevelNamesMapping().get(level, logging.ERROR))
