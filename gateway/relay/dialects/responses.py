"""OpenAI's responses."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.errors import GatewayError
from gateway.relay import sse
from gateway.relay.dialects.base import Dialect, error_fields

_OPENINGS = frozenset(
    {
        "response.created",
        "response.in_progress",
        "response.queued",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_summary_part.added",
    }
)
_ENDS = (b"response.completed", b"response.incomplete", b"response.failed")


class Responses(Dialect):
    """`/v1/responses`: named events, from `response.created` to `response.completed`."""

    name = "responses"
    end_mark = b"event: response.completed"
    usual = staticmethod(
        sse.usual(
            line=rb"event: (?!error\n|response\.(?:completed|incomplete|failed)\n).*\n",
            first=rb'(?!"error":)',
        )
    )

    def error_event(self, error: GatewayError, tag: str) -> bytes:
        """The API's own error event, with the `error` object that official clients raise on."""
        event = {
            "type": "error",
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "sequence_number": 0,
            "error": error_fields(error),
        }
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"

    def is_content(self, value: dict[str, Any]) -> bool:
        return value.get("type") not in _OPENINGS

    def is_end(self, event: bytes) -> bool:
        return sse.event_name(event) in _ENDS

    def finished(self, tail: bytes) -> bool:
        name = b""
        for event in sse.split(tail):
            name = sse.event_name(event) or name
        return name in _ENDS


RESPONSES = Responses()
