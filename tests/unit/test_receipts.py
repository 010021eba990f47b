"""An answer over HTTP counts only with the receipt of its program."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from patchclamp.engines import wire
from patchclamp.engines.base import Request, receipt_of
from patchclamp.engines.http import _SentBatch


@pytest.mark.parametrize(
    ("receipt", "holds"), [(receipt_of(b"a program"), True), (receipt_of(b"another"), False), ("", False)]
)
def test_an_answer_without_its_programs_receipt_is_an_error(receipt, holds):
    future: Future = Future()
    batch = _SentBatch([(Request("run", [1], 1), future)], [b"a program"])
    batch.take(wire.Answered(0, receipt, [5], "a", None, {}, "length", 0, []))
    assert (future.exception() is None) == holds
    assert holds or "did not confirm" in str(future.exception())
