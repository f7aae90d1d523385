"""The result of a deferred request, as its file has it: a line with the head, then the body."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gateway.batches.folder import FolderError

DEFERRED_PREFIX = "bg_"

DEFERRED_PATH = "/v1/background/{id}"

LONGEST_HEAD = 64 * 1024
"""Bytes of the line with the head."""


class DeferredHead(msgspec.Struct, frozen=True):
    """The status and the header lines of a response."""

    status: int
    header_lines: str
    x_request_id: str


@dataclass(frozen=True, slots=True)
class DeferredResult:
    """A response that was made for later."""

    head: DeferredHead
    content: bytes

    def encode(self) -> bytes:
        """The bytes of its file."""
        return msgspec.json.encode(self.head) + b"\n" + self.content


def decode_result(data: bytes) -> DeferredResult:
    """The result that a file holds. Raises: FolderError."""
    line, found, content = data.partition(b"\n")
    try:
        if not found:
            raise FolderError("the result of a request is damaged", "put back a copy of the folder")
        return DeferredResult(msgspec.json.decode(line, type=DeferredHead), content)
    except msgspec.MsgspecError:
        raise FolderError(
            "the result of a request is damaged", "put back a copy of the folder"
        ) from None
