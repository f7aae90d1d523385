"""Anthropic's messages, asked of nodes as a chat: the repair of `output_config.format`.

llama.cpp b11549 makes a chat of each message's body, of a fixed list of fields: no field that binds
the output to a schema is among them. So the gateway makes the chat itself, like the server does,
with a `response_format`, and makes a message of what comes back.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import msgspec

from gateway import errors
from gateway.errors import GatewayError
from gateway.proxy import sse
from gateway.proxy.api.base import ResponseRewriter
from gateway.proxy.api.resuming import as_count, is_number, named_event
from gateway.proxy.json_values import (
    ITEMS_DECODER,
    JSON_ERRORS,
    MOST_PARSED_BYTES,
    CutBody,
    FieldPieces,
    InvalidJson,
    JsonObject,
    PartCounter,
    parse_json,
    parse_object,
)
from gateway.transport.errors import InvalidResponse

SAME_FIELDS = (
    "model", "stream", "temperature", "top_p", "top_k", "chat_template_kwargs", "priority",
)  # fmt: skip
"""Fields that mean the same in a chat; the others of messages are converted, or unknown to it."""

DEFAULT_MAX_TOKENS = 4096
"""llama.cpp's, for a body without `max_tokens`."""

DEFAULT_THINKING_TOKENS = 10_000
"""llama.cpp's, for `thinking` without `budget_tokens`."""

_BILLING_LINE, _STAMP = "x-anthropic-billing-header:", "cch="


def chat_request(
    fields: Mapping[str, msgspec.Raw], response_format: JsonObject, texts: CutBody
) -> Generator[None, None, bytes]:
    """The body of a chat for a message's body of these fields, in short steps.

    `texts`: the body, whose long strings are cut out of `fields`. Raises: GatewayError 400.
    """
    chat: dict[str, Any] = {name: fields[name] for name in SAME_FIELDS if name in fields}
    messages: list[bytes] = []
    """Each followed by a comma."""
    parts = PartCounter()
    try:
        if (system := _value(fields, "system")) is not None:
            messages.append(_encoded({"role": "system", "content": _system_text(system)}))
        items = ITEMS_DECODER.decode(fields.get("messages", b""))
        parts.add_messages(len(items))
        for number, item in enumerate(items):
            message = parse_json(bytes(item))
            parts.add_parts(_block_count(message), f"messages[{number}].content")
            made = [_encoded(one) for one in _chat_messages(message, texts)]
            messages += made
            if parts.ends_step(sum(map(len, made))):
                yield
        thinking, stream = _value(fields, "thinking"), _value(fields, "stream")
    except (InvalidJson, *JSON_ERRORS):
        raise errors.invalid_request("'messages' must be a list of messages.", "messages") from None
    chat["max_tokens"] = fields.get("max_tokens", DEFAULT_MAX_TOKENS)
    if "stop_sequences" in fields:
        chat["stop"] = fields["stop_sequences"]
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        budget = thinking.get("budget_tokens")
        chat["thinking_budget_tokens"] = budget if is_number(budget) else DEFAULT_THINKING_TOKENS
    if stream is True:
        chat["stream_options"] = {"include_usage": True}
    chat |= response_format
    pieces: FieldPieces = {name: msgspec.json.encode(value) for name, value in chat.items()}
    pieces["messages"] = [b"[", *messages[:-1], *(last[:-1] for last in messages[-1:]), b"]"]
    whole = yield from texts.join(pieces)
    return whole


def _encoded(message: Any) -> bytes:
    return msgspec.json.encode(message) + b","


def _block_count(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    return len(content) if isinstance(content, list) else 0


def _value(fields: Mapping[str, msgspec.Raw], name: str) -> Any:
    return parse_json(bytes(fields[name])) if name in fields else None


def _system_text(system: object) -> str:
    """The system prompt as one text."""
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    if not isinstance(blocks, list):
        return ""
    return "".join(
        _without_stamp(_text(block, "text"))
        for block in blocks
        if isinstance(block, dict) and block.get("type") == "text"
    )


def _without_stamp(text: str) -> str:
    """The text without Claude Code's stamp, which changes with each request.

    The prompt would never be cached. llama.cpp does the same.
    """
    at = text.find(_STAMP, len(_BILLING_LINE)) + len(_STAMP)
    if (
        not text.startswith(_BILLING_LINE)
        or at < len(_BILLING_LINE)
        or text[at + 5 : at + 6] != ";"
    ):
        return text
    return f"{text[:at]}fffff{text[at + 5 :]}"


def _text(block: Any, name: str) -> str:
    value = block.get(name)
    return value if isinstance(value, str) else ""


def _chat_messages(message: Any, texts: CutBody) -> list[Any]:
    """The chat's messages for one of Anthropic's: its own, and one for each tool's result.

    Raises: GatewayError 400, for arguments of a tool that are too large.
    """
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return [message]  # a plain text is the same; the node refuses all else
    parts: list[JsonObject] = []
    calls: list[JsonObject] = []
    results: list[JsonObject] = []
    reasoning = ""
    arguments_size = 0
    for block in message["content"]:
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                parts.append(block)
            case "thinking":
                reasoning += _text(block, "thinking")
            case "image":
                parts += _image_parts(block)
            case "tool_use":
                # As a text in a text, its long strings have other escapes.
                arguments = msgspec.Raw(msgspec.json.encode(block.get("input") or {}))
                text = texts.restored(arguments, "messages").decode()
                arguments_size += len(text)
                if arguments_size > MOST_PARSED_BYTES:
                    raise _too_large_arguments()
                function = {"name": _text(block, "name"), "arguments": text}
                calls.append({"id": _text(block, "id"), "type": "function", "function": function})
            case "tool_result":
                result = {"role": "tool", "tool_call_id": _text(block, "tool_use_id")}
                results.append(result | {"content": _result_content(block.get("content"))})
    if not (parts or calls or reasoning):
        return results
    chat = {"role": message.get("role"), "content": parts or ""}
    if calls:
        chat["tool_calls"] = calls
    if reasoning:
        chat["reasoning_content"] = reasoning
    return [chat, *results]


def _too_large_arguments() -> GatewayError:
    message = f"A message's 'tool_use' blocks have more than {MOST_PARSED_BYTES} characters."
    return errors.invalid_request(message, "messages")


def _image_parts(block: JsonObject) -> list[JsonObject]:
    """The image as a chat's part; none, if there is no source."""
    source = block.get("source")
    match source.get("type") if isinstance(source, dict) else None:
        case "base64":
            kind = _text(source, "media_type") or "image/jpeg"
            url = f"data:{kind};base64,{_text(source, 'data')}"
        case "url":
            url = _text(source, "url")
        case _:
            return []
    return [{"type": "image_url", "image_url": {"url": url}}]


def _result_content(content: object) -> str | list[JsonObject]:
    """A tool's result: one text, unless it holds images."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts: list[JsonObject] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            parts.append({"type": "text", "text": _text(block, "text")})
        elif kind == "image":
            parts += _image_parts(block)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
"""Reasons by the chat's; all others are the end of the turn."""

_SAME_ERROR_TYPES = frozenset({"invalid_request_error", "authentication_error", "rate_limit_error"})

_ERROR_TYPES = {
    "node_timeout": "timeout_error",
    "request_too_large": "request_too_large",
    **dict.fromkeys(("queue_timeout", "no_node", "starting", "shutting_down"), "overloaded_error"),
}
"""Types by the codes of the gateway's errors that may end a stream."""


class ChatToMessage(ResponseRewriter):
    """Makes a message of a chat's response. It keeps numbers and ids, and none of the text."""

    __slots__ = ("_block", "_index", "_stop_reason", "_usage")

    def __init__(self) -> None:
        self._block = ""
        """The type of the open block; empty: none is open."""
        self._index = -1
        """The number of the newest block; -1: the message has not begun."""
        self._stop_reason = "end_turn"
        self._usage: JsonObject = {"output_tokens": 0}

    def rewrite_events(self, events: bytes) -> bytes:
        """The message's events for these of the chat. Raises: InvalidResponse."""
        return b"".join(map(self._rewrite_event, sse.split(events)))

    def rewrite_body(self, content: bytes) -> bytes:
        """The message for a plain chat's response. Raises: InvalidResponse."""
        try:
            response = parse_object(content)
            choice = response["choices"][0]
            message = choice["message"]
            blocks = []
            if thinking := message.get("reasoning_content"):
                blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
            if text := message.get("content"):
                blocks.append({"type": "text", "text": text})
            stop_reason = _STOP_REASONS.get(str(choice.get("finish_reason")), "end_turn")
            usage = _usage(response.get("usage"))
        except (InvalidJson, KeyError, IndexError, TypeError, AttributeError):
            raise InvalidResponse("The node's answer is no chat's") from None
        return msgspec.json.encode(
            _message(response, stop_reason) | {"content": blocks, "usage": usage}
        )

    def _rewrite_event(self, event: bytes) -> bytes:
        data = sse.payload(event)
        if not data:
            return event
        if data == b"[DONE]":
            return self._end()
        try:
            value = parse_object(data)
            if error := value.get("error"):
                return _error_event(error)
            begin = b"" if self._index >= 0 else self._begin(value)
            if usage := value.get("usage"):
                self._usage = _usage(usage)
            return begin + b"".join(map(self._choice_events, value.get("choices") or ()))
        except (InvalidJson, TypeError, AttributeError):
            raise InvalidResponse("An event of the node's stream can't be read") from None

    def _begin(self, chunk: JsonObject) -> bytes:
        self._index = 0
        usage = {"cache_read_input_tokens": 0, "input_tokens": 0, "output_tokens": 0}
        message = _message(chunk, None) | {"content": [], "usage": usage}
        return named_event({"type": "message_start", "message": message})

    def _choice_events(self, choice: JsonObject) -> bytes:
        delta = choice.get("delta") or {}
        if reason := choice.get("finish_reason"):
            self._stop_reason = _STOP_REASONS.get(str(reason), "end_turn")
        thinking = self._text_events("thinking", delta.get("reasoning_content"))
        return thinking + self._text_events("text", delta.get("content"))

    def _text_events(self, kind: str, text: object) -> bytes:
        """A delta of the block of this type, which is begun if another one is open."""
        if not isinstance(text, str) or not text:
            return b""
        begin = b""
        if self._block != kind:
            begin = self._stop_block()
            self._block = kind
            block = {"type": kind, kind: ""}
            fields = {"index": self._index, "content_block": block}
            begin += named_event({"type": "content_block_start", **fields})
        return begin + self._delta(kind, text)

    def _delta(self, kind: str, text: str) -> bytes:
        delta = {"type": f"{kind}_delta", kind: text}
        fields = {"index": self._index, "delta": delta}
        return named_event({"type": "content_block_delta", **fields})

    def _stop_block(self) -> bytes:
        """The end of the open block, if there is one."""
        if not self._block:
            return b""
        end = self._delta("signature", "") if self._block == "thinking" else b""
        end += named_event({"type": "content_block_stop", "index": self._index})
        self._block, self._index = "", self._index + 1
        return end

    def _end(self) -> bytes:
        """The end of the message, told by the chat's `[DONE]`."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": None}
        last = {"type": "message_delta", "delta": delta, "usage": self._usage}
        return self._stop_block() + named_event(last) + named_event({"type": "message_stop"})


def _message(chat: JsonObject, stop_reason: str | None) -> JsonObject:
    """The message's fields besides its content and usage."""
    return {
        "id": chat.get("id"),
        "type": "message",
        "role": "assistant",
        "model": chat.get("model"),
        "stop_reason": stop_reason,
        "stop_sequence": None,
    }


def _usage(reported: Any) -> JsonObject:
    """A message's `usage`, whose `input_tokens` exclude the cached ones."""
    reported = reported or {}
    details = reported.get("prompt_tokens_details") or {}
    cached = as_count(details.get("cached_tokens"))
    return {
        "cache_read_input_tokens": cached,
        "input_tokens": max(0, as_count(reported.get("prompt_tokens")) - cached),
        "output_tokens": as_count(reported.get("completion_tokens")),
    }


def _error_event(error: Any) -> bytes:
    """The error that ends a chat's stream, in Anthropic's form."""
    kind = _ERROR_TYPES.get(str(error.get("code")))
    if kind is None:
        kind = error.get("type") if error.get("type") in _SAME_ERROR_TYPES else "api_error"
    message = {"type": kind, "message": str(error.get("message"))}
    return named_event({"type": "error", "error": message})
