"""OpenAI's responses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from gateway.errors import GatewayError
from gateway.proxy import sse
from gateway.proxy.api.base import Api, AssemblyError, openai_error
from gateway.proxy.json_values import JsonObject

_NO_CONTENT_TYPES = frozenset(
    {
        "response.created",
        "response.in_progress",
        "response.queued",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_summary_part.added",
    }
)

_TERMINAL_TYPES = ("response.completed", "response.incomplete", "response.failed")

_TERMINAL_NAMES = tuple(name.encode() for name in _TERMINAL_TYPES)


class ResponsesApi(Api):
    """`/v1/responses`: named events, from `response.created` to `response.completed`.

    Its streams can't be resumed: llama.cpp continues no message of this API.
    """

    name = "responses"
    prompt_field = "input"
    max_tokens_field = "max_output_tokens"
    terminal_mark = b"event: response.completed"
    ordinary_events = staticmethod(
        sse.ordinary_events(
            line=rb"event: (?!error\n|response\.(?:completed|incomplete|failed)\n).*\n",
            after_brace=rb'(?!"error":)',
        )
    )
    progress_fields: ClassVar[JsonObject] = {"return_progress": True}
    progress_replaces_event = True
    streaming_fields: ClassVar[JsonObject] = {"stream": True}

    def error_event(self, error: GatewayError, x_request_id: str) -> bytes:
        """The API's own error event, with the `error` object that official clients raise on."""
        event = {
            "type": "error",
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "sequence_number": 0,
            "error": openai_error(error),
        }
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"

    def has_content(self, value: JsonObject) -> bool:
        return value.get("type") not in _NO_CONTENT_TYPES

    def is_terminal_event(self, event: bytes) -> bool:
        return sse.event_name(event) in _TERMINAL_NAMES

    def is_stream_complete(self, tail: bytes) -> bool:
        name = b""
        for event in sse.split(tail):
            name = sse.event_name(event) or name
        return name in _TERMINAL_NAMES

    def assemble(self, events: Iterable[JsonObject], request_fields: JsonObject) -> JsonObject:
        """The response that the terminal event holds whole. Raises: AssemblyError."""
        for event in events:
            if event.get("type") in _TERMINAL_TYPES:
                response = event.get("response")
                if isinstance(response, dict):
                    return _as_plain(response)
        raise AssemblyError("the node's stream has no end")


def _as_plain(response: JsonObject) -> JsonObject:
    """Add the fields that llama.cpp leaves out at a stream's end."""
    whole = {"completed_at": response.get("created_at"), **response}
    if isinstance(output := whole.get("output"), list):
        whole["output"] = [
            {**item, "status": "completed"}
            if item.get("type") == "reasoning" and "status" not in item
            else item
            for item in output
        ]
    return whole


RESPONSES = ResponsesApi()
