"""Faults that a test switches on: their kinds, the requests they apply to, and their number."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

#: Faults at one point of a response: before the head if `after_events` is None, else after that
#: many events (0: after the head). On a plain response any number above 0 means half the body;
#: "cut" and "end" always do, "insert" and "error_event" do nothing there.
POINT_FAULTS = {
    "hang": "goes silent for `seconds` (None: until released or the client leaves), then continues",
    "reset": "RST",
    "close": "FIN without an answer's end",
    "cut": "half of the next chunk, then FIN (RST where `reset` is true)",
    "end": "ends the body properly, though the answer is not complete",
    "error_event": "the API's error event, then ends the body properly",
    "insert": "sends `data` (or the preset `what`, see INSERTIONS) as a chunk, then continues",
    "garbage_body": "bytes that break the chunked coding, then FIN",
}
#: Faults that affect the whole response.
RESPONSE_FAULTS = {
    "status": "answers `status` with the server's error body, `body` or `headers`",
    "garbage": "answers bytes that are no HTTP, then FIN",
    "interim": "`count` interim responses (`status`, by default 103) before the final one",
    "slow_head": "head in pieces of `size` bytes (1), `seconds` (0.01) apart",
    "trickle": "everything in pieces of `size` bytes (1), `seconds` (0.01) apart",
    "head_bomb": "`count` (10000) more headers of `size` (20) bytes",
    "wrong_length": "Content-Length off by `delta` (+10), body without it unchanged, then FIN",
    "chunk_extensions": "chunks with extensions and a trailer",
    "crlf": "lines end with CR LF",
    "comments": "a comment after every event",
    "split": "events in pieces of `size` (7) bytes, each a segment of its own",
    "merge": "`count` (4) events in one segment, each its own chunk",
    "double_done": "the last event twice",
    "no_done": "no last event, though the body ends properly",
}
#: Shorthands.
PRESETS: dict[str, dict[str, Any]] = {
    "mute": {"kind": "hang", "path": "control"},
    "loading": {"kind": "status", "status": 503, "path": "*"},
    "stale": {"kind": "reset", "reused": True},
}
INSERTIONS = {
    "not_json": b"data: {oops\n\n",
    "invalid_utf8": b'data: {"choices":[{"index":0,"delta":{"content":"\xff\xfe"}}]}\n\n',
    "no_data": b"event: nothing\n\n",
    "empty": b"\n\n",
    "null": b"data: null\n\n",
    "comment": b":\n\n",
    "line_comment": b":\n",
    "fields": b"id: 7\nretry: 10\nunknown: x\n\n",
    "done": b"data: [DONE]\n\n",
    "nul": b"\0\0\0\n\n",
    "half": b'data: {"choices":[{"index":0,"delta":{"content":"',
    "no_blank_line": b'data: {"choices":[]}\n',
}
GARBAGE = b"\x16\x03\x01\x02\0 not HTTP at all \xff\xfe\0\r\n\r\n" * 8

_ERRORS = {
    400: ("invalid_request_error", "Bad request"),
    401: ("authentication_error", "Invalid API Key"),
    403: ("permission_error", "Forbidden"),
    404: ("not_found_error", "File Not Found"),
    429: ("rate_limit_error", "Too many requests"),
    501: ("not_supported_error", "This server does not support this"),
    503: ("unavailable_error", "Loading model"),
}


@dataclass(slots=True, frozen=True, kw_only=True)
class Fault:
    """One fault. `POINT_FAULTS` and `RESPONSE_FAULTS` say which values each kind reads."""

    kind: str
    path: str | None = None
    """None: all that need a slot; "control": all others; "*", or an exact path."""
    reused: bool = False  # only for later requests of a connection
    tag: str | None = None  # only for requests with this `x-tag`
    after_events: int | None = None
    seconds: float | None = None
    size: int | None = None  # bytes
    count: int | None = None
    status: int | None = None
    body: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    what: str | None = None
    data: bytes = b""
    delta: int = 10  # bytes
    reset: bool = False

    def __post_init__(self) -> None:
        if self.kind not in POINT_FAULTS and self.kind not in RESPONSE_FAULTS:
            allowed = ", ".join([*POINT_FAULTS, *RESPONSE_FAULTS, *PRESETS])
            raise ValueError(f"no fault {self.kind!r}; there are: {allowed}")
        if self.what not in {None, "huge", *INSERTIONS}:
            raise ValueError(f"no insertion {self.what!r}: huge, {', '.join(INSERTIONS)}")
        if self.kind == "status" and self.status is None:
            raise ValueError("a fault 'status' needs a status")

    def applies_to(self, path: str, *, control: bool, reused: bool, tag: str | None) -> bool:
        if (self.reused and not reused) or self.tag not in {None, tag}:
            return False
        if self.path is None:
            return not control
        return self.path in {"*", path} or (self.path == "control" and control)

    def insertion(self) -> bytes:
        if self.what == "huge":
            return b'data: {"choices":[],"padding":"%b"}\n\n' % (b"x" * (self.size or 1 << 20))
        return self.data or INSERTIONS[self.what or "comment"]

    def error_body(self) -> bytes:
        if self.body is not None:
            return self.body.encode(errors="surrogateescape")
        status = self.status or 500
        kind, message = _ERRORS.get(status, ("server_error", f"Emulated {status}"))
        return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})


def read_fault(kind: str, **options: Any) -> Fault:
    options = PRESETS.get(kind, {"kind": kind}) | options
    if isinstance(options.get("data"), str):
        options["data"] = options["data"].encode()
    try:
        return Fault(**options)
    except TypeError as error:
        raise ValueError(f"fault {kind!r}: {error}") from None


class FaultPlan:
    """The faults of one node: those for the next requests, and standing ones."""

    def __init__(self) -> None:
        self.standing: list[Fault] = []
        self.upcoming: deque[Fault] = deque()
        self.fired = 0
        self.released = asyncio.Event()
        """Set by the next `release`. A response keeps the event of the time it was begun."""
        self.hanging = 0  # responses that wait for `release`

    def next(self, kind: str, n: int = 1, **options: Any) -> None:
        """Applies a fault to the next `n` requests that match."""
        self.upcoming.extend([read_fault(kind, **options)] * n)

    def set(self, kind: str, **options: Any) -> None:
        """Applies a fault to every request that matches, until `clear()`."""
        self.standing.append(read_fault(kind, **options))

    def share_next(self, other: FaultPlan) -> None:
        """From now on `next` of either applies to whichever node the request comes to."""
        self.upcoming = other.upcoming

    def clear(self) -> None:
        """Removes all faults and releases hanging responses."""
        self.standing.clear()
        self.upcoming.clear()
        self.release()

    def release(self) -> None:
        """Lets the responses to all requests so far continue, also those that hang later."""
        self.released.set()
        self.released = asyncio.Event()

    def take(
        self, path: str, *, control: bool, reused: bool, tag: str | None = None
    ) -> Fault | None:
        for fault in (*self.upcoming, *self.standing):
            if fault.applies_to(path, control=control, reused=reused, tag=tag):
                if fault in self.upcoming:
                    self.upcoming.remove(fault)
                self.fired += 1
                return fault
        return None

    async def hang(self, released: asyncio.Event, seconds: float | None) -> None:
        """Waits until a response is released, at most `seconds`."""
        self.hanging += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await released.wait()
        finally:
            self.hanging -= 1

    def __bool__(self) -> bool:
        return bool(self.standing or self.upcoming)
