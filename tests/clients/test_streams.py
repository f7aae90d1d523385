"""A stream through the gateway equals the server's own, byte for byte."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app.assembly import Timings
from tests.clients.site import FIXED, HELLO, UNCACHED, Site, running_site, until_busy

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

CHAT: dict[str, Any] = {"messages": HELLO, "max_tokens": 40, **FIXED, **UNCACHED}
TEXT: dict[str, Any] = {"prompt": "hello there", "max_tokens": 40, **FIXED, **UNCACHED}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}

STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", CHAT | {"timings_per_token": True, "logprobs": True}),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required"}),
    ("/chat/completions", CHAT | {"max_tokens": 1}),
    ("/v1/completions", TEXT),
    ("/completion", TEXT | {"n_predict": 40}),
    ("/completion", TEXT | {"n_predict": 40, "return_progress": True}),
    ("/v1/messages", CHAT),
]

ASKING = {"X-Gateway-Progress": "1"}

# Fields that the server makes anew for each answer; nothing else may differ.
_CHANGING = re.compile(
    rb'"(?:id|item_id|response_id)":"[^"]*"'
    rb'|"(?:created|created_at|completed_at|id_slot|time_ms)":[0-9.]+'
    rb'|"[a-z_]*_(?:ms|per_second)":[0-9.e+-]+'
)


def without_changing_fields(data: bytes) -> bytes:
    return _CHANGING.sub(b"-", data)


async def streamed(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str
) -> bytes:
    body = body | {"stream": True}
    async with client.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        return await answer.aread()


@pytest.mark.smoke
@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_a_stream_is_the_servers_own(
    site: Site, chat_node: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    direct = await streamed(chat_node, path, body | {"model": "demo"})
    ours = await streamed(site.http, path, body | {"model": "demo"})
    assert direct.count(b"\n\n") > 3 or body.get("max_tokens") == 1
    assert without_changing_fields(ours) == without_changing_fields(direct)
    await site.until_idle()
    assert [record.status for record in site.records] == [200]


async def test_progress_of_a_long_prefill_is_reported(tmp_path: Path, narrow_url: str) -> None:
    # A prefill of seconds, so that no stall of the machine hides all of its progress.
    body = {"messages": [{"role": "user", "content": "river stone " * 2000}], "max_tokens": 3}
    async with running_site(tmp_path, [narrow_url], timings=Timings(progress=0.02)) as site:
        ours = await streamed(site.http, "/v1/chat/completions", body | UNCACHED, **ASKING)
    progress = [tuple(map(int, one)) for one in _READ.findall(ours)]
    assert progress == sorted(progress)
    assert any(0 < processed < total for _, processed, total in progress)
    assert all(percent == 100 * processed // total for percent, processed, total in progress)
    assert all(total > 4000 for _, _, total in progress)
    assert ours.count(b'"role"') == 1


_READ = re.compile(rb": prefill percent=(\d+) processed=(\d+) total=(\d+)\n")


@pytest.mark.smoke
async def test_heartbeats_come_while_a_stream_waits(tmp_path: Path, narrow_url: str) -> None:
    async with running_site(tmp_path, [narrow_url], {"heartbeat": 0.05}) as site:
        long = CHAT | {"model": "demo", "max_tokens": 15_000, "stream": True}
        async with site.http.stream("POST", "/v1/chat/completions", json=long) as first:
            busy = first.aiter_bytes()
            await anext(busy)
            short = CHAT | {"model": "demo", "max_tokens": 3, "stream": True}
            async with site.http.stream("POST", "/v1/chat/completions", json=short) as second:
                parts = second.aiter_bytes()
                beats = b"".join([await anext(parts) for _ in range(3)])
                assert set(beats.split(b"\n")) == {b":", b""}
                assert b"\n\n" not in beats
                await first.aclose()
                rest = b"".join([part async for part in parts])
        events = rest.lstrip(b":\n")
        assert events.startswith(b'data: {"choices"')
        assert events.endswith(b"data: [DONE]\n\n")
        await until_busy(narrow_url, 0)
