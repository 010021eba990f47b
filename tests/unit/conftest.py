"""One fake engine for the tests of a file."""

from collections.abc import Iterator

import pytest

import patchclamp as pc


@pytest.fixture(scope="module")
def lm() -> Iterator[pc.LM]:
    with pc.LM("fake") as made:
        yield made
