"""What all tests share: no hub, quiet engines, the small real model, and how golden files are made anew."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
# OpenMP's threads spin while they wait, for milliseconds wherever another process has their core: steps of small models
# then take ten times as long
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("patchclamp", deadline=None)
settings.load_profile("patchclamp")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen-golden", action="store_true", help="write the files in tests/golden instead of comparing")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct as a bf16 checkpoint, made on first use."""
    from patchclamp.engines.smollm2 import prepare

    return prepare()
