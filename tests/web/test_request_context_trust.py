"""Which callers a loopback listener trusts as local, and the classes that they may use."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from gateway.access.keys import new_key
from gateway.proxy.inbound.routes import ROUTES
from tests.each_case import each_case
from tests.emulator.raw_connection import raw_connection
from tests.web.raw_client import CHAT, HELLO, Public, answer, public, request

pytestmark = pytest.mark.asyncio(loop_scope="module")
SHORT = {**HELLO, "max_tokens": 1}
PROXIED = [
    "Forwarded: for=127.0.0.1", "X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1",
    "Via: 1.1 edge", "X-Forwarded-Proto: https", "CF-Connecting-IP: ::1", "VIA:",
]  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "messages": SHORT,
    "prompt": {"prompt": "Hello", "max_tokens": 1, "n_predict": 1},
    "input": {"input": "Hello", "max_output_tokens": 16},
}
"""Required fields, by the field of the prompt; other paths accept any of them."""
GENERATING = [
    "/v1/chat/completions", "/chat/completions", "/v1/completions", "/completions",
    "/completion", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize",
    "/v1/chat/completions/input_tokens",
]  # fmt: skip


def body_for(path: str) -> dict[str, Any]:
    return BODIES.get(ROUTES[path].prompt_field or "", {"content": "Hello"})


def has_come(gate: Public, requests: int) -> bool:
    return gate.node.requests == requests


@each_case("field", PROXIED)
async def test_a_proxied_request_is_not_local_though_its_peer_is(gate: Public, field: str) -> None:
    gate.forget()
    found = await gate.chat(field, "X-Priority: urgent", "X-User-Id: anna", max_tokens=1)
    assert found.status == 200
    assert found.headers["x-gateway-class"] == "normal"
    assert "x-gateway-node" not in found.headers
    assert (await gate.last()).caller == "anonymous:127.0.0.1"


async def test_each_head_of_a_connection_is_judged_by_itself(gate: Public) -> None:
    direct = request(SHORT, "X-Priority: urgent")
    proxied = request(SHORT, "X-Priority: urgent", "Via: 1.1 edge")
    async with raw_connection(gate.url) as wire:
        for asked, seen in [(direct, "urgent"), (proxied, "normal")] * 3:
            for _ in range(2):
                await wire.send(asked)
                found = await answer(wire)
                assert found.headers["x-gateway-class"] == seen
                assert ("x-gateway-node" in found.headers) == (seen == "urgent")


async def test_only_local_callers_may_name_users(gate: Public) -> None:
    edge = gate.running.gateway.handler
    parties = []
    for number, fields in enumerate(([], ["X-Forwarded-For: 127.0.0.1"]), 1):
        gate.node.faults.next("hang")
        async with raw_connection(gate.url) as wire:
            await wire.send(request(SHORT, "X-User-Id: anna", *fields))
            await gate.node.until(partial(has_come, gate, number))
            parties += [live.request.lease_request.caller.fairness_key for live in edge.registry]
            gate.node.faults.release()
            await answer(wire)
    assert parties == ["anonymous:127.0.0.1/anna", "anonymous:127.0.0.1"]


async def test_with_trusted_proxies_no_caller_is_local(tmp_path: Path) -> None:
    settings = {"listen": {"trusted_proxies": ["192.0.2.0/24"]}, "allow_anonymous": True}
    async with public(tmp_path, settings) as gate:
        found = await gate.chat("X-Priority: urgent", max_tokens=1)
        assert found.headers["x-gateway-class"] == "normal"
        assert "x-gateway-node" not in found.headers


async def test_a_keys_classes_hold_through_a_proxy(tmp_path: Path) -> None:
    key = new_key("team")
    spec = {"id": key.id, "sha256": key.sha256, "max_class": "premium"}
    async with public(tmp_path, {"keys": [spec]}, well=False) as gate:
        fields = [f"x-api-key: {key.text}", "X-Priority: urgent"]
        direct = await gate.chat(*fields, max_tokens=1)
        proxied = await gate.chat(*fields, "Forwarded: for=_x", max_tokens=1)
        assert direct.headers["x-gateway-class"] == proxied.headers["x-gateway-class"] == "premium"
        assert "x-gateway-node" in direct.headers
        assert "x-gateway-node" not in proxied.headers


# The class in the body.


ODD_CLASSES = ["high", "", "URGENT!", 7, -1.5, True, None, [], ["urgent"], {"class": "urgent"}]
ODD_TIERS = ["high", 7, [], ["flex"], {"tier": "flex"}, None, False]


@each_case(
    ("path", "odd"),
    [*zip(GENERATING, ODD_CLASSES, strict=True), *((CHAT, odd) for odd in ODD_CLASSES)],
)
async def test_an_unknown_class_in_the_body_is_ignored(
    gate: Public, path: str, odd: object
) -> None:
    found = await gate.ask(request({**body_for(path), "priority": odd}, path=path))
    assert found.status == 200, found
    assert found.headers["x-gateway-class"] == "normal"


@each_case(
    ("path", "odd"),
    [*zip(GENERATING, cycle(ODD_TIERS), strict=False), *((CHAT, odd) for odd in ODD_TIERS)],
)
async def test_an_unknown_tier_is_ignored(gate: Public, path: str, odd: object) -> None:
    found = await gate.ask(request({**body_for(path), "service_tier": odd}, path=path))
    assert found.status == 200, found
    assert found.headers["x-gateway-class"] == "normal"


@each_case("path", GENERATING)
async def test_an_unknown_class_in_the_header_is_400(gate: Public, path: str) -> None:
    body = {**body_for(path), "priority": "batch"}
    found = await gate.ask(request(body, "X-Priority: high", path=path))
    assert found.status == 400
    assert b"urgent, premium, normal, batch" in found.body
    good = await gate.ask(request(body, path=path))
    assert good.headers["x-gateway-class"] == "batch"
