"""Anthropic's messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.errors import GatewayError
from gateway.proxy import sse
from gateway.proxy.api.base import Api, AssemblyError
from gateway.proxy.json_values import InvalidJson, JsonObject, parse_json

_ERROR_TYPES = {
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

_NO_CONTENT_TYPES = frozenset({"message_start", "content_block_start", "ping"})


class MessagesApi(Api):
    """`/v1/messages`: named events, from `message_start` to `message_stop`."""

    name = "messages"
    heartbeat_is_event = True
    terminal_mark = b"event: message_stop"
    error_mark = b"event: error\n"
    ordinary_events = staticmethod(
        sse.ordinary_events(line=rb"event: (?!error\n|message_stop).*\n")
    )

    def error_body(self, error: GatewayError, x_request_id: str) -> bytes:
        kind = _ERROR_TYPES.get(error.status)
        if kind is None:
            kind = "invalid_request_error" if error.status < 500 else "api_error"
        fields = {"type": kind, "message": error.message}
        return msgspec.json.encode({"type": "error", "error": fields, "request_id": x_request_id})

    def error_event(self, error: GatewayError, x_request_id: str) -> bytes:
        return b"event: error\ndata: " + self.error_body(error, x_request_id) + b"\n\n"

    def heartbeat(self) -> bytes:
        return b'event: ping\ndata: {"type": "ping"}\n\n'

    def has_content(self, value: dict[str, Any]) -> bool:
        return value.get("type") not in _NO_CONTENT_TYPES

    def is_terminal_event(self, event: bytes) -> bool:
        return sse.event_name(event) == b"message_stop"

    def is_stream_complete(self, tail: bytes) -> bool:
        return b"\nevent: message_stop" in (b"\n" + tail)[-128:]


MESSAGES = MessagesApi()

_DELTA_FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
"""Deltas that add to a field of their block."""


def assemble_message(events: Iterable[JsonObject], _: JsonObject) -> JsonObject:
    """The message that these events make. Raises: NotAssembled."""
    message: JsonObject | None = None
    blocks: dict[int, JsonObject] = {}
    inputs: dict[int, str] = {}
    stopped = False
    for event in events:
        match event.get("type"):
            case "message_start":
                message = dict(event.get("message") or {})
            case "content_block_start":
                blocks[event.get("index", 0)] = dict(event.get("content_block") or {})
            case "content_block_delta":
                _add_delta(blocks, inputs, event.get("index", 0), event.get("delta") or {})
            case "message_delta" if message is not None:
                message |= event.get("delta") or {}
                message["usage"] = (message.get("usage") or {}) | (event.get("usage") or {})
            case "message_stop":
                stopped = True
    if message is None or not stopped:
        raise AssemblyError("the node's stream has no message or no end")
    for index, text in inputs.items():
        blocks[index]["input"] = _tool_input(text)
    message["content"] = [blocks[index] for index in sorted(blocks)]
    return message


def _add_delta(
    blocks: dict[int, JsonObject], inputs: dict[int, str], index: int, delta: JsonObject
) -> None:
    block = blocks.setdefault(index, {})
    kind = delta.get("type")
    if kind == "input_json_delta":
        inputs[index] = inputs.get(index, "") + (delta.get("partial_json") or "")
    elif kind in _DELTA_FIELDS:
        name = _DELTA_FIELDS[kind]
        block[name] = (block.get(name) or "") + (delta.get(name) or "")


def _tool_input(text: str) -> object:
    """A tool's arguments, which llama.cpp reads as JSON and leaves empty where they are none."""
    try:
        return parse_json(text.encode()) if text else {}
    except InvalidJson:
        return {}
