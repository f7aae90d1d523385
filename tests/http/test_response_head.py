"""Which headers the gateway forwards in each direction, and which it adds."""

from __future__ import annotations

import asyncio
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


async def test_client_headers_reach_the_node(gate: Public) -> None:
    await gate.ask(request(SHORT, "Content-Type: application/json", "User-Agent: me"))
    seen = gate.node.seen[-1].headers
    assert seen["content-type"] == "application/json"
    assert seen["user-agent"] == "me"


@pytest.mark.parametrize(
    "field",
    [
        "Authorization: Bearer secret", "X-Api-Key: secret", "Api-Key: secret",
        "Cookie: secret=1", "Proxy-Authorization: Basic secret", "Proxy-Connection: secret",
        "Keep-Alive: secret", "TE: secret", "Trailer: secret", "Upgrade: secret",
        "X-Priority: batch", "X-Request-Timeout: 60", "X-Gateway-Progress: 1",
        "X-Gateway-Anything: 1", "Cf-Access-Jwt-Assertion: secret", "X-Auth-Token: secret",
        "X-OpenWebUI-User-Email: anna@example.org", "Referer: https://intranet/page",
        "Origin: app://page", "X-Forwarded-For: 192.0.2.1",
    ],
)  # fmt: skip
async def test_headers_meant_for_the_gateway_never_reach_a_node(gate: Public, field: str) -> None:
    found = await gate.ask(request(SHORT, field))
    assert found.status == 200
    assert field.partition(":")[0].lower() not in gate.node.seen[-1].headers


async def test_headers_named_by_connection_are_not_forwarded(gate: Public) -> None:
    fields = [
        "Connection: Accept, anthropic-beta ,keep-alive",
        "Accept: 1",
        "Anthropic-Beta: 2",
        "Traceparent: 3",
    ]
    await gate.ask(request(SHORT, *fields))
    seen = gate.node.seen[-1].headers
    assert not {"connection", "accept", "anthropic-beta"} & set(seen)
    assert seen["traceparent"] == "3"


async def test_connection_can_not_remove_the_gateways_own_headers(gate: Public) -> None:
    await gate.ask(request(SHORT, "Connection: host, content-length, via, accept-encoding"))
    assert {"host", "content-length", "via", "accept-encoding"} <= set(gate.node.seen[-1].headers)


async def test_the_node_gets_its_own_host_and_no_content_coding(gate: Public) -> None:
    await gate.ask(request(SHORT, "Accept-Encoding: gzip, br", "Via: 1.0 proxy"))
    seen = gate.node.seen[-1].headers
    assert seen["accept-encoding"] == "identity"
    assert seen["via"] == "1.0 proxy, 1.1 llama-gateway"
    assert seen["host"] == gate.node.url.removeprefix("http://")


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


async def test_node_headers_reach_the_client(gate: Public) -> None:
    found = await outcome_of(gate, **{"Retry-After": "1", "Openai-Processing-Ms": "7"})
    assert found.headers["retry-after"] == "1"
    assert found.headers["openai-processing-ms"] == "7"
    assert found.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize(
    "field",
    [
        "Server", "Date", "Set-Cookie", "Keep-Alive", "Proxy-Authenticate", "Trailer",
        "Access-Control-Allow-Origin", "Access-Control-Allow-Credentials",
        "Access-Control-Expose-Headers", "X-Gateway-Secret", "Request-Id", "X-Accel-Redirect",
        "Refresh", "Clear-Site-Data", "Strict-Transport-Security", "Location",
    ],
)  # fmt: skip
async def test_other_headers_of_a_node_do_not_reach_the_client(gate: Public, field: str) -> None:
    found = await outcome_of(gate, **{field: "theirs"})
    assert found.headers.get(field.lower()) is None


async def test_headers_named_by_the_nodes_connection_are_not_forwarded(gate: Public) -> None:
    found = await outcome_of(gate, **{"Connection": "openai-a", "OpenAI-A": "1", "OpenAI-B": "2"})
    assert "openai-a" not in found.headers
    assert "connection" not in found.headers
    assert found.headers["openai-b"] == "2"


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


async def test_two_requests_may_have_the_same_x_request_id(gate: Public) -> None:
    gate.node.faults.next("hang", 2)
    asking = [asyncio.create_task(gate.ask(request(SHORT, "X-Request-ID: same"))) for _ in range(2)]
    await gate.node.until(lambda: gate.node.requests == 2)
    ids = {live.request.id for live in gate.running.gateway.registry}
    assert len(ids) == 2
    gate.node.faults.release()
    for reply in await asyncio.gather(*asking):
        assert reply.headers["x-request-id"] == "same"


async def test_every_response_has_a_unique_id(gate: Public) -> None:
    found = [await gate.ask(request(body)) for body in (SHORT, SHORT, b"{")]
    found.append(await gate.ask(request(path="/nowhere")))
    assert len({reply.headers["x-request-id"] for reply in found}) == 4


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropics_clients_get_the_id_as_request_id(gate: Public, path: str) -> None:
    found = await gate.ask(request(SHORT, path=path))
    assert found.status == 200
    assert found.headers["request-id"] == found.headers["x-request-id"]


async def test_a_response_says_how_it_was_served(gate: Public) -> None:
    found = await gate.ask(request(SHORT, "X-Priority: batch"))
    assert found.headers["x-gateway-class"] == "batch"
    assert found.headers["x-gateway-attempts"] == "1"
    assert int(found.headers["x-gateway-queue-ms"]) < 30_000
    assert found.headers["x-gateway-node"] == "node-0"


@pytest.mark.parametrize(("expose", "shown"), [(False, None), (True, "node-0"), (None, "node-0")])
async def test_the_node_is_named_if_the_settings_say_so(
    tmp_path: Path, expose: bool | None, shown: str | None
) -> None:
    listen = {} if expose is None else {"expose_node": expose}
    async with public(tmp_path, {"listen": listen}) as other:
        assert (await other.chat(max_tokens=1)).headers.get("x-gateway-node") == shown


async def test_the_node_is_not_named_on_a_public_address(tmp_path: Path) -> None:
    async with public(tmp_path, host="0.0.0.0", allow_anonymous=True) as other:
        url = other.url.replace("0.0.0.0", "127.0.0.1")
        reply = await other.running.client.post(f"{url}/v1/chat/completions", json=SHORT)
        assert reply.status_code == 200
        assert "x-gateway-node" not in reply.headers
        object.__setattr__(other.running, "url", url)


async def test_streams_tell_proxies_not_to_buffer(gate: Public) -> None:
    stream = await gate.ask(request({**SHORT, "stream": True}))
    assert stream.headers["x-accel-buffering"] == "no"
    assert stream.headers["content-type"] == "text/event-stream"
    plain = await gate.ask(request(SHORT))
    assert "x-accel-buffering" not in plain.headers


async def test_a_streams_content_length_is_dropped(gate: Public) -> None:
    gate.node.faults.next("wrong_length", delta=5000)
    found = await gate.ask(request({**SHORT, "stream": True}))
    assert "content-length" not in found.headers
    assert found.headers["transfer-encoding"] == "chunked"
    assert b"data: " in found.body


async def test_an_error_too_long_to_be_buffered_keeps_its_true_length(gate: Public) -> None:
    gate.node.faults.next("status", status=400, body=json.dumps({"error": "x" * 2_000_000}))
    found = await gate.ask(request(SHORT))
    assert found.status == 400
    assert len(found.body) < 1_000_000
