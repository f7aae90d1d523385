from __future__ import annotations

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
