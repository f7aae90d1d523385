"""Which headers the gateway forwards in each direction, and which it adds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.callers.keys import new_key
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import raw_connection
from tests.gateways import running_gateway, until
from tests.web.raw_client import HELLO, Answer, Public, answer, public, request

pytestmark = pytest.mark.asyncio(loop_scope="module")
SHORT = {**HELLO, "max_tokens": 2}


ANSWER = json.dumps({"choices": [{"message": {"role": "assistant", "content": "yes"}}]})


async def test_useful_headers_pass_in_both_directions_and_the_gateways_own_are_added(
    gate: Public,
) -> None:
    """Which they are: tests/forward/test_client_response.py."""
    said = {"Retry-After": "1", "Set-Cookie": "x", "Connection": "openai-a", "OpenAI-A": "1"}
    gate.node.faults.next("status", status=200, body=ANSWER, headers=said)
    useful = ["Content-Type: application/json", "Traceparent: 3", "Via: 1.0 proxy"]
    dropped = ["X-Api-Key: secret", "Connection: Accept, via", "Accept: 1", "Expect: 100-continue"]
    found = await gate.ask(request(SHORT, *useful, *dropped))
    assert (found.status, found.body) == (200, ANSWER.encode())
    assert found.headers["retry-after"] == "1"
    assert not {"openai-a", "connection", "set-cookie"} & set(found.headers)
    seen = gate.node.seen[-1].headers
    assert not {"x-api-key", "connection", "accept", "expect"} & set(seen)
    assert (seen["content-type"], seen["traceparent"]) == ("application/json", "3")
    assert (seen["accept-encoding"], seen["via"]) == ("identity", "1.0 proxy, 1.1 llama-gateway")
    assert seen["host"] == gate.node.url.removeprefix("http://")
    assert int(seen["content-length"]) > 0


async def test_the_nodes_own_key_replaces_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_KEY", "node-secret")
    key = new_key("someone")
    settings = {"keys": [{"id": key.id, "sha256": key.sha256}]}
    async with EmulatedNode(api_key="node-secret") as node:
        spec = {"name": "n", "url": node.url, "api_key_env": "NODE_KEY"}
        async with running_gateway(tmp_path, [spec], settings) as running:
            refused = await running.client.post("/v1/chat/completions", json=SHORT)
            assert refused.status_code == 401
            for name, value in (
                ("authorization", f"Bearer {key.text}"),
                ("x-api-key", key.text),
                ("api-key", key.text),
            ):
                reply = await running.client.post(
                    "/v1/chat/completions", json=SHORT, headers={name: value}
                )
                assert reply.status_code == 200
                seen = node.seen[-1].headers
                assert seen["authorization"] == "Bearer node-secret"
                assert key.text not in str(seen)


async def test_a_reload_permits_more_headers_on_open_connections_too(tmp_path: Path) -> None:
    async with public(tmp_path) as gate:
        reply = {"X-Region": "eu"}
        asked = request(SHORT, "X-Team: a")
        async with raw_connection(gate.url) as wire:

            async def one() -> Answer:
                gate.node.faults.next("status", status=200, body=ANSWER, headers=reply)
                await wire.send(asked)
                return await answer(wire)

            assert "x-region" not in (await one()).headers
            assert "x-region" not in (await one()).headers
            headers = {"to_nodes": ["X-Team"], "to_clients": "x-region"}
            gate.running.write_settings({"headers": headers})
            gateway = gate.running.gateway
            await until(lambda: gateway.settings.headers.to_nodes == ("X-Team",))
            assert (await one()).headers["x-region"] == "eu"
            assert gate.node.seen[-1].headers["x-team"] == "a"


@each_case("value", ["a\x01b", "a\x00b", "a\x7fb", "x" * 100_000])
async def test_an_invalid_header_of_a_node_never_reaches_a_client(gate: Public, value: str) -> None:
    gate.node.faults.next("status", status=200, body=ANSWER, headers={"OpenAI-X": value})
    found = await gate.ask(request(SHORT))
    assert value not in found.headers.get("openai-x", "")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropics_clients_get_the_id_as_request_id(gate: Public, path: str) -> None:
    found = await gate.ask(request(SHORT, path=path))
    assert found.status == 200
    assert found.headers["request-id"] == found.headers["x-request-id"]


@pytest.mark.parametrize(("expose", "shown"), [(False, None), (True, "node-0"), (None, "node-0")])
async def test_the_node_is_named_if_the_settings_say_so(
    tmp_path: Path, expose: bool | None, shown: str | None
) -> None:
    listen = {} if expose is None else {"expose_node": expose}
    async with public(tmp_path, {"listen": listen}) as other:
        assert (await other.chat(max_tokens=1)).headers.get("x-gateway-node") == shown


async def test_the_heads_of_a_stream_and_of_a_plain_response(gate: Public) -> None:
    gate.node.faults.next("wrong_length", delta=5000)
    stream = await gate.ask(request({**SHORT, "stream": True}))
    assert "content-length" not in stream.headers
    assert stream.headers["transfer-encoding"] == "chunked"
    assert stream.headers["content-type"] == "text/event-stream"
    assert stream.headers["x-accel-buffering"] == "no", "proxies are told not to buffer it"
    assert b"data: " in stream.body
    plain = await gate.ask(request(SHORT, "X-Priority: batch"))
    assert "x-accel-buffering" not in plain.headers
    assert plain.headers["x-gateway-class"] == "batch"
    assert plain.headers["x-gateway-attempts"] == "1"
    assert int(plain.headers["x-gateway-queue-ms"]) < 30_000
    assert plain.headers["x-gateway-node"] == "node-0"
