"""Plain answers of Anthropic's messages."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.relay.assembly.events import NotAssembled
from gateway.relay.values import NoJson, Value, any_of

_ADDED = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
"""Deltas that add to a field of their block."""


def answer(events: Iterable[Value], _: Value) -> Value:
    """The message that these events make. Raises: NotAssembled."""
    message: Value | None = None
    blocks: dict[int, Value] = {}
    inputs: dict[int, str] = {}
    stopped = False
    for event in events:
        match event.get("type"):
            case "message_start":
                message = dict(event.get("message") or {})
            case "content_block_start":
                blocks[event.get("index", 0)] = dict(event.get("content_block") or {})
            case "content_block_delta":
                _add(blocks, inputs, event.get("index", 0), event.get("delta") or {})
            case "message_delta" if message is not None:
                message |= event.get("delta") or {}
                message["usage"] = (message.get("usage") or {}) | (event.get("usage") or {})
            case "message_stop":
                stopped = True
    if message is None or not stopped:
        raise NotAssembled("the node's stream has no message or no end")
    for index, text in inputs.items():
        blocks[index]["input"] = _input(text)
    message["content"] = [blocks[index] for index in sorted(blocks)]
    return message


def _add(blocks: dict[int, Value], inputs: dict[int, str], index: int, delta: Value) -> None:
    block = blocks.setdefault(index, {})
    kind = delta.get("type")
    if kind == "input_json_delta":
        inputs[index] = inputs.get(index, "") + (delta.get("partial_json") or "")
    elif kind in _ADDED:
        name = _ADDED[kind]
        block[name] = (block.get(name) or "") + (delta.get(name) or "")


def _input(text: str) -> object:
    """A tool's arguments, which llama.cpp reads as JSON and leaves empty where they are none."""
    try:
        return any_of(text.encode()) if text else {}
    except NoJson:
        return {}
