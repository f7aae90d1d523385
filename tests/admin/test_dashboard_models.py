"""The dashboard's picture of routers: their memory, and the models that fill it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from tests.admin.browser import confirm, needs_browser, turn_to
from tests.admin.test_dashboard import opened
from tests.callers.metered_gateway import recorded
from tests.emulator import EmulatedNode
from tests.emulator.routed_model import HostMemory, ModelFile
from tests.emulator.router import EmulatedRouter
from tests.gateways import Running, running_gateway, until

pytestmark = [pytest.mark.slow, needs_browser]

HOSTILE = "<img src=x onerror=alert(1)>'\"</script>/x"
GIB = 1 << 30
FILES = {
    "small": ModelFile(memory=2 * GIB),
    HOSTILE: ModelFile(memory=4 * GIB, load_seconds=2.0),
    "large": ModelFile(memory=9 * GIB, load_seconds=60.0),
}
SIZES = {"models": {name: {"memory": f"{file.memory}"} for name, file in FILES.items()}}


def a_router() -> EmulatedRouter:
    return EmulatedRouter(FILES, models_max=0, memory=HostMemory(64 * GIB), slots=2, decode_tps=20)


async def order(running: Running, verb: str, model: str, node: str = "r1") -> None:
    """Order a router to load, unload, pin or unpin a model."""
    body = {"order": verb, "model": model, "node": node}
    response = await running.admin.post("/admin/placements", json=body)
    assert response.status_code == 200, response.text


def inventory(router: EmulatedRouter, plain: EmulatedNode) -> list[dict[str, Any]]:
    return [
        {"name": "r1", "url": router.url, "host": "big", "memory": "16GiB"},
        {"name": "a1", "url": plain.url, "host": "small"},
    ]


async def test_the_memory_of_a_host_fills_with_models_whatever_their_names(tmp_path: Path) -> None:
    router, plain = a_router(), EmulatedNode(model="plain")
    async with (
        router,
        plain,
        running_gateway(tmp_path, inventory(router, plain), SIZES) as running,
    ):
        nodes = running.gateway.fleet.nodes
        await until(lambda: f"r1/{HOSTILE}" in nodes)
        async with opened(running) as page:
            picture = page.locator("#models")
            await expect(page.locator("#nodes .node")).to_have_count(2)
            await expect(page.locator("#top")).to_contain_text("2 of 2 nodes at work, 0 of 2 slots")
            await turn_to(page, "Models")
            await expect(picture).to_contain_text("big 0 MiB of 16.0 GiB taken")
            await order(running, "pin", "small")
            await order(running, "load", HOSTILE)
            row = picture.locator("li[data-model]").filter(has_text=f"r1/{HOSTILE}")
            await expect(row).to_contain_text("ready, 4.0 GiB, 0 of 2 slots busy")
            await expect(picture).to_contain_text(
                "r1/small ready, 2.0 GiB, 0 of 2 slots busy, pinned"
            )
            await expect(picture).to_contain_text("big 6.0 GiB of 16.0 GiB taken")
            bars = picture.locator("rect.filled")
            await expect(bars).to_have_count(2)
            assert [await bar.get_attribute("width") for bar in await bars.all()] == ["248", "123"]
            await expect(page.locator("#top")).to_contain_text("0 of 6 slots busy")
            # One that is being loaded tells how far it is.
            body = {"model": "large", "messages": [{"role": "user", "content": "Hi"}]}
            asked = asyncio.create_task(running.client.post("/v1/chat/completions", json=body))
            loading = picture.locator("li[data-model]").filter(has_text="r1/large")
            await expect(loading).to_contain_text(re.compile(r"loading, \d+ %, 9.0 GiB"))
            await row.get_by_role("link").click()
            shown = page.locator("#node")
            await expect(shown).to_contain_text("Memory4.0 GiB")
            await shown.get_by_role("button", name="Drain").click()
            await confirm(page, HOSTILE)
            await expect(shown.locator(".state")).to_contain_text("draining")
            assert nodes[f"r1/{HOSTILE}"].draining
            assert await page.locator("#page img, #page script").count() == 0
            await turn_to(page, "Nodes")
            card = page.locator('[data-node="r1"]')
            await expect(card.locator(".cell")).to_have_count(4)
            await expect(card).to_contain_text("router 2 of 3 models loaded")
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)


async def test_a_model_has_an_address_where_it_is_loaded_and_paused_and_who_used_it_is_told(
    tmp_path: Path,
) -> None:
    router, plain = a_router(), EmulatedNode(model="small", answer_tokens=7)
    settings = {**SIZES, "models": {**SIZES["models"], "helper": {"use": ["small", "large"]}}}
    async with (
        router,
        plain,
        running_gateway(tmp_path, inventory(router, plain), settings) as running,
        opened(running, at="models") as page,
    ):
        await until(lambda: "r1/large" in running.gateway.fleet.nodes)
        listed = page.locator("#names tbody tr")
        await expect(listed.filter(has_text="helper")).to_contain_text("small, large")
        body = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}
        assert (await running.client.post("/v1/chat/completions", json=body)).status_code == 200
        await recorded(running, 1)
        await listed.filter(has_text="small").get_by_role("link", name="small", exact=True).click()
        await expect(page).to_have_url(re.compile("#/models/small$"))
        model = page.locator("#model")
        nodes = model.get_by_role("region", name="Nodes that always have it")
        await expect(nodes.locator("tbody tr")).to_have_count(1)
        await expect(nodes).to_contain_text("a1")
        routers = model.get_by_role("region", name="Routers that can load it")
        await expect(routers.locator("tbody tr")).to_contain_text("unloaded")
        await routers.get_by_role("button", name="load small on r1").click()
        await expect(page.locator("#toasts")).to_contain_text("load small on r1: ordered.")
        await expect(routers.locator("tbody tr")).to_contain_text("answers its probes")
        await expect(page.locator("#models rect.own")).to_have_count(1)
        used = page.locator("#used tbody tr")
        await expect(used).to_have_count(1)
        await expect(used.locator("td").nth(4)).to_have_text("7")
        await model.get_by_role("button", name="Pause small").click()
        await confirm(page, "Pause small?")
        await expect(model.locator("h2")).to_contain_text("paused")
        refused = await running.client.post("/v1/chat/completions", json=body)
        assert refused.json()["error"]["code"] == "model_paused"
        await model.get_by_role("button", name="Resume small").click()
        await expect(model.locator("h2")).to_have_text("small")
        assert (await running.client.post("/v1/chat/completions", json=body)).status_code == 200
        await used.get_by_role("link").click()
        await expect(page).to_have_url(re.compile(r"#/requests\?key=anonymous.*&model=small$"))
