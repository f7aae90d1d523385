"""The files of deferred results."""

from __future__ import annotations

import pytest

from gateway.batches.background_requests import DeferredHead, DeferredResult, decode_result
from gateway.batches.folder import FolderError


def test_a_result_is_read_as_it_was_written() -> None:
    head = DeferredHead(200, "content-type: application/json\r\n", "req_1")
    for content in (b"", b'{"a": 1}\n\n', b"\n"):
        result = DeferredResult(head, content)
        assert decode_result(result.encode()) == result


@pytest.mark.parametrize("data", [b"", b"{}\n", b"no json\nx", b'{"status": 200}'])
def test_a_damaged_result_is_told(data: bytes) -> None:
    with pytest.raises(FolderError, match="damaged"):
        decode_result(data)
