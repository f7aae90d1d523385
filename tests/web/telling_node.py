"""A llama.cpp server that tells in every response, and in every way, what was cached."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.transport.raw import Peer

CACHED, FRESH, ALL = 91_234_567, 2_111_111, 93_345_678
"""Tokens; `ALL` are both, and tell nothing."""
MILLISECONDS = 7788.125
TELLING = ("91234567", "2111111", "7788", "tokens_cached", "cache_n", "prompt_progress", "id_slot")
"""Texts that no response to a caller from whom it is hidden may contain."""

TIMINGS: dict[str, Any] = {
    "cache_n": CACHED, "prompt_n": FRESH, "prompt_ms": MILLISECONDS, "predicted_n": 1,
    "prompt_per_token_ms": MILLISECONDS, "prompt_per_second": MILLISECONDS, "predicted_ms": 2.0,
    "predicted_per_second": 500.0,
}  # fmt: skip
OPENAI_USAGE: dict[str, Any] = {
    "prompt_tokens": ALL, "completion_tokens": 1, "total_tokens": ALL + 1,
    "prompt_tokens_details": {"cached_tokens": CACHED, "audio_tokens": 0},
    "prompt_cache_hit_tokens": CACHED, "prompt_time": MILLISECONDS,
}  # fmt: skip
RESPONSES_USAGE: dict[str, Any] = {
    "input_tokens": ALL, "output_tokens": 1, "total_tokens": ALL + 1,
    "input_tokens_details": {"cached_tokens": CACHED},
}  # fmt: skip
ANTHROPIC_USAGE: dict[str, Any] = {
    "input_tokens": FRESH, "cache_read_input_tokens": CACHED, "output_tokens": 1,
    "cache_creation": {"ephemeral_5m_input_tokens": 0},
}  # fmt: skip
PROGRESS = {"total": ALL, "cache": CACHED, "processed": CACHED, "time_ms": MILLISECONDS}
MORE: dict[str, Any] = {
    "timings": TIMINGS, "id_slot": 5, "tokens_cached": CACHED, "prompt_progress": PROGRESS,
    "__verbose": {"timings": TIMINGS, "tokens_cached": CACHED, "id_slot": 5},
    "timings/cache_n": CACHED, "prompt_progress/processed": CACHED,
}  # fmt: skip
LATER = {name: value for name, value in MORE.items() if name != "prompt_progress"}
"""Behind the prompt."""
NATIVE_END: dict[str, Any] = {
    "index": 0, "content": "", "stop": True, "stop_type": "eos", "model": "demo",
    "tokens_predicted": 1, "tokens_evaluated": ALL, **MORE,
}  # fmt: skip
CHAT = {"id": "c", "created": 1, "model": "demo"}


def plain(path: str, body: dict[str, Any]) -> Any:
    """The whole response to a request for this path."""
    answer = {"role": "assistant", "content": "ok"}
    if path == "/v1/messages":
        block = {"type": "text", "text": "ok"}
        message = {"type": "message", "role": "assistant", "content": [block], "model": "demo"}
        return {**message, "id": "m", "stop_reason": "end_turn", "usage": ANTHROPIC_USAGE, **MORE}
    if path.endswith("/responses"):
        text = {"type": "output_text", "text": "ok", "annotations": []}
        item = {"type": "message", "role": "assistant", "content": [text], "status": "completed"}
        head = {"id": "r", "object": "response", "status": "completed", "model": "demo"}
        return {**head, "output": [item], "usage": RESPONSES_USAGE, **LATER}
    if path in {"/completion", "/infill"}:
        one = NATIVE_END | {"content": "ok"}
        return [one, one] if isinstance(body.get("prompt"), list) else one
    choice = {"index": 0, "finish_reason": "stop", "message": answer, "text": "ok"}
    return {
        **CHAT, "object": "chat.completion", "choices": [choice], "usage": OPENAI_USAGE, **MORE,
        "data": [{"index": 0, "embedding": [0.5]}], "embedding": [0.5], "tokens": [1, 2],
        "results": [{"index": 0, "relevance_score": 0.5}], "content": "ok", "prompt": "ok",
        "input_tokens": ALL, "text": "ok",
    }  # fmt: skip


def streamed(path: str) -> bytes:
    """The stream for this path."""
    events: list[dict[str, Any]]
    if path == "/v1/messages":
        start = {"id": "m", "type": "message", "role": "assistant", "content": []}
        text = {"type": "text_delta", "text": "ok"}
        events = [
            {"type": "message_start", "message": {**start, "usage": ANTHROPIC_USAGE}, **MORE},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
            {"type": "content_block_delta", "index": 0, "delta": text, **LATER},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {}, "usage": ANTHROPIC_USAGE, **MORE},
            {"type": "message_stop"},
        ]
        return b"".join(map(named, events))
    if path.endswith("/responses"):
        whole = plain(path, {})
        events = [
            {"type": "response.created", "response": {"id": "r", "usage": RESPONSES_USAGE}},
            {"type": "response.output_text.delta", "delta": "ok", "item_id": "i", **LATER},
            {"type": "response.completed", "response": whole, **LATER},
        ]
        return b"".join(map(named, events))
    if path in {"/completion", "/infill"}:
        part = {"index": 0, "content": "ok", "tokens": [7], "stop": False, **LATER}
        progress = {"index": 0, "content": "", "tokens": [], "stop": False, **MORE}
        return b"".join(map(unnamed, [progress, part, NATIVE_END]))
    head = {**CHAT, "object": "chat.completion.chunk"}
    delta = {"role": "assistant", "content": "ok"}
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant"}, "text": ""}], **MORE},
        {"choices": [{"index": 0, "delta": delta, "text": "ok"}], **LATER},
        {"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}], **LATER},
        {"choices": [], "usage": OPENAI_USAGE, "x_groq": {"usage": OPENAI_USAGE}, **LATER},
    ]
    return b"".join(unnamed({**head, **chunk}) for chunk in chunks) + b"data: [DONE]\n\n"


def unnamed(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def named(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\n".encode() + unnamed(event)


PROBES: dict[str, Any] = {
    "/health": {"status": "ok"},
    "/props": {"total_slots": 4, "default_generation_settings": {"n_ctx": 4096}},
    "/slots": [{"id": number, "is_processing": False} for number in range(4)],
    "/v1/models": {"object": "list", "data": [{"id": "demo"}]},
}

HEADERS = (
    f"openai-processing-ms: {MILLISECONDS}\r\nopenai-model: demo\r\n"
    f"anthropic-ratelimit-input-tokens-remaining: {FRESH}\r\n"
).encode()
"""Header lines that are forwarded; the model's tells nothing."""


async def serve_telling(peer: Peer) -> None:
    """Answer the requests of one connection."""
    while True:
        try:
            request = await peer.request()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        head, _, data = request.partition(b"\r\n\r\n")
        path = head.split(b" ")[1].decode()
        body = json.loads(data) if data.startswith(b"{") else {}
        kind, answer = b"application/json", b""
        if head.startswith(b"GET"):
            answer = json.dumps(PROBES.get(path, {})).encode()
        elif body.get("stream") is True:
            kind, answer = b"text/event-stream", streamed(path)
        else:
            answer = json.dumps(plain(path, body), separators=(",", ":")).encode()
        await peer.say(
            b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n%b"
            % (kind, len(answer), HEADERS, answer)
        )
