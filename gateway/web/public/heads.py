"""The heads of replies: what a client learns besides the answer."""

from __future__ import annotations

import math
import re

from gateway.errors import GatewayError
from gateway.events import RequestFinished
from gateway.request import Headers

EXPOSED = (
    "X-Request-ID",
    "request-id",
    "X-Gateway-Class",
    "X-Gateway-Attempts",
    "X-Gateway-Queue-Ms",
    "X-Gateway-Node",
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


def own_fields(record: RequestFinished, *, anthropic: bool, expose_node: bool) -> Headers:
    """The fields that every routed reply has, as far as they are known by now."""
    tag = record.id.encode()
    found = [
        (b"x-request-id", tag),
        (b"x-gateway-class", record.priority.label.encode()),
        (b"x-gateway-attempts", b"%d" % record.attempts),
        (b"x-gateway-queue-ms", b"%d" % (record.queue * 1000)),
    ]
    if anthropic:
        found.append((b"request-id", tag))
    if expose_node and record.node is not None:
        found.append((b"x-gateway-node", record.node.encode()))
    return found


def error_fields(error: GatewayError, size: int) -> Headers:
    """The fields of an error's head; `size` is its body's, in bytes."""
    found = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % size),
        (b"x-gateway-reason", error.code.encode()),
    ]
    if error.retry_after is not None:
        found.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
    if not error.retryable and error.status >= 429:
        found.append((b"x-should-retry", b"false"))
    if error.allow is not None:
        found.append((b"allow", error.allow.encode()))
    return found


STREAM_FIELDS: Headers = [
    (b"content-type", b"text/event-stream"),
    (b"x-accel-buffering", b"no"),
]
"""The head of a stream that begins with a heartbeat."""
