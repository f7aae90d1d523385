"""The heads of replies: what a client learns besides the answer."""

from __future__ import annotations

import math
import re
import secrets
from functools import lru_cache

from gateway.errors import GatewayError
from gateway.events import RequestFinished
from gateway.proxy.api.base import Api
from gateway.proxy.json_values import InvalidJson, parse_json
from gateway.proxy.prefill_progress import PrefillStatus
from gateway.proxy.response_stream import ProxyResponse
from gateway.request import Headers, Priority
from gateway.scheduling.waiters import QueuePosition

EXPOSED_HEADERS = (
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


def x_request_id_of(headers: Headers) -> str | None:
    """The client's own `X-Request-ID`, if it is a sane one."""
    for name, value in headers:
        if name == b"x-request-id":
            return value.decode() if _TAG.fullmatch(value) else None
    return None


def gateway_header_lines(record: RequestFinished, *, anthropic: bool, name_node: bool) -> bytes:
    """The lines that every routed reply has, as far as they are known by now."""
    tag = record.x_request_id.encode()
    lines = b"x-request-id: " + tag + b"\r\n"
    if anthropic:
        lines += b"request-id: " + tag + b"\r\n"
    fate = _fate if record.queue_seconds or record.attempts != 1 else _usual_fate
    return lines + fate(
        record.priority,
        record.attempts,
        record.queue_seconds,
        record.tier,
        record.fallback,
        record.node if name_node else None,
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


def early_gateway_header_lines(record: RequestFinished, *, anthropic: bool) -> bytes:
    """The lines of a head that goes out while it is open how the request will fare."""
    tag = record.x_request_id.encode()
    lines = b"x-request-id: %b\r\nx-gateway-class: %b\r\n" % (tag, _LABELS[record.priority])
    return lines + b"request-id: %b\r\n" % tag if anthropic else lines


def encode_headers(headers: Headers) -> bytes:
    """Header fields as the lines of a head."""
    return b"".join(b"%b: %b\r\n" % field for field in headers)


_TIERS = {"cpu": b"x-gateway-tier: cpu\r\n", "gpu": b"x-gateway-tier: gpu\r\n"}

_LABELS = [priority.label.encode() for priority in Priority]


def error_headers(error: GatewayError) -> Headers:
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


def encode_rejection(error: GatewayError, api: Api) -> tuple[bytes, bytes]:
    """The head's lines and the body of a reply to what never became a request."""
    tag = f"req_{secrets.token_hex(8)}"
    body = api.error_body(error, tag)
    fields = [
        *error_headers(error),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", tag.encode()),
    ]
    if api.sends_request_id:
        fields.append((b"request-id", tag.encode()))
    return encode_headers(fields), body


def progress_comment(
    queue_position: QueuePosition | None, prefill_status: PrefillStatus | None
) -> bytes:
    """Where a request stands in line, or how far its prompt is read, as a comment of its stream.

    Empty where there is nothing to tell.
    """
    if queue_position is not None:
        line = b": queued position=%d" % queue_position.position
        if queue_position.expected_seconds is not None:
            line += b" expected_start=%.1f" % queue_position.expected_seconds
        return line + b"\n"
    if prefill_status is None:
        return b""
    if prefill_status.tokens is None:
        return b": prefill percent=%d estimated=1\n" % prefill_status.percent
    return b": prefill percent=%d processed=%d total=%d\n" % (
        prefill_status.percent,
        *prefill_status.tokens,
    )


EVENT_STREAM_HEADER_LINES = b"content-type: text/event-stream\r\nx-accel-buffering: no\r\n"
"""The head of a stream that begins with a heartbeat."""

_CODES = {400: "invalid_request", 413: "request_too_large", 422: "invalid_request"}

_OTHER = "node_error"


def node_error(reply: ProxyResponse) -> GatewayError:
    """The error that a node's reply of 400 or more tells."""
    try:
        message = str(parse_json(reply.content)["error"]["message"])
    except (InvalidJson, KeyError, TypeError):
        message = f"The node answered with status {reply.status}."
    return GatewayError(reply.status, _CODES.get(reply.status, _OTHER), message)


def node_error_body(reply: ProxyResponse, api: Api, x_request_id: str) -> bytes:
    """Its body as it is, unless it is empty or the API has a form that llama.cpp doesn't use."""
    if reply.content and api.is_own_error(reply.content):
        return reply.content
    return api.error_body(node_error(reply), x_request_id)


def node_error_header_lines(reply: ProxyResponse, content: bytes) -> bytes:
    """The lines of its head for this body."""
    lines = reply.header_lines
    if content is not reply.content:
        kept = (line for line in lines.splitlines(True) if not line.startswith(b"content-type:"))
        lines = b"".join(kept) + b"content-type: application/json\r\n"
    return lines + b"x-gateway-reason: %b\r\n" % _CODES.get(reply.status, _OTHER).encode()
