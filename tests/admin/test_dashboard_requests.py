"""What the page tells of requests: those that wait, those that run, and a chat that has waited."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Locator, expect

from gateway.terms import Priority
from tests.admin.browser import PATIENCE, needs_browser
from tests.admin.test_dashboard import a_dashboard, opened
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway, until

pytestmark = [pytest.mark.slow, needs_browser]


SECONDS = re.compile(r"^\d+(\.\d)? (s|min)$")
NOT_KNOWN = "\u2013"
HEADINGS = (
    *("Request", "State", "Class", "Model", "Caller", "Node", "Age", "TTFT", "Tokens", "Tokens/s"),
    "Actions",
)


def cell(row: Locator, heading: str) -> Locator:
    return row.locator("th, td").nth(HEADINGS.index(heading))


async def test_waiting_requests_tell_their_place_and_their_expected_start(tmp_path: Path) -> None:
    async with a_dashboard(tmp_path, at="requests", hosts="a", answer_tokens=60, chats=7) as (
        _,
        _,
        page,
    ):
        headings = page.locator("#requests thead th")
        await expect(headings).to_have_text(HEADINGS)
        waiting = page.locator("#requests tr.waiting")
        # Four run, three wait: each has a place of its own, the first to start above.
        for place in (1, 2, 3):
            state = cell(waiting.nth(place - 1), "State")
            await expect(state).to_have_text(
                re.compile(rf"^waiting place {place}, in \d+(\.\d)? (s|min)$")
            )
        await expect(cell(waiting.first, "Node")).to_have_text(NOT_KNOWN)
        await expect(cell(waiting.first, "TTFT")).to_have_text(NOT_KNOWN)
        await expect(cell(waiting.first, "Tokens/s")).to_have_text(NOT_KNOWN)


async def test_requests_that_write_tell_their_first_token_and_their_speed(tmp_path: Path) -> None:
    async with a_dashboard(tmp_path, at="requests", hosts="a", chats=1) as (running, _, page):
        row = page.locator("#requests tr.writing").first
        await expect(cell(row, "TTFT")).to_have_text(SECONDS)
        # The node writes 25 tokens a second.
        await until_between(cell(row, "Tokens/s"), 20.0, 30.0)
        (in_flight,) = running.gateway.registry
        ttft = in_flight.record.ttft
        assert ttft is not None
        assert await cell(row, "TTFT").inner_text() == f"{ttft:.1f} s"
        assert await cell(row, "Node").inner_text() == in_flight.record.node
        tokens = cell(row, "Tokens")
        await expect(tokens).to_have_text(re.compile(r"^\d+ \+ [1-9]\d*$"))


async def until_between(shown: Locator, least: float, most: float) -> None:
    """Wait until it shows a number between these."""
    async with asyncio.timeout(PATIENCE / 1000):
        while True:
            text = await shown.inner_text()
            if text != NOT_KNOWN and least <= float(text) <= most:
                return
            await asyncio.sleep(0.05)


async def test_the_playground_tells_its_place_and_how_long_it_has_waited(tmp_path: Path) -> None:
    node: dict[str, Any] = {"slots": 1, "decode_tps": 20.0, "answer_tokens": 2000}
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
    async with (
        running_gateway(tmp_path, [EmulatedNode(**node)]) as running,
        opened(running, at="playground") as page,
    ):
        async with running.client.stream("POST", "/v1/chat/completions", json=body) as busy:
            answer = busy.aiter_bytes()
            await anext(answer)
            await page.get_by_label("Message").fill("Hello there")
            await page.get_by_label("Most tokens").fill("3")
            await page.get_by_role("button", name="Send").click()
            await until(lambda: running.gateway.scheduler.depths()[Priority.NORMAL] == 1)
            way = page.locator(".turn.assistant .way")
            told = re.compile(r"^Place 1 in the queue, waited [1-9]\d*(\.\d)? s")
            await expect(way).to_have_text(told)
        await expect(way).to_contain_text("node-0 (cpu) answered")
        waited = re.search(r"waited (\d+(?:\.\d)?) s", await way.inner_text())
        assert waited is not None
        assert float(waited[1]) >= 1.0
