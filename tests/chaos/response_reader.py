"""Parses responses as strictly as a client may, with none of the gateway's own code.

A valid stream has one start event, one text, and then either one end event or one error, in the
form of its API, and nothing after that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAMED = {"/v1/messages", "/v1/responses"}  # APIs whose events have names, and no `[DONE]`


class CorruptResponse(AssertionError):  # noqa: N818 - an assertion like others
    """A response that no client could parse."""


@dataclass(slots=True)
class ParsedResponse:
    text: str = ""
    ends: int = 0
    starts: int = 0
    numbers: int = 0  # events that were numbered (`/v1/responses`)
    finish_reasons: int = 0
    error: dict[str, Any] | None = None
    completion_tokens: int | None = None
    ids: set[str] = field(default_factory=set)
    last_event_complete: bool = True  # nothing follows it


def read_stream(path: str, data: bytes) -> ParsedResponse:
    """Parse a streamed response, or the part of it that has come. Raises: CorruptResponse."""
    read = ParsedResponse()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if len(data) - error.start > 3:
            raise CorruptResponse(f"no UTF-8 at byte {error.start} of {len(data)}") from None
        text = data[: error.start].decode()
    events, read.last_event_complete = _events(text.replace("\r\n", "\n"))
    for name, payload in events:
        if read.error is not None or (read.ends and payload != "[DONE]"):
            raise CorruptResponse(f"something follows the end: {payload[:80]!r}")
        if payload == "[DONE]":
            if path in NAMED:
                raise CorruptResponse("[DONE] in an API that has none")
            read.ends += 1
            continue
        try:
            value = json.loads(payload)
        except ValueError:
            raise CorruptResponse(f"an event is no JSON: {payload[:80]!r}") from None
        if isinstance(value, dict):
            _add_event(path, name, value, read)
        elif value is not None:
            raise CorruptResponse(f"an event is no object: {payload[:80]!r}")
    for what, count in (("ends", read.ends), ("beginnings", read.starts), ("ids", len(read.ids))):
        if count > 1:
            raise CorruptResponse(f"{count} {what}")
    if read.ends and read.finish_reasons != 1:
        raise CorruptResponse(f"{read.finish_reasons} reasons to end")
    return read


def _events(text: str) -> tuple[list[tuple[str, str]], bool]:
    """Name and data of each event; whether nothing is left over."""
    found = []
    name, data = "", list[str]()
    *lines, rest = text.split("\n")
    for line in lines:
        if not line:
            if data:
                found.append((name, "\n".join(data)))
            name, data = "", []
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif line.startswith("event:"):
            name = line[6:].strip()
    return found, not (rest or data or name)


def _add_event(path: str, name: str, value: dict[str, Any], read: ParsedResponse) -> None:
    if value.get("error") or name == "error":
        if path in NAMED and (name != "error" or value.get("type") != "error"):
            raise CorruptResponse(f"an error in another API's form: {value}")
        read.error = error_of(value)
    elif path in {CHAT, COMPLETIONS}:
        read.ids.add(value["id"])
        for choice in value.get("choices", ()):
            delta = choice["delta"] if path == CHAT else {"content": choice["text"]}
            read.starts += "role" in delta
            read.text += delta.get("content") or ""
            read.finish_reasons += choice.get("finish_reason") is not None
        if value.get("usage"):
            read.completion_tokens = value["usage"]["completion_tokens"]
    elif path == "/v1/messages":
        _add_messages_event(name, value, read)
    elif path == "/v1/responses":
        _add_responses_event(name, value, read)
    else:
        read.text += value.get("content", "")
        if value.get("stop") is True:
            read.ends += 1
            read.finish_reasons += 1
            read.completion_tokens = value.get("tokens_predicted")


def _add_messages_event(name: str, value: dict[str, Any], read: ParsedResponse) -> None:
    if name != value["type"]:
        raise CorruptResponse(f"an event {name!r} of type {value['type']!r}")
    match name:
        case "message_start":
            read.starts += 1
            read.ids.add(value["message"]["id"])
        case "content_block_delta":
            read.text += value["delta"].get("text", "")
        case "message_delta":
            read.finish_reasons += 1
            read.completion_tokens = value.get("usage", {}).get("output_tokens")
        case "message_stop":
            read.ends += 1


def _add_responses_event(name: str, value: dict[str, Any], read: ParsedResponse) -> None:
    if "sequence_number" in value:
        if value["sequence_number"] != read.numbers:
            raise CorruptResponse(f"event {read.numbers} has number {value['sequence_number']}")
        read.numbers += 1
    match name:
        case "response.created":
            read.starts += 1
            read.ids.add(value["response"]["id"])
        case "response.output_text.delta":
            read.text += value["delta"]
        case "response.completed" | "response.incomplete":
            read.ends += 1
            read.finish_reasons += 1
            read.completion_tokens = value["response"].get("usage", {}).get("output_tokens")
            if _output_text(value["response"]) != read.text:
                raise CorruptResponse("the final response differs from the streamed text")


def _output_text(response: dict[str, Any]) -> str:
    parts = (part for item in response["output"] for part in item.get("content", ()))
    return "".join(part.get("text", "") for part in parts)


def read_plain(path: str, data: bytes) -> ParsedResponse:
    try:
        value = json.loads(data)
    except ValueError:
        raise CorruptResponse(f"a plain response is no JSON: {data[:80]!r}") from None
    read = ParsedResponse(ends=1, finish_reasons=1)
    if path in NAMED:
        content = {"output": [value]} if path == "/v1/messages" else value
        read.text = _output_text(content)
        read.completion_tokens = value["usage"]["output_tokens"]
    elif path in {CHAT, COMPLETIONS}:
        choice = value["choices"][0]
        read.text = choice["message"]["content"] if path == CHAT else choice["text"]
        read.completion_tokens = value["usage"]["completion_tokens"]
    else:
        read.text, read.completion_tokens = value["content"], value["tokens_predicted"]
    return read


def error_of(value: dict[str, Any]) -> dict[str, Any]:
    error = value.get("error")
    if not isinstance(error, dict) or not error.get("message") or not error.get("type"):
        raise CorruptResponse(f"an error without message or type: {value}")
    return error
