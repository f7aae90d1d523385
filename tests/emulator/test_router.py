from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import httpx

from tests.emulator.raw_connection import chat, post, raw_connection
from tests.emulator.router import UNLOAD_GRACE, EmulatedRouter
from tests.virtual import in_virtual_time, now

CHAT = "/v1/chat/completions"
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 10**6}


def values(router: EmulatedRouter) -> dict[str, str]:
    return {name: model.as_json()["status"]["value"] for name, model in router.models.items()}


@in_virtual_time
async def test_a_request_waits_until_its_model_is_loaded() -> None:
    async with (
        EmulatedRouter(["a", "b"], load_seconds=3) as router,
        httpx.AsyncClient(base_url=router.url, timeout=100) as client,
    ):
        began = now()
        answer = await client.post(CHAT, json=chat(stream=False, model="b"))
        assert (answer.status_code, answer.json()["model"]) == (200, "b")
        assert now() - began == 3
        assert values(router) == {"a": "unloaded", "b": "loaded"}
        assert router.models["b"].node.requests == 1


@in_virtual_time
async def test_beyond_the_limit_a_request_waits_until_a_model_is_idle() -> None:
    async with (
        EmulatedRouter(["a", "b"], models_max=1, decode_tps=10) as router,
        raw_connection(router.url) as busy,
        httpx.AsyncClient(timeout=100) as client,
    ):
        await busy.send(post(CHAT, chat(model="a", **ENDLESS)))
        await busy.until(b"\n\n")
        other = asyncio.create_task(
            client.post(router.url + CHAT, json=chat(stream=False, model="b"))
        )
        await asyncio.sleep(20)
        assert not other.done()
        assert values(router) == {"a": "loaded", "b": "unloaded"}
        refused = await client.post(f"{router.url}/models/load", json={"model": "b"})
        assert refused.json()["error"]["message"] == "model limit reached, try again later"
        await busy.leave()
        assert (await other).status_code == 200
        assert values(router) == {"a": "unloaded", "b": "loaded"}


@in_virtual_time
async def test_the_model_that_was_used_least_recently_is_unloaded() -> None:
    async with (
        EmulatedRouter("abc", models_max=2) as router,
        httpx.AsyncClient(base_url=router.url, timeout=100) as client,
    ):
        for name in "abac":
            await client.post(CHAT, json=chat(stream=False, model=name))
        assert values(router) == {"a": "loaded", "b": "unloaded", "c": "loaded"}


@in_virtual_time
async def test_a_model_that_is_unloaded_while_busy_is_killed_in_the_end() -> None:
    async with EmulatedRouter(["a"], decode_tps=10) as router, AsyncExitStack() as stack:
        wire = await stack.enter_async_context(raw_connection(router.url))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=router.url, timeout=100)
        )
        await wire.send(post(CHAT, chat(model="a", **ENDLESS)))
        await wire.until(b"\n\n")
        began = now()
        await client.post("/models/unload", json={"model": "a"})
        await router.until(lambda: not router.models["a"].requests)
        assert now() - began >= UNLOAD_GRACE
        assert (await wire.until(b"0\r\n\r\n")).endswith(
            b"proxy error: Failed to read connection\r\n0\r\n\r\n"
        )
        assert router.models["a"].as_json()["status"]["failed"] is True


@in_virtual_time
async def test_a_killed_model_is_started_again_by_the_next_request() -> None:
    async with (
        EmulatedRouter(["a"], decode_tps=10) as router,
        httpx.AsyncClient(timeout=100) as client,
    ):
        request = client.post(router.url + CHAT, json=chat(stream=False, model="a", **ENDLESS))
        plain = asyncio.create_task(request)
        await router.until(lambda: router.models["a"].node.busy == 1)
        await router.kill_model("a")
        answer = await plain
        assert (answer.status_code, answer.text) == (500, "proxy error: Failed to read connection")
        again = await client.post(router.url + CHAT, json=chat(stream=False, model="a"))
        assert again.status_code == 200


@in_virtual_time
async def test_a_loaded_model_sleeps_and_wakes() -> None:
    async with (
        EmulatedRouter(["a"], load_seconds=2, sleep_idle_seconds=60) as router,
        httpx.AsyncClient(base_url=router.url, timeout=100) as client,
    ):
        await client.post(CHAT, json=chat(stream=False, model="a"))
        await asyncio.sleep(60)
        assert values(router) == {"a": "sleeping"}
        assert (await client.get("/props?model=a")).json()["is_sleeping"] is True
        began = now()
        await client.post(CHAT, json=chat(stream=False, model="a"))
        assert now() - began == 2
        assert values(router) == {"a": "loaded"}
