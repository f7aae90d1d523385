"""Plain requests to servers that are almost llama.cpp's, or of an older build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateways import running_gateway
from tests.transport.raw import Peer, Script, raw_server
from tests.virtual import in_virtual_time

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
CONTROL: dict[bytes, Any] = {
    b"/health": {"status": "ok"},
    b"/props": {"total_slots": 2, "default_generation_settings": {"n_ctx": 4096}},
    b"/slots": [{"id": n, "n_ctx": 4096, "is_processing": False} for n in (0, 1)],
    b"/v1/models": {"data": [{"id": "m"}]},
}
TIMINGS = {"cache_n": 4, "prompt_n": 10, "predicted_n": 2}


def a_server(asked: list[dict[str, Any]], *chunks: dict[str, Any]) -> Script:
    """Streams these chunks and a `[DONE]`, or says "plainly" where no stream is asked for."""
    stream = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks)

    async def script(peer: Peer) -> None:
        while True:
            head, _, body = (await peer.request()).partition(b"\r\n\r\n")
            path, kind = head.split(b" ")[1], b"application/json"
            if path in CONTROL:
                reply = json.dumps(CONTROL[path]).encode()
            elif body == b"{}":
                reply = b"{}"  # the question what it was started for
            else:
                asked.append(json.loads(body))
                if asked[-1].get("stream"):
                    kind, reply = b"text/event-stream", stream + b"data: [DONE]\n\n"
                else:
                    reply = json.dumps({"choices": [choice("plainly", "stop")]}).encode()
            fields = b"content-type: %b\r\ncontent-length: %d\r\n" % (kind, len(reply))
            await peer.say(b"HTTP/1.1 200 OK\r\n%b\r\n%b" % (fields, reply))

    return script


def choice(text: str, reason: str | None) -> dict[str, Any]:
    return {"index": 0, "message": {"content": text}, "finish_reason": reason}


def chunk(text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    part = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [part], **more}


@pytest.mark.parametrize("timings", [None, TIMINGS], ids=["no figures", "timings alone"])
@in_virtual_time
async def test_a_response_without_usage_is_assembled(
    tmp_path: Path, timings: dict[str, Any] | None
) -> None:
    asked: list[dict[str, Any]] = []
    more = {"timings": timings} if timings else {}
    script = a_server(asked, chunk("Hi"), chunk(" there"), chunk("", "stop", **more))
    async with (
        raw_server(script) as server,
        running_gateway(tmp_path, [f"http://127.0.0.1:{server.port}"]) as running,
    ):
        reply = await running.client.post("/v1/chat/completions", json=BODY)
        assert (reply.status_code, len(asked)) == (200, 1)
        assert reply.json()["choices"][0]["message"]["content"] == "Hi there"
        counted = reply.json().get("usage")
        assert counted == (
            {"completion_tokens": 2, "prompt_tokens": 14, "total_tokens": 16} if timings else None
        )


@in_virtual_time
async def test_a_plain_response_is_asked_for_if_a_stream_can_not_be_assembled(
    tmp_path: Path,
) -> None:
    asked: list[dict[str, Any]] = []
    async with (
        raw_server(a_server(asked, chunk("half an answer"))) as server,
        running_gateway(tmp_path, [f"http://127.0.0.1:{server.port}"]) as running,
    ):
        reply = await running.client.post("/v1/chat/completions", json=BODY)
        assert reply.status_code == 200
        assert reply.json()["choices"][0]["message"]["content"] == "plainly"
        assert [bool(body.get("stream")) for body in asked] == [True, False]
        assert reply.headers["x-gateway-attempts"] == "2"
