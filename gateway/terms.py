"""Words that all packages share about requests: classes, callers, endpoints, header fields, traces.

A request that is not traced has no trace (W3C Trace Context), and its client's `traceparent` goes
to nodes as it came. The ids of spans are derived, so that a node can be told its attempt's long
before the span is made.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple, Protocol

from gateway.config.keys import CacheSpec, LimitSpec

Headers = list[tuple[bytes, bytes]]  # Header fields in wire order, with names in lower case
# What a node can do, by the names of `endpoints` in the inventory.
Endpoint = Literal["chat", "embeddings", "rerank", "infill", "audio", "vision"]


class SegmentedBody(Protocol):
    """A large body, which is sent piece by piece."""

    def __len__(self) -> int:
        """Bytes of all pieces."""

    def pieces(self) -> Sequence[bytes | memoryview]:
        """The pieces; they never change."""


class Priority(enum.IntEnum):
    """The classes, highest first: a smaller number is served first."""

    URGENT = 0
    PREMIUM = 1
    NORMAL = 2
    BATCH = 3

    # Enum's own hash runs in Python, several times per request.
    __hash__ = int.__hash__

    def __init__(self, _: int) -> None:
        self.label = self._name_.lower()
        """The class's name on the wire: `urgent`, `premium`, `normal`, `batch`."""

    @classmethod
    def parse(cls, word: str) -> Priority | None:
        """The class with this label, or None."""
        return _BY_LABEL.get(word.strip().lower())


_BY_LABEL = {priority.label: priority for priority in Priority}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the holder of a key, or an anonymous address."""

    id: str
    name: str
    max_priority: Priority  # The highest class that its requests may have
    models: frozenset[str] | None = None  # Public names of the models that it may use; None: all
    anonymous: bool = False
    trust_user_headers: bool = False  # Whether it may name its end users by a header
    default_priority: Priority = Priority.NORMAL  # The class of a request that asks for none
    group: str | None = None
    """The group that its key belongs to: callers of a group share the group's limits."""
    limits: LimitSpec | None = None
    """Limits of its key, beside those of its group and of all callers."""
    user_limits: LimitSpec | None = None  # Limits of each end user that it names; None: its group's
    cache: CacheSpec | None = None
    """What its key says of prompt caches; None: its group and the settings say all."""

    @property
    def late_priority(self) -> Priority:
        """The class of its work that could wait and whose deadline has come near.

        That of its requests that ask for none, but at least `normal`, if it may have that: what is
        late is treated as if its client waited for it now.
        """
        return max(self.max_priority, min(self.default_priority, Priority.NORMAL))

    def may_use(self, model: str) -> bool:
        """Whether this caller may use the model of this public name."""
        return self.models is None or model in self.models


# Bytes of a client's `tracestate` that are passed on: what the standard demands.
MOST_TRACESTATE_BYTES = 512
MOST_TRACESTATE_MEMBERS = 32  # Its members that are passed on: the most that the standard allows
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NAME, _STATE_NAME = b"traceparent: ", b"tracestate: "


class Traceparent(NamedTuple):
    """What a client says of its trace."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16: the client's own span, which sent the request
    sampled: bool  # Whether the client may have recorded it


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """A request that is traced."""

    trace_id: str  # 32 hexadecimal digits
    parent_id: str | None  # The client's span, of 16; None: the trace begins here
    request_id: str  # The gateway's own id of the request
    received_at: float  # Monotonic seconds

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
