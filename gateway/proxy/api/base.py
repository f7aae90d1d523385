"""What the relay asks of a dialect: how its stream begins, ends and fails."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.errors import GatewayError
from gateway.proxy import json_values, sse
from gateway.proxy.json_values import InvalidJson, JsonObject, parse_object
from gateway.transport.errors import InvalidResponse

_DONE = re.compile(rb"\ndata: ?\[DONE\]")


class StreamEventKind(enum.Enum):
    """What an event that stands before the first content is."""

    NO_CONTENT = enum.auto()
    """Says only that an answer begins: held back, since a retry would repeat it."""
    CONTENT = enum.auto()
    ERROR = enum.auto()


class Api:
    """OpenAI's form, which most others share."""

    name = "openai"
    single_terminal_event = True
    """Whether one event ends the stream, however many answers it holds."""
    heartbeat_is_event = False
    """Whether its heartbeat is an event, so that a comment alone would not do."""
    stream_end = b""
    """What ends a stream behind its last event."""
    terminal_mark = b"data: [DONE]"
    """What the last event has, and hardly any other."""
    terminal_mark_nested = False
    """Whether the `end_mark` stands within an object, where `usual` does not see it."""
    ordinary_events = staticmethod(sse.ordinary_events(after_brace=rb'(?!"error":)'))
    """Finds events that neither end the stream nor are the node's error event."""
    error_mark = b'data: {"error":'
    """What a node's own error event has. The client gets one of ours, or a continuation."""

    def error_body(self, error: GatewayError, x_request_id: str) -> bytes:
        """The error as this API's official client expects it; `tag` is the request's id."""
        return msgspec.json.encode({"error": openai_error(error)})

    def error_event(self, error: GatewayError, x_request_id: str) -> bytes:
        """The same as an event of a stream that has begun."""
        return b"data: " + self.error_body(error, x_request_id) + b"\n\n"

    def heartbeat(self) -> bytes:
        """Bytes that mean nothing, between events."""
        return sse.HEARTBEAT

    def classify_event(self, event: bytes) -> StreamEventKind:
        """What one event is. Raises: Garbage, when it is none of this API's."""
        data = sse.payload(event)
        if not data:
            return StreamEventKind.NO_CONTENT
        if sse.event_name(event) == b"error":
            return StreamEventKind.ERROR
        if data == b"[DONE]":
            return StreamEventKind.CONTENT
        if data == b"null":
            # llama.cpp begins a stream of several prompts with it.
            return StreamEventKind.NO_CONTENT
        try:
            value = json_values.parse_json(data)
        except json_values.InvalidJson:
            raise InvalidResponse("An event of the node's stream is not JSON") from None
        if not isinstance(value, dict):
            raise InvalidResponse("An event of the node's stream is not a JSON object")
        if value.get("error"):
            return StreamEventKind.ERROR
        if "prompt_progress" in value:
            return StreamEventKind.NO_CONTENT
        return StreamEventKind.CONTENT if self.has_content(value) else StreamEventKind.NO_CONTENT

    def has_content(self, value: dict[str, Any]) -> bool:
        """Whether an event's data has anything that the reader would miss."""
        raise NotImplementedError

    def is_stream_complete(self, tail: bytes) -> bool:
        """Whether a stream that ends with these bytes has come to its end."""
        return _DONE.search((b"\n" + tail)[-64:]) is not None

    def is_terminal_event(self, event: bytes) -> bool:
        """Whether this event with the `end_mark` is the last of a stream."""
        return sse.payload(event) == b"[DONE]"

    def ends_with_error(self, tail: bytes) -> bool:
        """Whether the last event of `tail` is the node's own error event."""
        events = [event for event in sse.split(tail) if sse.payload(event)]
        if not events:
            return False
        data = sse.payload(events[-1])
        return data.startswith(b'{"error":') or sse.event_name(events[-1]) == b"error"


def openai_error(error: GatewayError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
        **error.details,
    }


class AssemblyError(Exception):
    """The events don't make a whole answer. Its text never holds any of theirs."""


def read_events(stream: bytes) -> Iterator[JsonObject]:
    """The objects in the data of whole events, in order; the end's `[DONE]` is none.

    Raises: NotAssembled, for data that is no object, and for the node's own error event.
    """
    for event in sse.split(stream):
        data = sse.payload(event)
        if not data or data == b"[DONE]":
            continue
        try:
            value = parse_object(data)
        except InvalidJson:
            raise AssemblyError("an event of the node's stream is no JSON object") from None
        if value.get("error"):
            raise AssemblyError("the node's stream ended with an error")
        yield value
