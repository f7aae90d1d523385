"""The pictures of the dashboard's pages for the docs, from a fleet at work.

`DASHBOARD_PICTURES=docs/images pytest -n 0 tests/admin/test_dashboard_pictures.py` makes them anew.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from PIL import Image
from playwright.async_api import FloatRect, Page, expect

from gateway.callers.keys import AdminRole, new_key
from gateway.watch.history import STEP_SECONDS
from tests.admin.browser import a_browser, a_page, needs_browser, press
from tests.admin.test_dashboard import GIB, a_fleet, a_router, order, sizes, streams
from tests.admin.test_keys import upload
from tests.emulator import EmulatedNode
from tests.emulator.routed_model import ModelFile
from tests.gateways import Running, until
from tests.stored.batch_gateway import lines
from tests.web.test_route_tables import ADMIN
from tests.web.test_route_tables import ADMIN_KEYS as KEYS

pytestmark = [pytest.mark.slow, needs_browser]

FOLDER = os.environ.get("DASHBOARD_PICTURES")
SECONDS = 100.0 if FOLDER else 1.0  # that the fleet works before the first picture
LEAST_HEIGHT = 420  # of a picture, where the page shows less than it has room for
END = "document.querySelector('#page').lastElementChild.getBoundingClientRect().bottom"
COLOURS = 96  # of a picture: more take more bytes than they show
SIZE = {"width": 1280, "height": 880}
CALLERS = {name: new_key(name) for name in ("chat", "search", "agents", "reports", "nightly")}
RIGHTS: dict[str, dict[str, Any]] = {
    "chat": {"class": "premium", "group": "product", "limits": {"rpm": 600}},
    "search": {"group": "product", "limits": {"tokens_per_day": 400_000}},
    "agents": {"max_class": "premium", "group": "research", "limits": {"budget": "5/month"}},
    "reports": {"group": "research"},
    "nightly": {"class": "batch", "limits": {"concurrency": 64}},
}
GROUPS = {
    "product": {"limits": {"budget": "40/month"}},
    "research": {"limits": {"budget": "0.3/day", "tokens_per_day": 1_000_000}},
}
FILES = {
    name: ModelFile(memory=size * GIB)
    for name, size in (("qwen-14b", 10), ("phi-4-mini", 4), ("gemma-27b", 18), ("bge-m3", 2))
}
FILES["gemma-27b"] = ModelFile(memory=18 * GIB, load_seconds=60.0)
NODE: dict[str, Any] = {
    "slots": 4,
    "model": "mistral-7b",
    "prefill_tps": 150.0,
    "decode_tps": 11.0,
    "answer_tokens": 90,
    "prefill_stalls": True,
    "decode_step": 0.02,
    "cache_ram": 60_000,
}


def settings() -> dict[str, Any]:
    keys = [
        {"id": key.id, "name": name, "sha256": key.sha256, **RIGHTS[name]}
        for name, key in CALLERS.items()
    ]
    models = {**sizes(FILES), "helper": {"use": ["phi-4-mini", "mistral-7b"]}}
    return {"keys": keys, "groups": GROUPS, "models": models, "admin": ADMIN}


async def hand_in(running: Running, name: str, number: int, *more: dict[str, Any]) -> None:
    """Have the gateway do a batch of so many chats, and `more` lines, beside the rest."""
    items = [*lines(number, model="mistral-7b", max_tokens=40), *more]
    made = await upload(running, items, key=name, completion_window="24h")
    assert made.status_code == 200, made.text


async def picture(page: Page, folder: Path, name: str) -> None:
    """Keep a picture of what is shown, in few bytes."""
    end = await page.evaluate(END)
    height = max(LEAST_HEIGHT, min(SIZE["height"], end + 16))
    clip: FloatRect = {"x": 0, "y": 0, "width": SIZE["width"], "height": height}
    shot = Image.open(io.BytesIO(await page.screenshot(clip=clip)))
    shot.convert("RGB").quantize(COLOURS).save(folder / f"dashboard-{name}.png", optimize=True)
    assert (folder / f"dashboard-{name}.png").stat().st_size > 4000


async def test_the_pictures_of_the_docs_are_made(tmp_path: Path) -> None:
    """Where DASHBOARD_PICTURES names a folder, they are made there."""
    folder = Path(FOLDER) if FOLDER else tmp_path
    key = KEYS[AdminRole.ADMIN].text
    async with contextlib.AsyncExitStack() as stack:
        # Its name is in a picture.
        home = Path(stack.enter_context(TemporaryDirectory(prefix="llama-gateway-")))
        router = await stack.enter_async_context(a_router(FILES))
        more = [{"name": "epyc-e", "url": router.url, "host": "epyc-e", "memory": "48GiB"}]
        running, nodes = await stack.enter_async_context(
            a_fleet(home, hosts="abcd", settings=settings(), more=more, **NODE)
        )
        running.admin.headers["authorization"] = f"Bearer {key}"
        await until(lambda: "epyc-e/qwen-14b" in running.gateway.fleet.nodes)
        for model in ("qwen-14b", "phi-4-mini"):
            await order(running, "load", model, "epyc-e")
        await hand_in(running, "reports", 12)
        for number, caller, model in (
            *((6, caller, "mistral-7b") for caller in CALLERS.values()),
            (2, CALLERS["search"], "qwen-14b"),
        ):
            chats = streams(running, number, caller, model=model, max_tokens=80)
            await stack.enter_async_context(chats)
        browser = await stack.enter_async_context(a_browser())
        await at_work(running, nodes)
        for scheme in ("light", "dark"):
            context: dict[str, Any] = {"color_scheme": scheme, "viewport": SIZE}
            async with a_page(browser, running.admin_url, key=key, **context) as watched:
                page = watched.page
                await expect(page.locator("#problems")).to_contain_text("epyc-c-numa1 is down")
                await expect(page.locator("#timeline tbody tr").nth(8)).to_be_attached()
                await picture(page, folder, scheme)
                if scheme == "light":
                    await order(running, "load", "gemma-27b", "epyc-e")
                    await each_page(page, folder)
                assert watched.trouble == []


async def at_work(running: Running, nodes: Mapping[str, EmulatedNode]) -> None:
    """Until the fleet has worked for a while, in which a node died, with batches beside."""
    fleet = running.gateway.fleet.nodes
    history = running.gateway.live.view.history
    await until(lambda: all(fleet[name].speed.decode_tps for name in nodes), 120.0)
    await hand_in(running, "nightly", 400)
    await hand_in(running, "agents", 30, {"custom_id": "line-30", "method": "GET", "url": "/"})
    await until(lambda: len(history.points) * STEP_SECONDS >= SECONDS / 2, 200.0)
    await nodes["epyc-c-numa1"].kill()
    running.write_settings({**settings(), "queue": {"max": 500}})
    await until(lambda: len(history.points) * STEP_SECONDS >= SECONDS, 200.0)


async def each_page(page: Page, folder: Path) -> None:
    for link in (await page.locator("#rail a").all())[1:]:
        address = await link.get_attribute("href")
        assert address is not None
        await link.click()
        if address == "#/playground":
            await page.get_by_label("Model").select_option("mistral-7b")
            await page.get_by_label("Message").fill("Which of our reports were late last week?")
            await press(page, "Send")
            await expect(page.locator(".turn .way").last).to_contain_text("prompt tokens cached")
        await page.wait_for_timeout(3000)  # until the page has what it asks for
        await picture(page, folder, address.removeprefix("#/"))
