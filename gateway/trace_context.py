"""The trace that a request belongs to, and what nodes are told of it (W3C Trace Context).

A request that is not traced has none of this, and its client's `traceparent` goes to nodes as it
came. The ids of spans are derived, so that a node can be told its attempt's long before the span is
made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from gateway.request import Headers

MOST_TRACESTATE_BYTES = 512
"""Bytes of a client's `tracestate` that are passed on: what the standard demands."""

MOST_TRACESTATE_MEMBERS = 32
"""Its members that are passed on: the most that the standard allows."""

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

_NAME, _STATE_NAME = b"traceparent: ", b"tracestate: "


class Traceparent(NamedTuple):
    """What a client says of its trace."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16: the client's own span, which sent the request."""
    sampled: bool
    """Whether the client may have recorded it."""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """A request that is traced."""

    trace_id: str
    """32 hexadecimal digits."""
    parent_id: str | None
    """The client's span, of 16; None: the trace begins here."""
    request_id: str
    """The gateway's own id of the request."""
    received_at: float
    """Monotonic seconds."""

    def span_id(self, *parts: object) -> str:
        """The id of the span of this name within the request's part of the trace."""
        name = " ".join((self.trace_id, self.request_id, *map(str, parts)))
        return blake2b(name.encode(), digest_size=8).hexdigest()

    def attempt_span_id(self, lease_id: int) -> str:
        """The id of an attempt's span: what its node gets as the parent of its own spans."""
        return self.span_id("attempt", lease_id)

    def header_lines(self, lines: bytes, lease_id: int) -> bytes:
        """A client's header lines for the node of this attempt, within this trace.

        `lines`: with names in lower case, as of `forwarded_headers`.
        """
        kept, states = [], []
        for line in lines.splitlines(keepends=True):
            if line.startswith(_STATE_NAME):
                states.append(line[len(_STATE_NAME) :])
            elif not line.startswith(_NAME):
                kept.append(line)
        own = f"traceparent: 00-{self.trace_id}-{self.attempt_span_id(lease_id)}-01\r\n"
        kept.append(own.encode())
        # It belongs to a `traceparent`, and means nothing without one.
        if self.parent_id is not None and (state := _bounded_state(states)):
            kept.append(b"tracestate: %b\r\n" % state)
        return b"".join(kept)


def parse_traceparent(headers: Headers) -> Traceparent | None:
    """What these headers say of a trace; None if that is nothing, or not valid."""
    found: bytes | None = None
    for name, value in headers:
        if name == b"traceparent":
            if found is not None:
                return None
            found = value
    if found is None:
        return None
    match = _TRACEPARENT.fullmatch(found.strip(b" \t"))
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    # A later version may say more than this one, of which this much is known.
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    if not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    return Traceparent(trace_id.decode(), span_id.decode(), bool(int(flags, 16) & 1))


def _bounded_state(values: list[bytes]) -> bytes:
    """The first members of a `tracestate`, within the standard's limits."""
    members: list[bytes] = []
    size = 0
    for member in b",".join(values).split(b","):
        text = member.strip()
        if not text:
            continue
        size += len(text) + bool(members)
        if size > MOST_TRACESTATE_BYTES or len(members) == MOST_TRACESTATE_MEMBERS:
            break
        members.append(text)
    return b",".join(members)
