"""Reads a reply as strictly as a client may, with none of the gateway's own code.

A stream holds one beginning, one text, and then either one end or one error, in its dialect's
form, and nothing after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


class Corrupt(AssertionError):  # noqa: N818 - an assertion like others
    """A reply that no client could make sense of."""


@dataclass(slots=True)
class Read:
    """What a reply says."""

    text: str = ""
    ends: int = 0
    beginnings: int = 0
    finishes: int = 0
    """Reasons for which the answer ended."""
    error: dict[str, Any] | None = None
    completion_tokens: int | None = None
    ids: set[str] = field(default_factory=set)
    whole_events: bool = True
    """Whether the last event is complete."""


def read_stream(path: str, data: bytes) -> Read:
    """A streamed reply, or as much of it as has come. Raises: Corrupt."""
    read = Read()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if len(data) - error.start > 3:
            raise Corrupt(f"no UTF-8 at byte {error.start} of {len(data)}") from None
        text = data[: error.start].decode()
    events, read.whole_events = _events(text.replace("\r\n", "\n"))
    for name, payload in events:
        if read.error is not None or (read.ends and payload != "[DONE]"):
            raise Corrupt(f"something follows the end: {payload[:80]!r}")
        if payload == "[DONE]":
            if path in {"/v1/messages", "/v1/responses"}:
                raise Corrupt("[DONE] where the dialect has none")
            read.ends += 1
            continue
        try:
            value = json.loads(payload)
        except ValueError:
            raise Corrupt(f"an event is no JSON: {payload[:80]!r}") from None
        if value is None:
            continue
        if not isinstance(value, dict):
            raise Corrupt(f"an event is no object: {payload[:80]!r}")
        _note(path, name, value, read)
    counts = {"ends": read.ends, "beginnings": read.beginnings, "ids": len(read.ids)}
    for what, count in counts.items():
        if count > 1:
            raise Corrupt(f"{count} {what}")
    if read.ends and read.finishes != 1:
        raise Corrupt(f"{read.finishes} reasons to end")
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


def _note(path: str, name: str, value: dict[str, Any], read: Read) -> None:
    if value.get("error") or name == "error":
        named = path in {"/v1/messages", "/v1/responses"}
        if named and (name != "error" or value.get("type") != "error"):
            raise Corrupt(f"an error in no form of this dialect: {value}")
        read.error = error_of(value)
        return
    match path:
        case "/v1/chat/completions":
            _openai(value, read)
            for choice in value.get("choices", ()):
                read.beginnings += "role" in choice["delta"]
                read.text += choice["delta"].get("content") or ""
        case "/v1/completions":
            _openai(value, read)
            for choice in value.get("choices", ()):
                read.text += choice["text"]
        case "/v1/messages":
            _anthropic(name, value, read)
        case "/v1/responses":
            _responses(name, value, read)
        case _:
            read.text += value.get("content", "")
            if value.get("stop") is True:
                read.ends += 1
                read.finishes += 1
                read.completion_tokens = value.get("tokens_predicted")


def _openai(value: dict[str, Any], read: Read) -> None:
    read.ids.add(value["id"])
    for choice in value.get("choices", ()):
        read.finishes += choice.get("finish_reason") is not None
    if value.get("usage"):
        read.completion_tokens = value["usage"]["completion_tokens"]


def _anthropic(name: str, value: dict[str, Any], read: Read) -> None:
    if name != value["type"]:
        raise Corrupt(f"an event {name!r} of type {value['type']!r}")
    match name:
        case "message_start":
            read.beginnings += 1
            read.ids.add(value["message"]["id"])
        case "content_block_delta":
            read.text += value["delta"].get("text", "")
        case "message_delta":
            read.finishes += 1
            read.completion_tokens = value.get("usage", {}).get("output_tokens")
        case "message_stop":
            read.ends += 1


def _responses(name: str, value: dict[str, Any], read: Read) -> None:
    match name:
        case "response.created":
            read.beginnings += 1
            read.ids.add(value["response"]["id"])
        case "response.output_text.delta":
            read.text += value["delta"]
        case "response.completed":
            read.ends += 1
            read.finishes += 1
            read.completion_tokens = value["response"].get("usage", {}).get("output_tokens")
            whole = "".join(_output(value["response"]))
            if whole != read.text:
                raise Corrupt("the whole answer at the end is not what was streamed")


def _output(response: dict[str, Any]) -> Iterator[str]:
    for item in response["output"]:
        for part in item.get("content", ()):
            yield part.get("text", "")


def read_plain(path: str, data: bytes) -> Read:
    """A plain answer. Raises: Corrupt."""
    try:
        value = json.loads(data)
    except ValueError:
        raise Corrupt(f"a plain answer is no JSON: {data[:80]!r}") from None
    read = Read(ends=1, finishes=1)
    match path:
        case "/v1/chat/completions":
            read.text = value["choices"][0]["message"]["content"]
            read.completion_tokens = value["usage"]["completion_tokens"]
        case "/v1/completions":
            read.text = value["choices"][0]["text"]
            read.completion_tokens = value["usage"]["completion_tokens"]
        case "/v1/messages":
            read.text = "".join(part.get("text", "") for part in value["content"])
            read.completion_tokens = value["usage"]["output_tokens"]
        case "/v1/responses":
            read.text = "".join(_output(value))
            read.completion_tokens = value["usage"]["output_tokens"]
        case _:
            read.text = value["content"]
            read.completion_tokens = value["tokens_predicted"]
    return read


def read_vector(data: bytes) -> tuple[float, ...]:
    """The first embedding of an answer."""
    return tuple(json.loads(data)["data"][0]["embedding"])


def error_of(value: dict[str, Any]) -> dict[str, Any]:
    """The error's own object. Raises: Corrupt."""
    error = value.get("error")
    if not isinstance(error, dict) or not error.get("message") or not error.get("type"):
        raise Corrupt(f"an error that says nothing: {value}")
    return error
