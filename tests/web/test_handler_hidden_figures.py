"""No path tells a caller what was cached of its prompt, where the settings hide it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.callers.keys import new_key
from gateway.config.settings import Settings
from gateway.request.routes import routes_of
from tests.gateways import Running, running_gateway
from tests.transport.raw import Peer, raw_server

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROUTES = routes_of(Settings(ollama=True))
HIDDEN, SEEN = new_key("hidden"), new_key("seen")
TEXT = "What is the code? " * 40
BODIES: dict[str, dict[str, Any]] = {
    "messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 3},
    "prompt": {"prompt": TEXT},
    "input": {"input": TEXT},
    "documents": {"query": "x", "documents": [TEXT]},
    "input_prefix": {"input_prefix": TEXT, "input_suffix": ""},
    "tokens": {"tokens": [1, 2]},
}
OLLAMA: dict[str, dict[str, Any]] = {
    "/api/chat": BODIES["messages"], "/api/generate": BODIES["prompt"],
    "/api/embed": BODIES["input"], "/api/embeddings": BODIES["prompt"],
}  # fmt: skip
FORM: dict[str, Any] = {"file": ("sound.wav", b"RIFF"), "model": (None, "demo")}


@asynccontextmanager
async def a_site(folder: Path) -> AsyncIterator[Running]:
    keys = [
        {"id": HIDDEN.id, "sha256": HIDDEN.sha256, "group": "tenants"},
        {"id": SEEN.id, "sha256": SEEN.sha256, "cache": {"hide": False}, "group": "tenants"},
    ]
    groups = {"tenants": {"cache": {"hide": True}}}
    settings = {"keys": keys, "groups": groups, "ollama": True, "heartbeat": 0.01}
    endpoints = ["chat", "embeddings", "rerank", "infill", "audio", "vision"]
    async with raw_server(serve_telling) as server:
        node = {"name": "a", "url": f"http://127.0.0.1:{server.port}", "endpoints": endpoints}
        async with running_gateway(folder, [node], settings) as running:
            yield running


async def ask(site: Running, path: str, key: str, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", "x-gateway-progress": "1"}
    if ROUTES[path].multipart:
        reply = await site.client.post(path, files=FORM, headers=headers)
    else:
        body = OLLAMA.get(path) or BODIES.get(ROUTES[path].prompt_field or "", {"content": TEXT})
        sent = {"model": "demo", "stream": False, **body, **more}
        reply = await site.client.post(path, json=sent, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply


def told(reply: httpx.Response) -> list[str]:
    whole = f"{reply.text} {reply.headers}"
    return [text for text in TELLING if text in whole]


def asked_of(path: str) -> list[dict[str, Any]]:
    """What is asked for beside the prompt, one request each."""
    found: list[dict[str, Any]] = [{}]
    if ROUTES[path].generates:
        found += [{"stream": True}, {"stream": True, "return_progress": True}]
    if ROUTES[path].api.merger is not None:
        found += [{"prompt": [TEXT, TEXT]}, {"prompt": [TEXT, TEXT], "stream": True}]
    return found


ASKED = [(path, more) for path in ROUTES if ROUTES[path].takes_slot for more in asked_of(path)]


async def test_every_path_hides_what_was_cached_and_only_where_it_must(tmp_path: Path) -> None:
    async with a_site(tmp_path) as site:
        telling = set()
        for path, more in ASKED:
            hidden = await ask(site, path, HIDDEN.text, **more)
            assert told(hidden) == [], (path, more)
            seen = await ask(site, path, SEEN.text, **more)
            assert hidden.headers["content-type"] == seen.headers["content-type"]
            assert ("ok" in hidden.text) == ("ok" in seen.text)
            if ROUTES[path].generates and not more:
                assert str(ALL) in hidden.text, "the prompt's tokens are still told"
            if told(seen):
                telling.add(path)
        assert {path for path, _ in ASKED} - telling <= {"/api/embed", "/api/embeddings"}
        path = "/v1/embeddings"
        hidden, seen = await ask(site, path, HIDDEN.text), await ask(site, path, SEEN.text)
        own = set(seen.headers) - set(hidden.headers)
        assert own == {"openai-processing-ms", "anthropic-ratelimit-input-tokens-remaining"}
        for path, route in ROUTES.items():
            if not route.takes_slot:
                assert (await ask(site, path, HIDDEN.text)).json() == plain(path, {})


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
