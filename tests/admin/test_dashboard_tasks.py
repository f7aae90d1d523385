"""Five questions of week two, each answered within three clicks from the overview, and timed.

`pytest tests/admin/test_dashboard_tasks.py -n 0 -s` prints the clicks and the seconds of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Locator, Page, expect
from sqlalchemy import update

from gateway.callers.keys import new_key
from gateway.store.schema import usage
from tests.admin.browser import needs_browser
from tests.admin.test_dashboard import ask, opened
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.stored.batch_gateway import lines

pytestmark = [pytest.mark.slow, needs_browser]

WEB, CRAWLER = new_key("web"), new_key("crawler")
SETTINGS: dict[str, Any] = {
    "keys": [
        {"id": key.id, "sha256": key.sha256, "name": name, "group": group}
        for key, name, group in ((WEB, "web", "research"), (CRAWLER, "crawler", "lab"))
    ]
}
MOST_CLICKS = 3
DAY = 86_400


@dataclass
class Reader:
    """An operator who begins at the overview; what he clicks is counted."""

    page: Page
    clicks: int = 0
    told: list[str] = field(default_factory=list)

    async def click(self, target: Locator) -> None:
        self.clicks += 1
        await target.click()

    async def choose(self, target: Locator, **option: Any) -> None:
        self.clicks += 1
        await target.select_option(**option)

    async def turn_to(self, title: str) -> None:
        await self.click(self.page.locator("#rail").get_by_role("link", name=title))

    @contextlib.asynccontextmanager
    async def asks(self, question: str) -> AsyncIterator[None]:
        await self.page.evaluate("location.hash = '#/overview'")
        await expect(self.page.get_by_role("heading", level=1)).to_have_text("Overview")
        self.clicks, begun = 0, time.perf_counter()
        yield
        took = time.perf_counter() - begun
        self.told.append(f"{question:<45} {self.clicks} clicks, {took:.1f} s")
        assert self.clicks <= MOST_CLICKS, question


async def move_back(running: Running, seconds: float) -> None:
    """Let what ended within this hour have ended so many seconds before."""
    columns = usage.c
    moved = update(usage).where(columns.ended_at > time.time() - 3600)
    moved = moved.values(
        started_at=columns.started_at - seconds, ended_at=columns.ended_at - seconds
    )
    store = running.gateway.store
    assert store is not None
    await store.run(lambda connection: connection.execute(moved), write=True)


@contextlib.asynccontextmanager
async def a_flood(running: Running, number: int) -> AsyncIterator[None]:
    """So many chats of the crawler and one of the web, until they are left."""

    async def chat(key: str) -> None:
        body = {"messages": [{"role": "user", "content": "Write."}], "max_tokens": 4000}
        headers = {"authorization": f"Bearer {key}"}
        await running.client.post("/v1/chat/completions", json=body, headers=headers)

    keys = [CRAWLER.text] * number + [WEB.text]
    tasks = [asyncio.create_task(chat(key)) for key in keys]
    try:
        await until(lambda: len(running.gateway.registry) == len(tasks))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: len(running.gateway.registry) == 0)


async def test_five_questions_are_answered_within_three_clicks(tmp_path: Path) -> None:
    node = EmulatedNode(slots=2, decode_tps=60.0, answer_tokens=4000)
    now = datetime.now(UTC)
    last_month = now.replace(day=1) - timedelta(days=1)
    async with node:
        spec = {"name": "epyc-a", "url": node.url, "cost_per_hour": 3600.0}
        async with running_gateway(tmp_path, [spec], SETTINGS) as running:
            for _ in range(2):
                await ask(running, "long-ago", key=WEB.text, max_tokens=30)
            await move_back(running, (now - last_month).total_seconds())
            await ask(running, "quick", key=WEB.text, max_tokens=3)
            await ask(running, "slow-one", key=WEB.text, max_tokens=60)
            await move_back(running, DAY)
            # Yesterday is more than memory keeps.
            running.gateway.scheduler.decision_log.grants.clear()
            running.gateway.live.view.history._served.clear()
            async with opened(running) as page:
                reader = Reader(page)
                async with a_flood(running, 20), reader.asks("Who floods?"):
                    await who_floods(reader)
                async with reader.asks("Why was it slow yesterday?"):
                    await why_slow_yesterday(reader)
                async with reader.asks("Give a team a budget"):
                    await give_a_budget(reader, running)
                async with reader.asks(f"What did the team cost in {last_month:%B}?"):
                    await cost_in(reader, f"{last_month:%B %Y}")
                content = "".join(json.dumps(one) + "\n" for one in lines(40))
                await running.admin.post(
                    "/admin/batches",
                    params={"key": "web", "completion_window": "24h"},
                    data={"purpose": "batch"},
                    files={"file": ("in.jsonl", content)},
                )
                async with reader.asks("Is the batch done in time?"):
                    await is_the_batch_in_time(reader)
    print("", *reader.told, sep="\n")


async def who_floods(reader: Reader) -> None:
    problem = reader.page.locator("#problems .problem").filter(has_text="One caller floods")
    await reader.click(problem.locator("summary"))
    await expect(problem).to_contain_text("Its caller: crawler")


async def why_slow_yesterday(reader: Reader) -> None:
    page = reader.page
    await reader.turn_to("Requests")
    await reader.click(page.get_by_role("link", name="Slowest yesterday"))
    rows = page.locator("#ended tbody tr")
    await expect(rows).to_have_count(2)
    await reader.click(rows.first.get_by_role("link"))
    told = page.locator("#request")
    await expect(told.locator("h2")).to_have_text("Request slow-one")
    await expect(told.locator(".summary")).to_contain_text(re.compile(r"\d s to write 60"))
    # Only the ledger knows it still.
    await expect(told).to_contain_text("No longer known: the nodes that were compared")
    await expect(told.get_by_role("table")).to_have_count(0)


async def give_a_budget(reader: Reader, running: Running) -> None:
    page = reader.page
    await reader.turn_to("Keys")
    team = page.locator("#groups .group").filter(has_text="research")
    await expect(team).to_contain_text("it has no limit")
    await reader.click(team.get_by_role("button", name="Limits of research"))
    await team.get_by_label("Money").fill("500/month")
    await reader.click(team.get_by_role("button", name="Set them"))
    await expect(team).to_contain_text("of 500")
    groups = (await running.admin.get("/admin/groups")).json()["groups"]
    limits = {one["name"]: one["limits"] for one in groups}
    assert limits["research"]["budget"] == "500/month"


async def cost_in(reader: Reader, month: str) -> None:
    page = reader.page
    await reader.turn_to("Keys")
    used = page.locator("#usage")
    await reader.choose(used.get_by_label("By"), value="group")
    await reader.choose(used.get_by_label("Time"), label=month)
    await expect(used.locator("tbody tr")).to_have_count(1)
    await expect(used.locator("tbody tr")).to_contain_text("research")
    # Twice thirty tokens at sixty a second, and a slot of two at 3600 an hour.
    cost = used.locator("tbody tr td").last
    await expect(cost).to_have_text(re.compile(r"^[0-2]\.\d+$|^[1-9]$"))
    async with page.expect_download() as download:
        await used.get_by_role("button", name="Download CSV").click()
    table = await asyncio.to_thread((await (await download.value).path()).read_text)
    assert table.startswith("group,requests")


async def is_the_batch_in_time(reader: Reader) -> None:
    page = reader.page
    await reader.turn_to("Batches")
    await reader.click(page.locator("#batches tbody a"))
    await expect(page.locator("#batch")).to_contain_text("before the deadline")
