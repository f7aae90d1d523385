from __future__ import annotations

import json

import httpx
import pytest

from tests.emulator.node import EmulatedNode
from tests.emulator.raw_connection import chat
from tests.emulator.routed_model import HostMemory, ModelFile
from tests.emulator.router import EmulatedRouter
from tests.emulator.slot_files import SlotFile
from tests.virtual import in_virtual_time, now

CHAT = "/v1/chat/completions"


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
async def test_a_load_takes_the_seconds_of_its_file_and_tells_its_progress() -> None:
    files = {"slow": ModelFile(load_seconds=20), "fast": ModelFile(load_seconds=2)}
    async with (
        EmulatedRouter(files, models_max=0) as router,
        httpx.AsyncClient(base_url=router.url, timeout=100) as client,
        client.stream("GET", "/models/sse") as events,
    ):
        began = now()
        for name in files:
            await client.post("/models/load", json={"model": name})
        seen = []
        async for line in events.aiter_lines():
            if "loaded" in line or "progress" in line:
                event = json.loads(line.removeprefix("data: "))
                value = event["data"].get("progress", {}).get("value", "loaded")
                seen.append((event["model"], value, round(now() - began, 1)))
            if seen and seen[-1][:2] == ("slow", "loaded"):
                break
        assert [one[1:] for one in seen if one[0] == "fast"][-2:] == [(1.0, 1.6), ("loaded", 2.0)]
        assert [one[1:] for one in seen if one[0] == "slow"] == [
            *((share, 16 * share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)),
            ("loaded", 20.0),
        ]


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
        body = chat(stream=False, model="b", max_tokens=1)
        assert (await client.post(second.url + CHAT, json=body)).status_code == 500
        assert now() - 1000 == pytest.approx(10 * 4 / 6, abs=0.1)
        assert (values(first)["a"], values(second)["b"], memory.used) == ("loading", "unloaded", 6)
        assert memory.peak == memory.size
        await first.until(lambda: values(first)["a"] == "loaded")
        await client.post(f"{first.url}/models/unload", json={"model": "a"})
        await first.until(lambda: memory.used == 0)
        assert (await client.post(second.url + CHAT, json=body)).status_code == 200


@in_virtual_time
async def test_a_slot_restored_from_a_file_of_other_weights_answers_wrong() -> None:
    folder: dict[str, SlotFile] = {}
    prompt, file = {"prompt": "one two three four " * 20, "n_predict": 4}, {"filename": "one"}
    async with (
        EmulatedNode(model="a", cache_ram=9999, slot_files=folder) as one,
        EmulatedNode(model="b", cache_ram=9999, slot_files=folder) as other,
        httpx.AsyncClient() as client,
    ):
        texts = []
        for node, action in ((one, "save"), (other, "restore"), (other, "erase")):
            if action != "save":
                await client.post(f"{node.url}/slots/0?action={action}", json=file)
            answer = await client.post(f"{node.url}/completion", json=prompt)
            texts.append(answer.json()["content"])
            if action == "save":
                await client.post(f"{node.url}/slots/0?action={action}", json=file)
        assert texts[0] == texts[2] != texts[1]
