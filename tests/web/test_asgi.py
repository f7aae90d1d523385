"""What both listeners' applications share: health, readiness, request ids, and internal errors."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.routing import Route

from gateway.access.keys import new_key
from gateway.web.asgi import asgi_app
from tests.emulator import EmulatedNode
from tests.fleet.build import a_spec
from tests.web.bare_gateway import BareGateway, bare_gateway, client, error_of

DEAD = "http://127.0.0.1:9"
KEY = new_key("all")


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health_is_ok_while_the_process_lives(path: str) -> None:
    settings = {"keys": [{"id": KEY.id, "sha256": KEY.sha256}]}
    async with bare_gateway(a_spec("a", DEAD), settings=settings) as gateway:
        response = await gateway.public.get(path)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def unready(gateway: BareGateway) -> str:
    response = await gateway.public.get("/ready")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    return str(error_of(response)["code"])


async def test_ready_is_200_while_a_node_is_ready_and_needs_no_key() -> None:
    settings = {"keys": [{"id": KEY.id, "sha256": KEY.sha256}]}
    async with (
        EmulatedNode() as node,
        bare_gateway(a_spec("a", node.url), a_spec("b", DEAD), settings=settings) as gateway,
    ):
        assert (await gateway.public.get("/ready")).status_code == 200
        await node.kill()
        await gateway.until(lambda: gateway["a"].state.value == "down")
        assert await unready(gateway) == "no_node"


async def test_ready_is_503_before_the_first_probe() -> None:
    async with EmulatedNode() as node:
        node.faults.set("hang", path="/health")
        async with bare_gateway(a_spec("a", node.url), probed=False, timeout=5.0) as gateway:
            assert await unready(gateway) == "starting"


async def test_ready_is_503_during_shutdown() -> None:
    async with EmulatedNode() as node, bare_gateway(a_spec("a", node.url)) as gateway:
        gateway.handler.begin_shutdown()
        assert await unready(gateway) == "shutting_down"
        assert (await gateway.public.get("/health")).status_code == 200


@pytest.mark.parametrize(("places", "ready"), [(1, True), (0, False)])
async def test_a_full_fleet_is_ready_while_requests_can_be_queued(places: int, ready: bool) -> None:
    async with (
        EmulatedNode(slots=1, decode_tps=5) as node,
        bare_gateway(
            a_spec("a", node.url), settings={"queue": {"max": places}}, serving=True
        ) as gateway,
    ):
        assert (await gateway.public.get("/ready")).status_code == 200
        running = asyncio.create_task(gateway.chat())
        await gateway.until(lambda: node.busy == 1)
        if ready:
            assert (await gateway.public.get("/ready")).status_code == 200
        else:
            assert await unready(gateway) == "queue_full"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nothing", "/v1/completions"])
async def test_every_response_has_the_clients_id_or_a_new_one(path: str) -> None:
    async with bare_gateway() as gateway:
        own = await gateway.public.get(path, headers={"x-request-id": "trace-1"})
        first = await gateway.public.get(path, headers={"x-request-id": "not sane"})
        second = await gateway.public.get(path)
    assert own.headers["x-request-id"] == "trace-1"
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert first.headers["x-request-id"].startswith("req_")


async def test_an_internal_error_has_the_same_form_and_is_raised_again() -> None:
    async def fails(_: object) -> None:
        raise RuntimeError("a secret of ours")

    app = asgi_app([Route("/", fails)], lambda: "an-id")
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as asking:
        response = await asking.get("/")
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "an-id"
    async with client(app) as asking:
        with pytest.raises(RuntimeError):
            await asking.get("/")
