"""What the page tells of requests: those that wait, run and have ended, and each by itself."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Locator, Page, expect

from gateway.terms import Priority
from tests.admin.browser import PATIENCE, needs_browser, opened_at
from tests.admin.test_dashboard import a_dashboard, a_fleet, opened
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until

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
        waiting = page.locator("#requests tr:has(.phase.waiting)")
        # Four run, three wait: each has a place of its own, the first to start above.
        for place in (1, 2, 3):
            state = cell(waiting.nth(place - 1), "State")
            await expect(state).to_have_text(
                re.compile(rf"^waiting place {place}, in \d+(\.\d)? (s|min)$")
            )
        await expect(cell(waiting.first, "Node")).to_have_text(NOT_KNOWN)
        await expect(cell(waiting.first, "TTFT")).to_have_text(NOT_KNOWN)
        await expect(cell(waiting.first, "Tokens/s")).to_have_text(NOT_KNOWN)
        await waiting.first.get_by_role("link", name="Why request").focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("#request")).to_contain_text("It waits for 2 nodes")


async def test_the_filters_hold_for_what_runs_too_as_far_as_it_has_them(tmp_path: Path) -> None:
    async with a_dashboard(tmp_path, at="requests", hosts="a", chats=6) as (_, _, page):
        rows = page.locator("#requests tbody tr")
        await expect(rows).to_have_count(6)
        await page.get_by_label("Class").select_option("premium")
        await expect(rows).to_have_count(2)
        await expect(cell(rows.first, "Class")).to_have_text("premium")
        await page.get_by_label("Slower than").fill("3600")
        await page.keyboard.press("Enter")
        await expect(page.locator("#requests")).to_contain_text("None that waits or runs is like")
        # How it ends can not be said of one that runs.
        await page.get_by_label("Outcome").select_option("failed")
        await expect(page.locator("#requests")).to_have_count(0)


async def test_a_filter_that_can_not_be_read_is_told(tmp_path: Path) -> None:
    async with (
        a_fleet(tmp_path, hosts="a") as (running, _),
        opened_at(running.admin_url, at="requests") as watched,
    ):
        await watched.page.get_by_label("Since").fill("yesterday")
        await watched.page.keyboard.press("Enter")
        alert = watched.page.get_by_role("alert")
        await expect(alert).to_contain_text("'yesterday' is no time")


async def test_requests_that_write_tell_their_first_token_and_their_speed(tmp_path: Path) -> None:
    async with a_dashboard(tmp_path, at="requests", hosts="a", chats=1) as (running, _, page):
        row = page.locator("#requests tr:has(.phase.writing)").first
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
        await expect(way).to_contain_text("prompt tokens cached")
        await expect(page.locator(".turn.assistant .text")).not_to_be_empty()
        waited = re.search(r"waited (\d+(?:\.\d)?) s", await way.inner_text())
        assert waited is not None
        assert float(waited[1]) >= 1.0


async def ask(
    running: Running, name: str, class_: str = "normal", *, key: str = "", **body: Any
) -> None:
    """A chat with this `X-Request-ID`, and its row in the ledger."""
    ledger = running.gateway.ledger
    assert ledger is not None
    written = ledger.written
    asked = {"messages": [{"role": "user", "content": "Say something."}], "stream": True, **body}
    headers = {"x-request-id": name, "x-priority": class_}
    if key:
        headers["authorization"] = f"Bearer {key}"
    await running.client.post("/v1/chat/completions", json=asked, headers=headers)
    await until(lambda: ledger.written > written)


def names(page: Page) -> Locator:
    return page.locator("#ended tbody th code")


async def test_what_has_ended_is_listed_with_its_life_and_the_address_says_which(
    tmp_path: Path,
) -> None:
    async with a_fleet(tmp_path, hosts="a", answer_tokens=20, decode_tps=40.0) as (running, nodes):
        await ask(running, "plain")
        await ask(running, "of-premium", "premium")
        for node in nodes.values():
            node.faults.next("status", 9, status=400)
        await ask(running, "went-wrong", max_tokens=3)
        async with opened(running, at="requests?class=premium") as page:
            await expect(names(page)).to_have_text(["of-premium"])
            await expect(page.get_by_label("Class")).to_have_value("premium")
            row = page.locator("#ended tbody tr")
            await expect(row).to_contain_text("200 ok")
            # Twenty tokens at forty a second; the numbers are there as text, too.
            await expect(row.locator("td").nth(3)).to_have_text(re.compile(r"^0\.\d s writing$"))
            await expect(row.locator("line.writing")).to_have_count(1)
            # The fields change the address, and so does a word for a common question.
            await page.get_by_label("Class").select_option("any")
            await expect(names(page)).to_have_text(["went-wrong", "of-premium", "plain"])
            await page.get_by_label("Slower than").fill("0.3")
            await page.keyboard.press("Enter")
            await expect(page).to_have_url(re.compile(r"#/requests\?slower=0\.3$"))
            await expect(names(page)).to_have_text(["of-premium", "plain"])
            await page.get_by_role("link", name="Failed today").click()
            await expect(names(page)).to_have_text(["went-wrong"])
            await expect(page.get_by_label("Outcome")).to_have_value("failed")
            await expect(page.locator("#ended .bad")).to_contain_text("400")
            await page.go_back()
            await expect(names(page)).to_have_text(["of-premium", "plain"])
            await expect(page.get_by_label("Slower than")).to_have_value("0.3")


LIVES: list[tuple[dict[str, float], list[tuple[str, float, float]], str]] = [
    # A row of an older version.
    ({}, [("unknown", 0, 6)], "6.0 s not known"),
    # A stream that was tried twice before its first token.
    (
        {"wait": 1, "ttft": 2.5, "prefill": 1, "decode": 3.5},
        [("queue", 0, 1), ("other", 1, 1.5), ("reading", 1.5, 2.5), ("writing", 2.5, 6)],
        "1.0 s waiting, 1.0 s reading, 3.5 s writing, 0.5 s between",
    ),
    # An answer in one piece: when it began is not known, and what its node said is.
    (
        {"wait": 1, "prefill": 2, "decode": 3},
        [("queue", 0, 1), ("reading", 1, 3), ("writing", 3, 6)],
        "1.0 s waiting, 2.0 s reading, 3.0 s writing",
    ),
    # It waited, and failed.
    ({"wait": 4}, [("queue", 0, 4), ("other", 4, 6)], "4.0 s waiting, 2.0 s between"),
    # Several prompts at one time read for longer than all of it took.
    (
        {"wait": 0, "ttft": 2, "prefill": 9, "decode": 20},
        [("reading", 0, 2), ("writing", 2, 6)],
        "2.0 s reading, 4.0 s writing",
    ),
]


async def test_the_parts_of_a_life_add_up_to_it_whatever_is_known_of_them(tmp_path: Path) -> None:
    async with a_dashboard(tmp_path, at="requests", hosts="a") as (_, _, page):
        for known, parts, words in LIVES:
            times = ("wait", "ttft", "prefill", "decode")
            row = {f"{name}_seconds": known.get(name) for name in times}
            found = await page.evaluate(
                """row => import("/dashboard/life.js").then(({ lifeOf, wordsOf }) =>
                [lifeOf(row), wordsOf(lifeOf(row), row)])""",
                {**row, "seconds": 6, "attempts": 1, "resumptions": None},
            )
            assert found == [[list(part) for part in parts], words]


async def test_a_page_of_a_hundred_leads_to_the_next_and_back(tmp_path: Path) -> None:
    quick: dict[str, Any] = {"answer_tokens": 1, "decode_tps": 5000.0, "prefill_tps": 50_000.0}
    async with a_fleet(tmp_path, hosts="a", **quick) as (running, _):
        for number in range(21):
            await asyncio.gather(*(ask(running, f"r{number}-{one}") for one in range(5)))
        async with opened(running, at="requests?class=normal") as page:
            await expect(names(page)).to_have_count(100)
            first = await names(page).all_inner_texts()
            await page.get_by_role("link", name="Next page").click()
            await expect(names(page)).to_have_count(5)
            assert not set(await names(page).all_inner_texts()) & set(first)
            await expect(page.get_by_label("Class")).to_have_value("normal")
            # What is here has nothing to do with what runs now.
            await expect(page.locator("#requests")).to_have_count(0)
            await expect(page.get_by_role("link", name="Next page")).to_have_count(0)
            await page.get_by_role("link", name="First page").click()
            await expect(names(page)).to_have_text(first)


async def test_a_request_is_followed_to_its_end_and_told_beside_what_was_predicted(
    tmp_path: Path,
) -> None:
    async with a_fleet(tmp_path, hosts="a", answer_tokens=300, decode_tps=25.0) as (running, _):
        asked = asyncio.create_task(ask(running, "mine"))
        await until(lambda: len(running.gateway.registry) == 1)
        async with opened(running, at="requests/mine") as page:
            told = page.locator("#request")
            await expect(told.get_by_role("heading", level=2)).to_have_text("Request mine")
            await expect(told).to_contain_text("running for")
            # By itself.
            await expect(told).to_contain_text("finished, 200 after")
            await expect(told.get_by_role("button", name="Cancel")).to_have_count(0)
            await expect(told).to_contain_text(re.compile(r"Its life: .*1\d s writing"))
            compared = told.get_by_role("region", name="Nodes that were compared")
            await expect(compared.locator("tbody tr")).to_have_count(2)
            await expect(compared.locator("tbody tr").first).to_contain_text("chosen")
            await expect(compared.locator("line.writing")).to_have_count(2)
            course = told.get_by_role("region", name="What was predicted, and what came")
            await expect(course.locator("tbody tr").first.locator("line.writing")).to_have_count(2)
            await expect(course).to_contain_text(re.compile(r"Answer tokens\s*\d+\s*300"))
            await told.get_by_role("link", name="demo").click()
            await expect(page).to_have_url(re.compile("#/models/demo$"))
        await asked
