"""Server-sent events as bytes: only whole events pass, so that a cut never leaves half a one.

Nothing is parsed here. A chunk that ends where an event ends and holds no comment, as nearly all
do, costs three scans of its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.transport.errors import Garbage

HEARTBEAT = b":\n"
"""A comment between events; a blank line behind it would break a Go client."""

_COMMENTS = re.compile(rb"(?:\A|(?<=\n\n)|(?<=\n\r\n))(?::[^\n]*\n(?:\r?\n)*)+")
_ONLY_COMMENTS = re.compile(rb"(?::[^\n]*\n(?:\r?\n)*)+\Z")
_UNUSUAL = b":\r\n"
"""First bytes of what is no event: a comment, a blank line."""
_BOUNDARY = re.compile(rb"\n\r?\n")


class EventGate:
    """Lets whole events through, with the server's comments brought to the form of `HEARTBEAT`.

    `limit` is the largest event in bytes; `comments` False takes comments out altogether.
    """

    __slots__ = ("_comment", "_limit", "_tail", "events")

    def __init__(self, limit: int, *, comments: bool = True) -> None:
        self._limit = limit
        self._comment = HEARTBEAT if comments else b""
        self._tail = bytearray()
        self.events = 0
        """Events that have passed."""

    @property
    def partial(self) -> bool:
        """Whether the beginning of an event is held back."""
        return bool(self._tail)

    def feed(self, chunk: bytes) -> bytes:
        """What may pass of all that has come; possibly nothing.

        Raises: Garbage, when an event grows past the limit.
        """
        if (
            not self._tail
            and chunk.endswith(b"\n\n")
            and chunk.find(b"\n:") < 0
            and chunk[0] not in _UNUSUAL
        ):
            if chunk.startswith(b"data:"):
                # As nearly all do; a search for more bytes takes longer steps.
                self.events += 1 + chunk.count(b"\n\ndata:")
            else:
                self.events += chunk.count(b"\n\n")
            return chunk
        return self._feed(chunk)

    def _feed(self, chunk: bytes) -> bytes:
        if not chunk:
            return b""
        tail = self._tail
        seen = max(0, len(tail) - 3)
        tail += chunk
        if not seen and tail[0] in b"\r\n":
            # The second half of a comment's blank line, say.
            del tail[: len(tail) - len(tail.lstrip(b"\r\n"))]
        end = max(tail.rfind(b"\n\n", seen) + 2, tail.rfind(b"\n\r\n", seen) + 3)
        if end < 3:  # neither was found
            end = len(tail) if tail.endswith(b"\n") and _ONLY_COMMENTS.match(tail) else 0
        if not end:
            if len(tail) > self._limit:
                raise Garbage(f"An event is larger than {self._limit} bytes")
            return b""
        whole = bytes(tail[:end])
        del tail[:end]
        if tail.endswith(b"\n") and _ONLY_COMMENTS.match(tail):
            whole += tail
            tail.clear()
        if len(tail) > self._limit:
            raise Garbage(f"An event is larger than {self._limit} bytes")
        if whole.startswith(b":") or b"\n:" in whole:
            whole = _COMMENTS.sub(self._comment, whole)
        self.events += sum(1 for _ in _BOUNDARY.finditer(whole))
        return whole


_SHAPES = frozenset({b"data: {", b"event: "})
_NO_OBJECTS = frozenset({b"", b"[DONE]", b"null"})
_OBJECT = msgspec.json.Decoder(dict[str, Any])


def check(events: bytes, count: int) -> None:
    """See that these whole events, so many, are what a client can read. Raises: Garbage.

    By their looks alone, where these are the usual ones: to read each would cost a fifth of all
    that is done for it.
    """
    if not events.isascii():
        try:
            events.decode()
        except UnicodeDecodeError:
            raise Garbage("An event of the node's stream is not UTF-8") from None
    usual = events.endswith(b"}\n\n") and events[:7] in _SHAPES
    if usual and (count == 1 or events.count(b"}\n\n") == count):
        return
    for event in split(events):
        data = payload(event)
        if data in _NO_OBJECTS:
            continue
        try:
            _OBJECT.decode(data)
        except (msgspec.DecodeError, RecursionError):
            raise Garbage("An event of the node's stream is no JSON object") from None


def split(data: bytes) -> Iterator[bytes]:
    """The events of `data` one by one, each with its blank line; comments pass as they are."""
    start = 0
    for boundary in _BOUNDARY.finditer(data):
        yield data[start : boundary.end()]
        start = boundary.end()
    if start < len(data):
        yield data[start:]


def payload(event: bytes) -> bytes:
    """The data of an event, its lines joined; empty for comments and events without data."""
    return b"\n".join(
        line[5:].strip(b" \r") for line in event.split(b"\n") if line.startswith(b"data:")
    )


def event_name(event: bytes) -> bytes:
    """The value of the event's `event:` line, or nothing."""
    for line in event.split(b"\n"):
        if line.startswith(b"event:"):
            return line[6:].strip(b" \r")
    return b""
