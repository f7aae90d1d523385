"""Server-sent events as bytes: only whole events pass, so that a cut never leaves half a one.

Nothing is parsed here. Pieces that hold only such events as nearly all are cost one look at their
bytes (`usual`), however many they hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from gateway.proxy import json_values
from gateway.transport.errors import InvalidResponse

HEARTBEAT = b":\n"
"""A comment between events; a blank line behind it would break a Go client."""

_COMMENTS = re.compile(rb"(?:\A|(?<=\n\n)|(?<=\n\r\n))(?::[^\n]*\n(?:\r?\n)*)+")

_ONLY_COMMENTS = re.compile(rb"(?::[^\n]*\n(?:\r?\n)*)+\Z")

_BOUNDARY = re.compile(rb"\n\r?\n")


EventFilter = Callable[[bytes], bytes]
"""Takes out of whole events those that only the gateway asked for. Raises: InvalidResponse."""

EventMatcher = Callable[[bytes], re.Match[bytes] | None]
"""Matches, from the beginning, all whole events that need no closer look; possibly none."""


def ordinary_events(*, line: bytes = b"", after_brace: bytes = b"") -> EventMatcher:
    """Finds events of one JSON object on one line, as far as a glance tells.

    `line`: a pattern of what stands above it, line end included; `first`: one that what is
    behind its first brace must agree with.
    """
    # Not possessive: up to Python 3.11.4 (Debian 12) such a match may end within an event.
    return re.compile(rb"(?:%bdata: ?\{(?=[\"}])%b.*\}\n\n)*" % (line, after_brace)).match


ANY_OBJECT = ordinary_events()


GROWTH_PER_EVENT = 1024
"""Bytes of an event that each one before it stands for: `/v1/responses` ends by telling the whole
answer again, and no token of today's vocabularies is longer, escaped."""


class EventFramer:
    """Lets whole events through, with the server's comments brought to the form of `HEARTBEAT`.

    `limit` is the largest event in bytes, which grows with each event up to `ceiling`, since the
    last one may repeat them all; `comments` False takes comments out altogether.
    """

    __slots__ = (
        "_ceiling",
        "_comment",
        "_limit",
        "_tail",
        "_usual",
        "event_count",
        "special_bytes",
    )

    def __init__(
        self,
        limit: int,
        matcher: EventMatcher = ANY_OBJECT,
        *,
        keep_comments: bool = True,
        ceiling: int = 0,
    ) -> None:
        self._limit = limit
        self._ceiling = ceiling
        self._usual = matcher
        self._comment = HEARTBEAT if keep_comments else b""
        self._tail = bytearray()
        self.event_count = 0
        """Events that have passed."""
        self.special_bytes = 0
        """How many bytes, at the end of what has just passed, are not of usual events."""

    @property
    def has_partial(self) -> bool:
        """Whether the beginning of an event is held back."""
        return bool(self._tail)

    def special_bytes_in(self, events: bytes) -> int:
        """How many bytes from the first unusual of these events on."""
        found = self._usual(events)
        return len(events) if found is None else len(events) - found.end()

    def feed(self, chunk: bytes) -> bytes:
        """What may pass of all that has come; possibly nothing.

        Raises: Garbage, when an event grows past the limit.
        """
        tail = self._tail
        end = 0
        if not tail or chunk.find(b"\n\n") >= 0:
            if tail:
                chunk = bytes(tail) + chunk
                tail.clear()
            found = self._usual(chunk)
            if found is not None and (end := found.end()):
                # Each of them has this once, at its end.
                count = chunk.count(b"}\n\n", 0, end)
                if chunk.count(b"data:", 0, end) != count:
                    end = count = 0  # half of one may stand within another, or a text says so
                self.event_count += count
                if end == len(chunk):
                    self.special_bytes = 0
                    return chunk
        rest = self._whole(chunk[end:] if end else chunk)
        self.special_bytes = len(rest)
        if len(rest) == len(chunk) - end and chunk.endswith(rest):
            return chunk  # all of it, as nearly always: it need not be copied
        return chunk[:end] + rest

    def _check_size(self) -> None:
        """See that what is held back, which is much, may be an event. Raises: Garbage."""
        most = max(
            self._limit, min(self._limit + GROWTH_PER_EVENT * self.event_count, self._ceiling)
        )
        if len(self._tail) > most:
            raise InvalidResponse(f"An event is larger than {most} bytes")

    def _whole(self, chunk: bytes) -> bytes:
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
                self._check_size()
            return b""
        whole = bytes(tail[:end])
        del tail[:end]
        if tail.endswith(b"\n") and _ONLY_COMMENTS.match(tail):
            whole += tail
            tail.clear()
        if len(tail) > self._limit:
            self._check_size()
        if whole.startswith(b":") or b"\n:" in whole:
            whole = _COMMENTS.sub(self._comment, whole)
        self.event_count += count_events(whole)
        return whole


_NO_OBJECTS = frozenset({b"[DONE]", b"null"})


def check_utf8(events: bytes) -> None:
    """See that these are UTF-8. Raises: Garbage."""
    if not events.isascii():
        try:
            events.decode()
        except UnicodeDecodeError:
            raise InvalidResponse("An event of the node's stream is not UTF-8") from None


def validated(events: bytes) -> bytes:
    """What of these whole events a client can read. Raises: Garbage.

    What has no data is no event (HTML Standard, 9.2.6), but official clients fail on it.
    """
    check_utf8(events)
    kept = []
    for event in split(events):
        data = payload(event)
        if not data:
            kept += [line for line in event.splitlines(keepends=True) if line.startswith(b":")]
            continue
        kept.append(event)
        if data in _NO_OBJECTS:
            continue
        try:
            json_values.check_object(data)
        except json_values.InvalidJson:
            raise InvalidResponse("An event of the node's stream is no JSON object") from None
    return b"".join(kept)


def split(data: bytes) -> Iterator[bytes]:
    """The events of `data` one by one, each with its blank line; comments pass as they are."""
    start = 0
    for boundary in _BOUNDARY.finditer(data):
        yield data[start : boundary.end()]
        start = boundary.end()
    if start < len(data):
        yield data[start:]


def count_events(data: bytes) -> int:
    """How many whole events `data` holds."""
    return sum(1 for _ in _BOUNDARY.finditer(data))


def edit_matching(events: bytes, mark: bytes, edit: Callable[[bytes], bytes]) -> bytes:
    """These whole events, each that has `mark` in it as `edit` makes it."""
    if mark not in events:
        return events
    return b"".join(edit(event) if mark in event else event for event in split(events))


def last_events(data: bytes, size: int) -> bytes:
    """The whole events that the last `size` bytes of `data` are part of."""
    start = data.rfind(b"\n\n", 0, max(0, len(data) - size)) + 2
    return data[start:] if start > 1 else data


def payload(event: bytes) -> bytes:
    """The data of an event, its lines joined; empty for comments and events without data."""
    if event.startswith(b"data:") and event.find(b"\n") == len(event) - 2:
        return event[5:-2].strip(b" \r")  # its only line, as nearly always
    return b"\n".join(
        line[5:].strip(b" \r") for line in event.split(b"\n") if line.startswith(b"data:")
    )


def event_name(event: bytes) -> bytes:
    """The value of the event's `event:` line, or nothing."""
    if event.find(b"event:") < 0:
        return b""
    for line in event.split(b"\n"):
        if line.startswith(b"event:"):
            return line[6:].strip(b" \r")
    return b""
