"""The heads of replies: what a client learns besides the answer."""

from __future__ import annotations

import math
import re

from gateway.errors import GatewayError
from gateway.events import RequestFinished
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
    if record.attempts == 1 and not record.queue:
        lines = b"x-request-id: %b\r\n%b" % (tag, _AT_ONCE[record.priority])
    else:
        lines = (
            b"x-request-id: %b\r\nx-gateway-class: %b\r\n"
            b"x-gateway-attempts: %d\r\nx-gateway-queue-ms: %d\r\n"
            % (tag, _LABELS[record.priority], record.attempts, record.queue * 1000)
        )
    if anthropic:
        lines += b"request-id: %b\r\n" % tag
    if record.tier is not None:
        lines += _TIERS[record.tier]
    if record.fallback is not None:
        lines += b"x-gateway-fallback: %b\r\n" % record.fallback.encode()
    if expose_node and record.node is not None:
        lines += b"x-gateway-node: %b\r\n" % record.node.encode()
    return lines


def lines_of(headers: Headers) -> bytes:
    """Header fields as the lines of a head."""
    return b"".join(b"%b: %b\r\n" % field for field in headers)


_TIERS = {"cpu": b"x-gateway-tier: cpu\r\n", "gpu": b"x-gateway-tier: gpu\r\n"}
_LABELS = [priority.label.encode() for priority in Priority]
_AT_ONCE = [
    b"x-gateway-class: %b\r\nx-gateway-attempts: 1\r\nx-gateway-queue-ms: 0\r\n" % label
    for label in _LABELS
]
"""What most replies say."""


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
    if error.allow is not None:
        found.append((b"allow", error.allow.encode()))
    return found


def progress_line(place: Waiting) -> bytes:
    """Where a request stands in line, as a comment of its stream."""
    line = b": queued position=%d" % place.position
    if place.expected is not None:
        line += b" expected_start=%.1f" % place.expected
    return line + b"\n"


STREAM_LINES = b"content-type: text/event-stream\r\nx-accel-buffering: no\r\n"
"""The head of a stream that begins with a heartbeat."""
