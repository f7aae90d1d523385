"""Routers, llama-swap and Ollama, in what no test compares with real ones."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.emulator.on_demand import EmulatedOllama, EmulatedSwap
from tests.emulator.raw_connection import chat
from tests.emulator.routed_model import HostMemory, ModelFile
from tests.emulator.router import EmulatedRouter
from tests.virtual import in_virtual_time, now

CHAT = "/v1/chat/completions"


def values(router: EmulatedRouter) -> dict[str, str]:
    return {name: model.as_json()["status"]["value"] for name, model in router.models.items()}


def ask(model: str | None, *, stream: bool = False) -> dict[str, object]:
    return {"model": model} | chat(stream=stream, max_tokens=10)


@in_virtual_time
async def test_the_model_that_was_used_least_recently_is_unloaded() -> None:
    async with (
        EmulatedRouter("abc", models_max=2) as router,
        httpx.AsyncClient(base_url=router.url, timeout=100) as client,
    ):
        for name in "abac":
            await client.post(CHAT, json=ask(name))
        assert values(router) == {"a": "loaded", "b": "unloaded", "c": "loaded"}


@in_virtual_time
async def test_a_load_beyond_the_memory_of_the_host_is_killed() -> None:
    memory = HostMemory(10)
    files = {name: ModelFile(memory=6, load_seconds=10) for name in "ab"}
    async with (
        EmulatedRouter(files, memory=memory) as first,
        EmulatedRouter(files, memory=memory) as second,
        httpx.AsyncClient(timeout=100) as client,
    ):
        await client.post(f"{first.url}/models/load", json={"model": "a"})
        assert (await client.post(second.url + CHAT, json=ask("b"))).status_code == 500
        assert now() - 1000 == pytest.approx(10 * 4 / 6, abs=0.1)
        assert (values(first)["a"], values(second)["b"], memory.used) == ("loading", "unloaded", 6)
        assert memory.peak == memory.size
        await first.until(lambda: values(first)["a"] == "loaded")
        await client.post(f"{first.url}/models/unload", json={"model": "a"})
        await first.until(lambda: memory.used == 0)
        assert (await client.post(second.url + CHAT, json=ask("b"))).status_code == 200


@in_virtual_time
async def test_llama_swap_runs_one_model_which_it_ends_once_that_is_idle() -> None:
    async with (
        EmulatedSwap("ab", load_seconds=5, decode_tps=10) as swap,
        httpx.AsyncClient(base_url=swap.url, timeout=100) as client,
    ):
        began = now()
        first, second = await asyncio.gather(
            *(client.post(CHAT, json=ask(model)) for model in "ab")
        )
        assert [first.json()["model"], second.json()["model"]] == ["a", "b"]
        assert now() - began == pytest.approx(2 * (5 + 0.9), abs=0.2)
        listed = (await client.get("/running")).json()["running"]
        assert [(one["model"], one["state"]) for one in listed] == [("b", "ready")]
        for model, words in (("c", "suitable inference handler for c"), (None, "'model' key")):
            refused = await client.post(CHAT, json=ask(model))
            assert (refused.status_code, words in refused.text) == (400, True)
        swap.models["a"].failing_loads = 1
        assert (await client.post(CHAT, json=ask("a"))).status_code == 502
        swap.kill_model_after("a", 5)
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(CHAT, json=ask("a", stream=True))


@in_virtual_time
async def test_ollama_keeps_models_for_a_while_and_tells_no_timings() -> None:
    async with (
        EmulatedOllama("ab", load_seconds=5, ttl=60) as ollama,
        httpx.AsyncClient(base_url=ollama.url, timeout=100) as client,
    ):
        for model in "ab":
            answer = await client.post(CHAT, json=ask(model))
            assert (answer.status_code, "timings" in answer.text) == (200, False)
        running = (await client.get("/api/ps")).json()["models"]
        assert [one["name"] for one in running] == ["a", "b"]
        await asyncio.sleep(70)
        assert (await client.get("/api/ps")).json() == {"models": []}
