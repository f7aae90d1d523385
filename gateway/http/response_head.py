"""Heads of responses: the gateway's own header lines, errors, and progress comments."""

from __future__ import annotations

import math
import secrets
import time
from functools import lru_cache

from gateway.api.base import Api
from gateway.callers.limits import RateLimit
from gateway.errors import GatewayError
from gateway.events import RequestRecord
from gateway.forward.client_response import ClientResponse, node_error_code
from gateway.forward.header_fields import with_content_type
from gateway.forward.in_flight import PrefillStatus
from gateway.lease import QueuePosition
from gateway.terms import Headers, Priority

EXPOSED_HEADERS = (
    "X-Request-ID", "request-id", "X-Gateway-Class", "X-Gateway-Attempts", "X-Gateway-Queue-Ms",
    "X-Gateway-Node", "X-Gateway-Tier", "X-Gateway-Fallback", "X-Gateway-Reason", "Retry-After",
    "x-ratelimit-limit-requests", "x-ratelimit-limit-tokens", "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens", "x-ratelimit-reset-requests", "x-ratelimit-reset-tokens",
    "anthropic-ratelimit-requests-limit", "anthropic-ratelimit-requests-remaining",
    "anthropic-ratelimit-requests-reset", "anthropic-ratelimit-tokens-limit",
    "anthropic-ratelimit-tokens-remaining", "anthropic-ratelimit-tokens-reset",
)  # fmt: skip
"""Headers that a web page of another origin may read."""

_TIERS = {"cpu": b"x-gateway-tier: cpu\r\n", "gpu": b"x-gateway-tier: gpu\r\n"}
_LABELS = [priority.label.encode() for priority in Priority]


def gateway_header_lines(record: RequestRecord, *, anthropic: bool, name_node: bool) -> bytes:
    """The gateway's header lines of a routed response."""
    usual = record.attempts == 1 and not record.queue_seconds
    lines = (_usual_outcome_lines if usual else _outcome_lines)(
        record.priority,
        record.attempts,
        record.queue_seconds,
        record.tier,
        record.fallback,
        record.node if name_node else None,
    )
    request_id = record.x_request_id.encode()
    if anthropic:
        return b"x-request-id: %b\r\nrequest-id: %b\r\n%b" % (request_id, request_id, lines)
    return b"x-request-id: %b\r\n%b" % (request_id, lines)


def _outcome_lines(
    priority: Priority,
    attempts: int,
    queue: float,
    tier: str | None,
    fallback: str | None,
    node: str | None,
) -> bytes:
    """The header lines that say how the request was served."""
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


# Nearly all requests are answered by their first node, without queueing.
_usual_outcome_lines = lru_cache(maxsize=4096)(_outcome_lines)


def early_gateway_header_lines(record: RequestRecord, *, anthropic: bool) -> bytes:
    """The gateway's header lines of a response that starts before its outcome is known."""
    request_id, label = record.x_request_id.encode(), _LABELS[record.priority]
    lines = b"x-request-id: %b\r\nx-gateway-class: %b\r\n" % (request_id, label)
    return lines + b"request-id: %b\r\n" % request_id if anthropic else lines


def rate_limit_lines(
    requests: RateLimit | None, tokens: RateLimit | None, *, anthropic: bool
) -> bytes:
    """The header lines that tell a caller its tightest limits, in OpenAI's form.

    `anthropic`: in Anthropic's too.
    """
    lines = anthropic_lines = ""
    for kind, found in (("requests", requests), ("tokens", tokens)):
        if found is None:
            continue
        lines += (
            f"x-ratelimit-limit-{kind}: {found.limit}\r\n"
            f"x-ratelimit-remaining-{kind}: {found.remaining}\r\n"
            f"x-ratelimit-reset-{kind}: {_duration(math.ceil(found.reset))}\r\n"
        )
        if anthropic:
            name = f"anthropic-ratelimit-{kind}"
            resets_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.resets_at))
            anthropic_lines += (
                f"{name}-limit: {found.limit}\r\n{name}-remaining: {found.remaining}\r\n"
                f"{name}-reset: {resets_at}\r\n"
            )
    return (lines + anthropic_lines).encode()


@lru_cache(maxsize=256)
def _duration(seconds: int) -> str:
    """A duration as OpenAI writes it: `15s`, `6m0s`, `7h30m0s`; `0s` for none."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def encode_headers(headers: Headers) -> bytes:
    """Header fields as header lines."""
    return b"".join(b"%b: %b\r\n" % field for field in headers)


def error_headers(error: GatewayError) -> Headers:
    """The headers of an error response."""
    headers = [
        (b"content-type", b"application/json"),
        (b"x-gateway-reason", error.code.encode()),
    ]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
    if not error.retryable and error.status >= 408:
        headers.append((b"x-should-retry", b"false"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == 415:
        headers.append((b"accept-encoding", b"identity"))
    if error.allow is not None:
        headers.append((b"allow", error.allow.encode()))
    return headers


def rejection(
    error: GatewayError, api: Api, request_id: str | None = None
) -> tuple[Headers, bytes]:
    """Headers and body of the response to what never became a request."""
    request_id = request_id or f"req_{secrets.token_hex(8)}"
    body = api.error_body(error, request_id)
    headers = [
        *error_headers(error),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request_id.encode()),
    ]
    if api.sends_request_id:
        headers.append((b"request-id", request_id.encode()))
    return headers, body


def progress_comment(
    queue_position: QueuePosition | None, prefill_status: PrefillStatus | None
) -> bytes:
    """An SSE comment with the place in the queue or the progress of the prefill.

    Empty if neither is known.
    """
    if queue_position is not None:
        comment = b": queued position=%d" % queue_position.position
        if queue_position.expected_seconds is not None:
            comment += b" expected_start=%.1f" % queue_position.expected_seconds
        return comment + b"\n"
    if prefill_status is None:
        return b""
    if prefill_status.tokens is None:
        return b": prefill percent=%d estimated=1\n" % prefill_status.percent
    return b": prefill percent=%d processed=%d total=%d\n" % (
        prefill_status.percent,
        *prefill_status.tokens,
    )


def stream_header_lines(api: Api) -> bytes:
    """The header lines of a stream that begins with a heartbeat."""
    return b"content-type: %b\r\nx-accel-buffering: no\r\n" % api.stream_content_type


def node_error_header_lines(response: ClientResponse, content: bytes) -> bytes:
    """The header lines of a node's error with this body."""
    lines = response.header_lines
    if content is not response.content:
        lines = with_content_type(lines, b"content-type: application/json\r\n")
    return lines + b"x-gateway-reason: %b\r\n" % node_error_code(response.status).encode()
