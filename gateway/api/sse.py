"""Server-sent events as bytes: only whole events pass, so a broken stream never ends within one.

Nothing is parsed here. A chunk of ordinary events costs one match of a pattern, however many events
it holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from gateway.api import json_values
from gateway.transport.errors import InvalidResponse

# Lines that are worked on in one turn of the event loop: some milliseconds, whatever they hold.
MOST_STEP_LINES = 2000
# Lines of one event. A node's events have one or two, and comments in between.
MOST_EVENT_LINES = 4096
# Objects and lists of one event that are decoded, in some milliseconds. Only an event with the
# probabilities of many tokens has more.
MOST_DENSE_OBJECTS = 20_000
HEARTBEAT = b":\n"  # a comment between events; a blank line behind it would break a Go client
ERROR_LINE = b"error:"  # how the line of an error event of older llama.cpp begins
_DATA_LINES = (b"data:", ERROR_LINE)
_COMMENTS = re.compile(rb"(?:\A|(?<=\n\n)|(?<=\n\r\n))(?::[^\n]*\n(?:\r?\n)*)+")
_ONLY_COMMENTS = re.compile(rb"(?::[^\n]*\n(?:\r?\n)*)+\Z")
_BOUNDARY = re.compile(rb"\n\r?\n")
_STEP = re.compile(rb"(?:[^\n]*\n){%d}" % MOST_STEP_LINES)
# Matches, from the beginning, all whole events that are ordinary; possibly none.
EventMatcher = Callable[[bytes], re.Match[bytes] | None]


def ordinary_events(*, line: bytes = b"", after_brace: bytes = b"") -> EventMatcher:
    """Make a matcher of events whose data is, at a glance, one JSON object on one line.

    `line`: a pattern of the line above the data, line end included. `after_brace`: a pattern that
    must match behind the first brace.
    """
    # Not possessive: up to Python 3.11.4 (Debian 12) such a match may end within an event.
    return re.compile(rb"(?:%bdata: ?\{(?=[\"}])%b.*\}\n\n)*" % (line, after_brace)).match


ANY_OBJECT = ordinary_events()
# Bytes from the first brace on that decide whether an event is ordinary: more than any
# `after_brace` looks at.
BEGIN_BYTES = 16
# Bytes that each event adds to the size limit: `/v1/responses` ends with an event that repeats the
# whole response, and no token of today's vocabularies is longer, escaped.
GROWTH_PER_EVENT = 1024


class EventFramer:
    """Lets whole events pass, and rewrites the server's comments as `HEARTBEAT`.

    `limit`: bytes of the largest event. It grows with each event up to `ceiling`, since the last
    event may repeat them all. `keep_comments` False removes comments altogether.
    """

    __slots__ = (
        "_ceiling", "_comment", "_limit", "_lines", "_matcher", "_tail", "begin", "event_count",
        "special_bytes",
    )  # fmt: skip

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
        self._matcher = matcher
        self._comment = HEARTBEAT if keep_comments else b""
        self._tail = bytearray()
        self._lines = 0  # lines in `_tail`
        self.begin = b""  # how the last ordinary event that came alone begins; empty: none has
        self.event_count = 0  # events that have passed
        self.special_bytes = 0  # bytes at the end of the last output that are not ordinary events

    @property
    def tail(self) -> bytes:
        """What is buffered."""
        return bytes(self._tail)

    @property
    def has_partial(self) -> bool:
        """Whether the beginning of an event is buffered."""
        return bool(self._tail)

    @property
    def lacks_blank_line(self) -> bool:
        """Whether the buffered bytes are an event but for the blank line behind it."""
        data = payload(self.tail)
        try:
            json_values.check_object(data)
        except json_values.InvalidJson:
            return data == b"[DONE]"
        return True

    def special_bytes_in(self, events: bytes) -> int:
        """Bytes from the first of these events on that is not ordinary."""
        found = self._matcher(events)
        return len(events) if found is None else len(events) - found.end()

    def feed(self, chunk: bytes) -> bytes:
        """The whole events that have arrived by now; possibly none.

        Raises: InvalidResponse, when an event grows past the limit.
        """
        tail = self._tail
        begin = self.begin
        if (
            begin
            and chunk.startswith(begin)
            and chunk.endswith(b"}\n\n")
            and not tail
            and chunk.find(b"\n", len(begin)) == len(chunk) - 2
            and chunk.find(b"data:", len(begin)) < 0
        ):
            # One more event like the last one, as a token comes from a node.
            self.event_count += 1
            self.special_bytes = 0
            return chunk
        end = 0
        if not tail or chunk.find(b"\n\n") >= 0:
            if tail:
                chunk = bytes(tail) + chunk
                tail.clear()
            found = self._matcher(chunk)
            if found is not None and (end := found.end()):
                # Each ordinary event has this once, at its end.
                count = chunk.count(b"}\n\n", 0, end)
                if chunk.count(b"data:", 0, end) != count:
                    end = count = 0  # an event may be cut within another, or a text holds this
                self.event_count += count
                if end == len(chunk):
                    if count == 1:
                        self._learn_begin(chunk)
                    self.special_bytes = 0
                    return chunk
        rest = self._whole(chunk[end:] if end else chunk)
        self.special_bytes = len(rest)
        if len(rest) == len(chunk) - end and chunk.endswith(rest):
            return chunk  # nearly always: nothing is copied
        return chunk[:end] + rest

    def _learn_begin(self, event: bytes) -> None:
        """Keep the part of an ordinary event that tells whether the next one is ordinary."""
        size = event.find(b"{", event.find(b"data:")) + BEGIN_BYTES
        if size <= len(event) - len(b"}\n\n"):
            self.begin = event[:size]

    def count_passed(self, events: int) -> None:
        """So many ordinary events have passed elsewhere."""
        self.event_count += events

    def _check_size(self) -> None:
        """Check that the large buffer may still be an event. Raises: InvalidResponse."""
        if self._lines > MOST_EVENT_LINES:
            raise InvalidResponse(f"An event has more than {MOST_EVENT_LINES} lines")
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
        self._lines = chunk.count(b"\n") + (self._lines if tail else 0)
        tail += chunk
        if not seen and tail[0] in b"\r\n":
            # For example the second half of a comment's blank line.
            del tail[: len(tail) - len(tail.lstrip(b"\r\n"))]
            self._lines = tail.count(b"\n")
        end = max(tail.rfind(b"\n\n", seen) + 2, tail.rfind(b"\n\r\n", seen) + 3)
        if end < 3:  # neither was found
            end = len(tail) if tail.endswith(b"\n") and _ONLY_COMMENTS.match(tail) else 0
        if not end:
            if len(tail) > self._limit or self._lines > MOST_EVENT_LINES:
                self._check_size()
            return b""
        whole = bytes(tail[:end])
        del tail[:end]
        if tail.endswith(b"\n") and _ONLY_COMMENTS.match(tail):
            whole += tail
            tail.clear()
        self._lines = tail.count(b"\n")
        if len(tail) > self._limit:
            self._check_size()
        if whole.startswith(b":") or b"\n:" in whole:
            whole = _COMMENTS.sub(self._comment, whole)
        self.event_count += count_events(whole)
        return whole


def is_dense(data: bytes) -> bool:
    """Whether an event's data are too many objects and lists to be decoded in one step."""
    return (
        len(data) > MOST_DENSE_OBJECTS and data.count(b"{") + data.count(b"[") > MOST_DENSE_OBJECTS
    )


def step_size(chunk: bytes) -> int:
    """How many bytes of a chunk are worked on in one turn of the event loop."""
    found = _STEP.match(chunk) if chunk.count(b"\n") > MOST_STEP_LINES else None
    return len(chunk) if found is None else found.end()


_NO_OBJECTS = frozenset({b"[DONE]", b"null"})


def check_utf8(events: bytes) -> None:
    """Check that events are UTF-8. Raises: InvalidResponse."""
    if not events.isascii():
        try:
            events.decode()
        except UnicodeDecodeError:
            raise InvalidResponse("An event of the node's stream is not UTF-8") from None


def validated(events: bytes) -> bytes:
    """The whole events without those that have no data. Raises: InvalidResponse.

    An event without data is none (HTML Standard, 9.2.6), but official clients fail on it.
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
    """The events of `data` one by one, each with its blank line; comments are left in."""
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
    """Apply `edit` to each whole event that contains `mark`."""
    if mark not in events:
        return events
    return b"".join(edit(event) if mark in event else event for event in split(events))


def last_events(data: bytes, size: int) -> bytes:
    """The whole events that the last `size` bytes of `data` belong to."""
    start = data.rfind(b"\n\n", 0, max(0, len(data) - size)) + 2
    return data[start:] if start > 1 else data


def payload(event: bytes) -> bytes:
    """The data of an event, its lines joined; empty for comments and events without data.

    Older llama.cpp wrote `error: {...}` for an event of that name with this data.
    """
    if event.startswith(b"data:") and event.find(b"\n") == len(event) - 2:
        return event[5:-2].strip(b" \r")  # nearly always: one line
    return b"\n".join(
        line.partition(b":")[2].strip(b" \r")
        for line in event.split(b"\n")
        if line.startswith(_DATA_LINES)
    )


def is_error(event: bytes) -> bool:
    """Whether it is a node's error event. The client gets one of ours, or a continuation."""
    return payload(event).startswith(b'{"error":') or event_name(event) == b"error"


def event_name(event: bytes) -> bytes:
    """The value of the event's `event:` line, or empty."""
    if event.find(b"event:") < 0:
        is_error = event.startswith(ERROR_LINE) or b"\n" + ERROR_LINE in event
        return b"error" if is_error else b""
    for line in event.split(b"\n"):
        if line.startswith(b"event:"):
            return line[6:].strip(b" \r")
    return b""
