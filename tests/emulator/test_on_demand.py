from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.emulator.on_demand import EmulatedOllama, EmulatedSwap
from tests.emulator.raw_connection import chat
from tests.virtual import in_virtual_time, now

CHAT = "/v1/chat/completions"


def ask(model: str | None, *, stream: bool = False) -> dict[str, object]:
    return {"model": model} | chat(stream=stream, max_tokens=10)


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
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["a", "b"]
        for model, words in (("c", "suitable inference handler for c"), (None, "'model' key")):
            refused = await client.post(CHAT, json=ask(model))
            assert (refused.status_code, words in refused.text) == (400, True)
        assert (await client.get("/props")).status_code == 404
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
        refused = await client.post(CHAT, json=ask("c"))
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
        await asyncio.sleep(70)
        assert (await client.get("/api/ps")).json() == {"models": []}
