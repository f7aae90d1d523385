"""Which headers the gateway forwards in each direction, and which it adds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.callers.keys import new_key
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import raw_connection
from tests.gateways import running_gateway, until
from tests.web.raw_client import HELLO, Answer, Public, answer, public, request

pytestmark = pytest.mark.asyncio(loop_scope="module")
SHORT = {**HELLO, "max_tokens": 2}


# To the node.


async def test_a_node_gets_a_clients_useful_headers_and_the_gateways_own(gate: Public) -> None:
    useful = ["Content-Type: application/json", "User-Agent: me", "Traceparent: 3"]
    secret = ["X-Api-Key: secret", "Cookie: secret=1", "X-OpenWebUI-User-Email: anna@example.org"]
    named = "Connection: Accept, anthropic-beta ,host, content-length, via, accept-encoding"
    dropped = [named, "Accept: 1", "Anthropic-Beta: 2", "Expect: 100-continue", "X-Priority: batch"]
    own = ["Accept-Encoding: gzip, br", "Via: 1.0 proxy"]
    found = await gate.ask(request(SHORT, *useful, *secret, *dropped, *own))
    assert found.status == 200
    seen = gate.node.seen[-1].headers
    names = [field.partition(":")[0].lower() for field in (*secret, *dropped)]
    assert not {*names, "connection"} & set(seen)
    assert (seen["content-type"], seen["user-agent"], seen["traceparent"]) == (
        "application/json",
        "me",
        "3",
    )
    assert seen["accept-encoding"] == "identity"
    assert seen["via"] == "1.0 proxy, 1.1 llama-gateway"
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


# To the client.


ANSWER = json.dumps({"choices": [{"message": {"role": "assistant", "content": "yes"}}]})


async def outcome_of(gate: Public, **fields: str) -> Answer:
    """The response to a request that the node answered with these headers."""
    gate.node.faults.next("status", status=200, body=ANSWER, headers=fields)
    found = await gate.ask(request(SHORT))
    assert found.status == 200
    assert found.body == ANSWER.encode()
    return found


async def test_a_client_gets_a_nodes_useful_headers_and_no_others(gate: Public) -> None:
    useful = {"Retry-After": "1", "Openai-Processing-Ms": "7"}
    secret = {
        "Server": "x",
        "Set-Cookie": "x",
        "Access-Control-Allow-Origin": "*",
        "Request-Id": "x",
    }
    named = {"Connection": "openai-a", "OpenAI-A": "1", "OpenAI-B": "2"}
    headers = (await outcome_of(gate, **useful, **secret, **named)).headers
    assert (headers["retry-after"], headers["openai-processing-ms"]) == ("1", "7")
    assert headers["openai-b"] == "2"
    assert headers["content-type"].startswith("application/json")
    assert not {"openai-a", "connection", *map(str.lower, secret)} & set(headers)


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


@pytest.mark.parametrize("value", ["a\x01b", "a\x00b", "a\x7fb", "x" * 100_000])
async def test_an_invalid_header_of_a_node_never_reaches_a_client(gate: Public, value: str) -> None:
    gate.node.faults.next("status", status=200, body=ANSWER, headers={"OpenAI-X": value})
    found = await gate.ask(request(SHORT))
    assert value not in found.headers.get("openai-x", "")


async def test_a_valid_x_request_id_of_the_client_is_used(gate: Public) -> None:
    found = await gate.ask(request(SHORT, "X-Request-ID: my-1.2:3/4"))
    assert found.headers["x-request-id"] == "my-1.2:3/4"
    assert gate.node.seen[-1].headers["x-request-id"] == "my-1.2:3/4"
    assert (await gate.last()).x_request_id == "my-1.2:3/4"


@pytest.mark.parametrize("insane", ["", "a b", "x" * 200, "<script>", "a\tb", '"', "\xe9"])
async def test_an_invalid_x_request_id_is_replaced(gate: Public, insane: str) -> None:
    found = await gate.ask(request(SHORT, f"X-Request-ID: {insane}"))
    assert found.headers["x-request-id"].startswith("req_")
    assert gate.node.seen[-1].headers["x-request-id"] == found.headers["x-request-id"]


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


async def test_an_error_too_long_to_be_buffered_keeps_its_true_length(gate: Public) -> None:
    gate.node.faults.next("status", status=400, body=json.dumps({"error": "x" * 2_000_000}))
    found = await gate.ask(request(SHORT))
    assert found.status == 400
    assert len(found.body) < 1_000_000
