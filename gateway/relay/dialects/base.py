"""What the relay asks of a dialect: how its stream begins, ends and fails."""

from __future__ import annotations

import enum
import re
from typing import Any

import msgspec

from gateway.errors import GatewayError
from gateway.relay import sse, values
from gateway.transport.errors import Garbage

_DONE = re.compile(rb"\ndata: ?\[DONE\]")


class Part(enum.Enum):
    """What an event that stands before the first content is."""

    OPENING = enum.auto()
    """Says only that an answer begins: held back, since a retry would repeat it."""
    CONTENT = enum.auto()
    ERROR = enum.auto()


class Dialect:
    """OpenAI's form, which most others share."""

    name = "openai"
    ends_once = True
    """Whether one event ends the stream, however many answers it holds."""
    pings = False
    """Whether its heartbeat is an event, so that a comment alone would not do."""
    end = b""
    """What ends a stream behind its last event."""
    end_mark = b"data: [DONE]"
    """What the last event has, and hardly any other."""
    inner_end = False
    """Whether the `end_mark` stands within an object, where `usual` does not see it."""
    usual = staticmethod(sse.usual(first=rb'(?!"error":)'))
    """Finds events that neither end the stream nor are the node's error event."""
    error_mark = b'data: {"error":'
    """What a node's own error event has. The client gets one of ours, or a continuation."""

    def error_body(self, error: GatewayError, tag: str) -> bytes:
        """The error as this API's official client expects it; `tag` is the request's id."""
        return msgspec.json.encode({"error": error_fields(error)})

    def error_event(self, error: GatewayError, tag: str) -> bytes:
        """The same as an event of a stream that has begun."""
        return b"data: " + self.error_body(error, tag) + b"\n\n"

    def heartbeat(self) -> bytes:
        """Bytes that mean nothing, between events."""
        return sse.HEARTBEAT

    def part(self, event: bytes) -> Part:
        """What one event is. Raises: Garbage, when it is none of this API's."""
        data = sse.payload(event)
        if not data:
            return Part.OPENING
        if sse.event_name(event) == b"error":
            return Part.ERROR
        if data == b"[DONE]":
            return Part.CONTENT
        if data == b"null":
            # llama.cpp begins a stream of several prompts with it.
            return Part.OPENING
        try:
            value = values.any_of(data)
        except values.NoJson:
            raise Garbage("An event of the node's stream is not JSON") from None
        if not isinstance(value, dict):
            raise Garbage("An event of the node's stream is not a JSON object")
        if value.get("error"):
            return Part.ERROR
        if "prompt_progress" in value:
            return Part.OPENING
        return Part.CONTENT if self.is_content(value) else Part.OPENING

    def is_content(self, value: dict[str, Any]) -> bool:
        """Whether an event's data has anything that the reader would miss."""
        raise NotImplementedError

    def finished(self, tail: bytes) -> bool:
        """Whether a stream that ends with these bytes has come to its end."""
        return _DONE.search((b"\n" + tail)[-64:]) is not None

    def is_end(self, event: bytes) -> bool:
        """Whether this event with the `end_mark` is the last of a stream."""
        return sse.payload(event) == b"[DONE]"

    def failed(self, tail: bytes) -> bool:
        """Whether the last event of `tail` is the node's own error event."""
        events = [event for event in sse.split(tail) if sse.payload(event)]
        if not events:
            return False
        data = sse.payload(events[-1])
        return data.startswith(b'{"error":') or sse.event_name(events[-1]) == b"error"


def error_fields(error: GatewayError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
        **error.details,
    }
