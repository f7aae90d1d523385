"""The heads of replies: what a client learns besides the answer."""

from __future__ import annotations

import math
import re
import secrets
from functools import lru_cache

from gateway.errors import GatewayError
from gateway.events import RequestFinished
from gateway.relay.dialects.base import Dialect
from gateway.relay.prefill import Reading
from gateway.request import Headers, Priority
from gateway.scheduling.ticket import Waiting

EXPOSED = (
    "X-Request-ID",
    "request-id",
    "X-Gateway-Class",
    "X-Gateway-Attempts",
    "X-Gateway-Queue-Ms",
    "X-Gateway-Node",
    "X-Gateway-Tier",
    "X-Gateway-Fallback",
    "X-Gateway-Reason",
    "Retry-After",
)
"""Fields that a web page of another origin may read."""

_TAG = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


def tag_of(headers: Headers) -> str | None:
    """The client's own `X-Request-ID`, if it is a sane one."""
    for name, value in headers:
        if name == b"x-request-id":
            return value.decode() if _TAG.fullmatch(value) else None
    return None


def own_fields(record: RequestFinished, *, anthropic: bool, expose_node: bool) -> bytes:
    """The lines that every routed reply has, as far as they are known by now."""
    tag = record.id.encode()
    lines = b"x-request-id: " + tag + b"\r\n"
    if anthropic:
        lines += b"request-id: " + tag + b"\r\n"
    fate = _fate if record.queue or record.attempts != 1 else _usual_fate
    return lines + fate(
        record.priority,
        record.attempts,
        record.queue,
        record.tier,
        record.fallback,
        record.node if expose_node else None,
    )


def _fate(
    priority: Priority,
    attempts: int,
    queue: float,
    tier: str | None,
    fallback: str | None,
    node: str | None,
) -> bytes:
    """How it fared, in the lines of a head."""
    lines = b"x-gateway-class: %b\r\nx-gateway-attempts: %d\r\nx-gateway-queue-ms: %d\r\n" % (
        _LABELS[priority],
        attempts,
        queue * 1000,
    )
    if tier is not None:
        lines += _TIERS[tier]
    if fallback is not None:
        lines += b"x-gateway-fallback: %b\r\n" % fallback.encode()
    if node is not None:
        lines += b"x-gateway-node: %b\r\n" % node.encode()
    return lines


_usual_fate = lru_cache(maxsize=4096)(_fate)
"""Of a request that one node answered at once, as nearly all are."""


def first_fields(record: RequestFinished, *, anthropic: bool) -> bytes:
    """The lines of a head that goes out while it is open how the request will fare."""
    tag = record.id.encode()
    lines = b"x-request-id: %b\r\nx-gateway-class: %b\r\n" % (tag, _LABELS[record.priority])
    return lines + b"request-id: %b\r\n" % tag if anthropic else lines


def lines_of(headers: Headers) -> bytes:
    """Header fields as the lines of a head."""
    return b"".join(b"%b: %b\r\n" % field for field in headers)


_TIERS = {"cpu": b"x-gateway-tier: cpu\r\n", "gpu": b"x-gateway-tier: gpu\r\n"}
_LABELS = [priority.label.encode() for priority in Priority]


def error_fields(error: GatewayError) -> Headers:
    """The fields of an error's head."""
    found = [
        (b"content-type", b"application/json"),
        (b"x-gateway-reason", error.code.encode()),
    ]
    if error.retry_after is not None:
        found.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
    if not error.retryable and error.status >= 408:
        found.append((b"x-should-retry", b"false"))
    if error.status == 401:
        found.append((b"www-authenticate", b"Bearer"))
    if error.status == 415:
        found.append((b"accept-encoding", b"identity"))
    if error.allow is not None:
        found.append((b"allow", error.allow.encode()))
    return found


def refusal(error: GatewayError, dialect: Dialect) -> tuple[bytes, bytes]:
    """The head's lines and the body of a reply to what never became a request."""
    tag = f"req_{secrets.token_hex(8)}"
    body = dialect.error_body(error, tag)
    fields = [
        *error_fields(error),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", tag.encode()),
    ]
    if dialect.name == "messages":
        fields.append((b"request-id", tag.encode()))
    return lines_of(fields), body


def progress_line(place: Waiting | None, reading: Reading | None) -> bytes:
    """Where a request stands in line, or how far its prompt is read, as a comment of its stream.

    Empty where there is nothing to tell.
    """
    if place is not None:
        line = b": queued position=%d" % place.position
        if place.expected is not None:
            line += b" expected_start=%.1f" % place.expected
        return line + b"\n"
    if reading is None:
        return b""
    if reading.tokens is None:
        return b": prefill percent=%d estimated=1\n" % reading.percent
    return b": prefill percent=%d processed=%d total=%d\n" % (reading.percent, *reading.tokens)


STREAM_LINES = b"content-type: text/event-stream\r\nx-accel-buffering: no\r\n"
"""The head of a stream that begins with a heartbeat."""
