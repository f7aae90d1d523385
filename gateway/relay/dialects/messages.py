"""Anthropic's messages."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.errors import GatewayError
from gateway.relay import sse
from gateway.relay.dialects.base import Dialect

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OPENINGS = frozenset({"message_start", "content_block_start", "ping"})


class Messages(Dialect):
    """`/v1/messages`: named events, from `message_start` to `message_stop`."""

    name = "messages"
    pings = True
    end_mark = b"event: message_stop"
    error_mark = b"event: error\n"
    usual = staticmethod(sse.usual(line=rb"event: (?!error\n|message_stop).*\n"))

    def error_body(self, error: GatewayError, tag: str) -> bytes:
        kind = _TYPES.get(error.status)
        if kind is None:
            kind = "invalid_request_error" if error.status < 500 else "api_error"
        fields = {"type": kind, "message": error.message}
        return msgspec.json.encode({"type": "error", "error": fields, "request_id": tag})

    def error_event(self, error: GatewayError, tag: str) -> bytes:
        return b"event: error\ndata: " + self.error_body(error, tag) + b"\n\n"

    def heartbeat(self) -> bytes:
        return b'event: ping\ndata: {"type": "ping"}\n\n'

    def is_content(self, value: dict[str, Any]) -> bool:
        return value.get("type") not in _OPENINGS

    def is_end(self, event: bytes) -> bool:
        return sse.event_name(event) == b"message_stop"

    def finished(self, tail: bytes) -> bool:
        return b"\nevent: message_stop" in (b"\n" + tail)[-128:]


MESSAGES = Messages()
