"""What the head of a request asks for, who owns what it is about, and which pages may read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config.listeners import CorsSpec
from gateway.http.heads import EXPOSED_HEADERS, cors_headers, prefers_async
from gateway.transport.errors import ConnectTimedOut
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.gateways import until
from tests.virtual import in_virtual_time, now
from tests.web.raw_client import HELLO, public, request


@each_case(
    ("value", "found"),
    [
        *((value, True) for value in (
            b"respond-async", b" Respond-Async , wait=100", b'foo="a, b", respond-async; bar=1',
            b'respond-async=""', b"respond-async ; x",
        )),
        *((value, False) for value in (
            b"", b"respond-asynchronously", b"xrespond-async", b"respond-async=1",
            b'foo="respond-async"', b'foo="a, respond-async"', b"wait=100; respond-async",
        )),
    ],
)  # fmt: skip
def test_a_preference_for_an_answer_later_is_found(value: bytes, found: bool) -> None:
    assert prefers_async([(b"prefer", value)]) is found
    assert prefers_async([(b"prefer", b"wait=1"), (b"prefer", value)]) is found
    assert not prefers_async([(b"x-prefer", value)])


PAGE = "https://chat.example"


@in_virtual_time
async def test_an_allowed_page_may_read_every_kind_of_response_and_no_other(
    tmp_path: Path,
) -> None:
    settings = {"cors": {"origins": [PAGE], "credentials": True}, "heartbeat": 0.1}
    async with public(tmp_path, settings) as gate:
        origin = f"Origin: {PAGE}"
        short = {**HELLO, "max_tokens": 2}
        kinds = {
            "plain": request(short, origin),
            "stream": request({**short, "stream": True}, origin),
            "error": request(b"{", origin),
            "nowhere": request(short, origin, path="/nowhere"),
            "models": request(b"", origin, method="GET", path="/v1/models"),
        }
        for kind, data in kinds.items():
            found = await gate.ask(data)
            assert found.headers["access-control-allow-origin"] == PAGE, kind
            assert found.headers["access-control-allow-credentials"] == "true", kind
            assert found.headers["vary"] == "Origin", kind
            assert found.headers["access-control-expose-headers"] == ", ".join(EXPOSED_HEADERS)
        gate.node.faults.next("hang", after_events=0, seconds=0.3)
        beaten = await gate.ask(kinds["stream"])
        assert beaten.body.startswith(b":\n")
        assert beaten.headers["access-control-allow-origin"] == PAGE
        for other in ("https://evil.example", f"{PAGE}.evil.example", "null", "*"):
            stranger = await gate.ask(request(short, f"Origin: {other}"))
            assert not [name for name in stranger.headers if name.startswith("access-control")]
        asks = (
            "Access-Control-Request-Method: POST",
            "Access-Control-Request-Headers: authorization",
        )
        preflight = await gate.ask(request(b"", origin, *asks, method="OPTIONS"))
        assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "POST" in preflight.headers["access-control-allow-methods"]
    anyone = dict(cors_headers(CorsSpec(origins=("*",)), [(b"origin", PAGE.encode())]))
    assert anyone[b"access-control-allow-origin"] == b"*"
    assert not cors_headers(CorsSpec(origins=("*",)), [])


PADDED: dict[str, Any] = {
    "heartbeat": 0.1,
    "heartbeat_plain": True,
    "health": {"interval": 0.2},
    "retries": {"backoff": 0.01},
}
PLAIN: dict[str, Any] = {"health": {"interval": 0.2}}


@pytest.mark.parametrize("late", [0.0, 2.0])
@pytest.mark.parametrize("slow", ["to answer", "to connect", "to come free"])
@in_virtual_time
async def test_a_plain_request_has_the_deadline_of_the_sdks_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str, late: float
) -> None:
    """An official client's own timer ends the request before the gateway does."""
    field = "X-Stainless-Read-Timeout" if late else "X-Request-Timeout"
    node = EmulatedNode(decode_tps=20, answer_tokens=400, slots=1)
    async with public(tmp_path, PLAIN, node) as gate:
        fleet = gate.running.gateway.fleet.nodes["node-0"]
        first = None
        if slow == "to come free":
            first = asyncio.create_task(gate.chat(max_tokens=9))
            await until(lambda: gate.node.busy == 1)
        if slow == "to connect":
            pool = fleet.upstream
            while (idle := pool.take_idle()) is not None:
                idle.close()
            monkeypatch.setattr(pool, "connect", slowly)
        began = now()
        asked = asyncio.create_task(gate.chat(f"{field}: 0.3", "X-Stainless-Timeout: 600"))
        await until(lambda: now() - began >= 0.35)
        # Its node does no more for it, whenever it is told.
        await until(lambda: gate.node.busy == int(first is not None))
        assert asked.done() is not bool(late)
        assert now() - began < 0.6
        found = await asked
        assert found.status == (503 if first else 504)
        assert found.code == ("queue_timeout" if first else "node_timeout")
        assert 0.3 + late <= now() - began < 0.36 + late
        assert (fleet.failures, fleet.circuit.suspect_callers) == (0, set())
        gate.node.engine.decode_tps = 1e9
        monkeypatch.undo()
        if first is not None:
            await first


async def slowly(timeout: float) -> Any:
    await asyncio.sleep(timeout)
    raise ConnectTimedOut(f"No connection within {timeout:g} s")


@in_virtual_time
async def test_white_space_is_sent_before_a_plain_response_and_an_error_in_its_body(
    tmp_path: Path,
) -> None:
    node, quiet = EmulatedNode(decode_tps=20, answer_tokens=10), {"timeouts": {"silence": 0.4}}
    async with public(tmp_path, PADDED | quiet, node) as gate:
        found = await gate.chat("X-Stainless-Read-Timeout: 0.2")
        assert found.status == 200
        assert found.headers["content-type"] == "application/json; charset=utf-8"
        assert found.headers["transfer-encoding"] == "chunked"
        assert found.body.startswith(b"  ")
        assert json.loads(found.body)["usage"]["completion_tokens"] == 10
        quick = await gate.chat(max_tokens=1)
        assert "content-length" in quick.headers
        assert quick.body.startswith(b"{")
        gate.node.faults.set("hang", after_events=1)
        failed = await gate.chat("X-Request-Timeout: 0.5")
        gate.node.faults.clear()
        assert (failed.status, failed.body[:1]) == (200, b" ")
        assert json.loads(failed.body)["error"]["code"] == "node_timeout"
        record = await gate.last()
        assert (record.status, record.reason) == (504, "node_timeout")
