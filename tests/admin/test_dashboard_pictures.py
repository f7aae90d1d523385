"""The pictures of the dashboard's pages for the docs, from a fleet at work.

`DASHBOARD_PICTURES=docs/images pytest -n 0 tests/admin/test_dashboard_pictures.py` makes them anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from playwright.async_api import Page, expect

from gateway.callers.keys import AdminRole, ApiKey, new_key
from tests.admin.browser import a_browser, a_page, needs_browser
from tests.admin.test_dashboard import ADMIN, KEYS, a_fleet
from tests.gateways import NO_TLS, Running, until

pytestmark = [pytest.mark.slow, needs_browser]

FOLDER = os.environ.get("DASHBOARD_PICTURES")
SECONDS = 100.0 if FOLDER else 1.0  # that the fleet works before the first picture
SHOWN = ("nodes", "requests", "batches", "keys", "settings")  # besides the overview
COLOURS = 96  # of a picture: more take more bytes than they show
SIZE = {"width": 1280, "height": 880}
CALLERS = {name: new_key(name) for name in ("chat", "search", "agents", "reports", "nightly")}
CLASSES = {"chat": "premium", "nightly": "batch"}
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
        {"id": key.id, "name": name, "sha256": key.sha256, "class": CLASSES.get(name, "normal")}
        for name, key in CALLERS.items()
    ]
    return {"keys": keys, "admin": ADMIN}


@contextlib.asynccontextmanager
async def traffic(running: Running, each: int) -> AsyncIterator[None]:
    """So many chats of each caller, each begun anew a moment after it ends."""
    rng = random.Random(7)

    async def chat(name: str, key: ApiKey, number: int) -> None:
        headers = {"authorization": f"Bearer {key.text}"}
        async with httpx.AsyncClient(base_url=running.url, trust_env=False, verify=NO_TLS) as one:
            while True:
                text = f"{name} {number}: " + "word " * rng.randrange(30, 400)
                body = {
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": rng.randrange(20, 90),
                    "stream": True,
                }
                with contextlib.suppress(httpx.HTTPError):
                    await one.post(
                        "/v1/chat/completions", json=body, headers=headers, timeout=120.0
                    )
                await asyncio.sleep(rng.uniform(0.2, 4.0))

    tasks = [
        asyncio.create_task(chat(name, key, number))
        for name, key in CALLERS.items()
        for number in range(each)
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def hand_in(running: Running, lines: int) -> None:
    """Have the gateway do a batch of so many chats beside the rest."""
    headers = {"authorization": f"Bearer {CALLERS['nightly'].text}"}
    chats = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "mistral-7b",
                "messages": [{"role": "user", "content": f"Sum up report {number}."}],
                "max_tokens": 40,
            },
        }
        for number in range(lines)
    ]
    content = "\n".join(json.dumps(chat) for chat in chats).encode()
    async with httpx.AsyncClient(
        base_url=running.url, headers=headers, trust_env=False, verify=NO_TLS
    ) as one:
        files = {"file": ("reports.jsonl", content)}
        sent = await one.post("/v1/files", data={"purpose": "batch"}, files=files)
        body = {
            "input_file_id": sent.json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        made = await one.post("/v1/batches", json=body)
        assert made.status_code == 200, made.text


async def picture(page: Page, folder: Path, name: str) -> None:
    """Keep a picture of what is shown, in few bytes."""
    shot = Image.open(io.BytesIO(await page.screenshot()))
    shot.convert("RGB").quantize(COLOURS).save(folder / f"dashboard-{name}.png", optimize=True)
    assert (folder / f"dashboard-{name}.png").stat().st_size > 4000


async def test_the_pictures_of_the_docs_are_made(tmp_path: Path) -> None:
    """Where DASHBOARD_PICTURES names a folder, they are made there."""
    folder = Path(FOLDER) if FOLDER else tmp_path
    key = KEYS[AdminRole.ADMIN].text
    async with (
        a_fleet(tmp_path, hosts="abcd", settings=settings(), **NODE) as (running, nodes),
        traffic(running, 8),
        a_browser() as browser,
    ):
        fleet = running.gateway.fleet.nodes.values()
        history = running.gateway.live.view.history
        await until(lambda: all(node.speed.decode_tps for node in fleet), 120.0)
        await hand_in(running, 400)
        await until(lambda: len(history.points) * history.step_seconds >= SECONDS / 2, 200.0)
        await nodes["epyc-c-numa1"].kill()
        await until(lambda: len(history.points) * history.step_seconds >= SECONDS, 200.0)
        for scheme in ("light", "dark"):
            context: dict[str, Any] = {"color_scheme": scheme, "viewport": SIZE}
            async with a_page(browser, running.admin_url, key=key, **context) as watched:
                page = watched.page
                await expect(page.locator(".problem").first).to_contain_text("epyc-c-numa1 is down")
                await expect(page.locator("#timeline tbody tr")).to_have_count(8)
                await picture(page, folder, scheme)
                if scheme == "light":
                    await each_page(page, folder)
                assert watched.trouble == []
        phone: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"}
        async with a_page(browser, running.admin_url, key=key, **phone) as watched:
            await expect(watched.page.locator(".problem").first).to_be_visible()
            assert await watched.page.evaluate("document.documentElement.scrollWidth") <= 390


async def each_page(page: Page, folder: Path) -> None:
    """Keep a picture of each other page that the docs show."""
    links = page.locator("#rail a")
    for link in await links.all():
        address = await link.get_attribute("href")
        assert address is not None
        name = address.removeprefix("#/")
        if name in SHOWN:
            await link.click()
            await page.wait_for_timeout(3000)  # until the page has what it asks for
            await picture(page, folder, name)
