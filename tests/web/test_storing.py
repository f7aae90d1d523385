"""Which requests are stored, and which are served as usual."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.batches.background_requests import NewRequest
from gateway.batches.request_rows import RequestKind
from gateway.errors import GatewayError
from gateway.web.background import background_object
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway

DEAD = "http://127.0.0.1:9"


async def test_requests_that_take_no_slot_are_served_at_once(tmp_path: Path) -> None:
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [node.url]) as running,
    ):
        body = {"messages": [{"role": "user", "content": "x"}], "content": "x"}
        answer = await running.client.post(
            "/tokenize", json=body, headers={"prefer": "respond-async"}
        )
        assert answer.status_code == 200
        assert "preference-applied" not in answer.headers


async def test_a_body_of_too_many_parts_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url]) as running:
        parts = b"[" + b"[]," * 700_000 + b"[]]"
        for name in (b"tools", b"input", b"metadata", b"webhook_url", b"previous_response_id"):
            body = b'{"model":"demo","background":true,"%b":%b}' % (name, parts)
            answer = await running.client.post("/v1/responses", content=body)
            assert answer.status_code == 400
            assert "limits.json_containers" in answer.json()["error"]["message"]


async def test_what_was_taken_is_told_though_the_store_has_gone(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [DEAD], wait_ready=False) as running:
        gateway = running.gateway
        requests = gateway.background.requests
        assert requests is not None
        row = await requests.add(
            NewRequest(RequestKind.DEFERRED, "k", "/v1/completions", b"{}", "normal", 60.0, 60.0)
        )
    with pytest.raises(GatewayError):
        await requests.ahead_of(row)
    described = await background_object(row, requests, gateway.scheduler)
    assert described["id"] == row.id
    assert described["status"] == "queued"
    assert described["position"] is None
