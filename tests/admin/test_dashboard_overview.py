"""The first page of the dashboard: its figures, its problems, and the timeline of slots."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from gateway.admin.why import TIMELINE_SECONDS
from gateway.callers.keys import AdminRole
from gateway.schedule.decision_log import MOST_GRANTS, Grant
from tests.admin.browser import PATIENCE, a_browser, a_page, needs_browser
from tests.admin.test_dashboard import a_dashboard, a_fleet, node_card, opened, streams
from tests.gateways import Running
from tests.virtual import now

pytestmark = [pytest.mark.slow, needs_browser]

TRACED = float(os.environ.get("DASHBOARD_TRACE", "6"))
"""Seconds of the trace; 60 are what the docs tell."""
LONGEST_TASK = 50.0  # milliseconds of the main thread

INKS = """() => {
  const canvas = document.querySelector("#timeline canvas");
  // Until the first answer there is none.
  if (!canvas?.width) return {};
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const found = {};
  for (let place = 0; place < data.length; place += 4) {
    if (data[place + 3] === 255) {
      const ink = data.slice(place, place + 3).join();
      found[ink] = (found[ink] ?? 0) + 1;
    }
  }
  return found;
}"""
"""How many dots of the timeline have each colour."""
FIRST_CALLER, DARK_FIRST_CALLER = "9,105,218", "88,166,255"


async def inked(page: Page, colour: str, least: int = 20) -> None:
    await seen(lambda: page.evaluate(INKS), lambda dots: dots.get(colour, 0) >= least)


async def test_a_problem_is_a_line_that_unfolds_and_notices_can_be_hidden(tmp_path: Path) -> None:
    health = {"health": {"interval": 1.0, "fall": 1, "rise": 1}}
    async with a_dashboard(tmp_path, settings=health) as (running, nodes, page):
        running.gateway.fleet.drain("epyc-a-numa0")
        problems = page.locator("#problems")
        await expect(problems).to_contain_text("Nothing needs attention")
        drained = problems.get_by_text("epyc-a-numa0 is drained")
        await expect(drained).to_be_hidden()
        await problems.locator(".notices > summary").click()
        await expect(drained).to_be_visible()
        await problems.get_by_role("button", name="Hide for a day").click()
        await expect(problems).to_contain_text("hidden for a day")
        stored = await page.evaluate("JSON.stringify(localStorage)")
        assert "epyc" not in stored
        await page.reload()
        await expect(problems).to_contain_text("1 notice hidden for a day")
        await nodes["epyc-b-numa1"].kill()
        problem = problems.locator(".problem.critical, .problem.warning").first
        await expect(problem).to_contain_text("epyc-b-numa1")
        await expect(problem.locator(".remedy")).to_be_hidden()
        await problem.locator("summary").focus()
        await page.keyboard.press("Enter")
        await expect(problem.locator(".remedy")).to_be_visible()
        await expect(problem).to_contain_text("llama-gateway nodes probe")
        await problem.get_by_role("link", name="epyc-b-numa1").click()
        await expect(page.locator("#node")).to_contain_text("epyc-b-numa1")
        await page.go_back()
        await problems.get_by_role("button", name="Show").click()
        await expect(problems.locator(".notices")).to_have_count(1)
        assert await page.evaluate("localStorage.length") == 0
        await nodes["epyc-b-numa1"].revive()
        await expect(node_card(page, "epyc-b-numa1")).to_have_class(re.compile("s-ready"))
        await expect(problem).to_have_count(0)


async def test_the_timeline_draws_what_slots_do_and_tells_it_in_words(tmp_path: Path) -> None:
    async with a_dashboard(tmp_path, chats=6) as (running, nodes, page):
        picture = page.locator("#timeline")
        row = picture.locator("tbody tr", has_text="epyc-a-numa0")
        await expect(row.locator("td").nth(1)).to_have_text("2")
        await expect(picture.locator(".chip.caller")).to_have_text(["anonymous:127.0.0.1"])
        await page.emulate_media(color_scheme="dark", forced_colors="active")
        await inked(page, DARK_FIRST_CALLER)
        await page.emulate_media(color_scheme="light", forced_colors="none")
        # A node dies in mid-sentence: its streams are cut, and go on elsewhere.
        await inked(page, FIRST_CALLER)
        await nodes["epyc-a-numa0"].kill()
        await expect(row.locator("td").nth(5)).to_have_text("2")
        moved = picture.locator("tbody tr td:last-child")
        await expect(moved.filter(has_text=re.compile(r"^[1-9]")).first).to_be_attached()
        # What lies under the pointer is told, and leads to its request.
        canvas = picture.locator("canvas")
        box = await canvas.bounding_box()
        assert box is not None
        lane = running.gateway.fleet.nodes["epyc-b-numa0"]
        assert lane.slots_busy
        await canvas.hover(position={"x": box["width"] - 12, "y": 80})
        await expect(picture.locator(".tip")).to_contain_text(re.compile("epyc-.*runs"))
        await canvas.click(position={"x": box["width"] - 12, "y": 80})
        await expect(page).to_have_url(re.compile("#/requests/"))
        await expect(page.locator("#page")).to_contain_text("Attempt 1")


async def test_a_viewer_sees_the_slots_and_no_callers(tmp_path: Path) -> None:
    async with a_dashboard(tmp_path, AdminRole.VIEWER, chats=3) as (_, _, page):
        await inked(page, FIRST_CALLER)
        await expect(page.locator("#timeline .caller")).to_have_count(0)
        await expect(page.locator("#figures h2").last).to_have_text("Spent in the last hour")


def fill(running: Running) -> None:
    """Have the gateway remember ten full minutes of every slot, as many attempts as it can."""
    scheduler = running.gateway.scheduler
    nodes, present, numbers = list(running.gateway.fleet.nodes.values()), now(), itertools.count()
    grants = []
    lanes = [(node, slot) for node in nodes for slot in range(node.slots_now)]
    seconds = TIMELINE_SECONDS * len(lanes) / (MOST_GRANTS - 200)
    for node, slot in lanes:
        at = present - TIMELINE_SECONDS + slot
        while at + seconds < present:
            number = next(numbers)
            grant = Grant(f"req_{number}", at, at, -number, "demo", "cpu", f"caller-{number % 12}")
            grant.node, grant.resumes = node.name, number % 10 == 1
            grant.content_began(at + seconds / 4)
            grant.ended("reset" if number % 10 == 0 else "ok", 200, at + seconds)
            grants.append(grant)
            at += seconds
    scheduler.decision_log.restore(grants)


async def test_with_a_hundred_slots_no_task_of_the_page_is_long(tmp_path: Path) -> None:
    fleet: dict[str, Any] = {
        "hosts": "abcdefghij", "slots": 5, "prefill_tps": 30.0, "decode_tps": 2.0,
        "answer_tokens": 16,
    }  # fmt: skip
    async with a_fleet(tmp_path, **fleet) as (running, _):
        fill(running)
        async with (
            streams(running, 30),
            a_browser() as browser,
            a_page(browser, running.admin_url) as watched,
        ):
            page = watched.page
            await inked(page, FIRST_CALLER, 2000)
            await expect(page.locator(".uplot").nth(3)).to_be_visible()
            await browser.start_tracing(page=page, categories=["toplevel", "devtools.timeline"])
            await page.wait_for_timeout(1000 * TRACED)
            tasks = main_tasks(json.loads(await browser.stop_tracing()))
            assert watched.trouble == []
    print(f"\n{len(tasks)} tasks in {TRACED:.0f} s; the longest in ms: {tasks[-5:]}", flush=True)
    assert len(tasks) > 10 * TRACED
    assert tasks[-1] < LONGEST_TASK


def main_tasks(trace: dict[str, Any]) -> list[float]:
    """The milliseconds of CPU time of each task of the main thread, the longest last."""
    events = trace["traceEvents"]
    main = {
        (one["pid"], one["tid"])
        for one in events
        if one["name"] == "thread_name" and one["args"]["name"] == "CrRendererMain"
    }
    return sorted(
        round(one.get("tdur", one.get("dur", 0)) / 1000, 1)
        for one in events
        if one["name"] in {"RunTask", "ThreadControllerImpl::RunTask"}
        and (one["pid"], one["tid"]) in main
    )


EDGE = "136,150,165"
WRITING, DARK_WRITING = "32,120,184", "74,163,223"

INK = """(name) => {
  const canvas = document.querySelector(".wall canvas");
  const node = document.querySelector(`[data-node="${name}"]`)?.getBoundingClientRect();
  // Until the wall is laid out, nothing is drawn.
  if (!canvas?.width || !node?.width) return [];
  const scale = canvas.width / canvas.clientWidth, corner = canvas.getBoundingClientRect();
  const { data } = canvas.getContext("2d").getImageData((node.left - corner.left) * scale,
    (node.top - corner.top) * scale, node.width * scale, node.height * scale);
  const colours = new Set();
  for (let place = 0; place < data.length; place += 4) {
    if (data[place + 3] === 255) colours.add(data.slice(place, place + 3).join());
  }
  return [...colours];
}"""
"""The colours that the wall's canvas has where a node stands."""


async def seen(look: Callable[[], Any], is_right: Callable[[Any], bool]) -> None:
    found = None
    try:
        async with asyncio.timeout(PATIENCE / 1000):
            while not is_right(found := await look()):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"at last: {found}") from None


async def drawn(page: Page, *names: str, colour: str = EDGE) -> None:
    async def colours() -> set[str]:
        return {found for name in names for found in await page.evaluate(INK, name)}

    await seen(colours, lambda found: colour in found)


@contextlib.asynccontextmanager
async def a_wall(folder: Path, **node: Any) -> AsyncIterator[tuple[Running, Page]]:
    async with (
        a_fleet(folder, **node) as (running, _),
        opened(running, at="nodes", color_scheme="light") as page,
    ):
        await page.locator("#nodes select").select_option("dots")
        await expect(page.locator(".dots .node")).to_have_count(4)
        await page.wait_for_selector(".wall canvas")
        yield running, page


async def test_the_wall_draws_the_slots_of_each_node_and_follows_them(tmp_path: Path) -> None:
    async with a_wall(tmp_path) as (running, page):
        nodes = list(running.gateway.fleet.nodes)
        for name in nodes:
            await drawn(page, name)
        running.gateway.fleet.drain("epyc-a-numa0")
        async with streams(running, 2):
            writing = [name for name in nodes if name != "epyc-a-numa0"]
            await drawn(page, *writing, colour=WRITING)
            assert WRITING not in await page.evaluate(INK, "epyc-a-numa0")
            await page.get_by_role("button", name="Colours: auto").click()
            await page.get_by_role("button", name="Colours: light").click()
            await drawn(page, *writing, colour=DARK_WRITING)
        await page.get_by_role("button", name="Colours: dark").click()
        # A smaller page places the nodes elsewhere, and a search leaves one at the first place.
        await page.set_viewport_size({"width": 390, "height": 844})
        for name in nodes:
            await drawn(page, name)
        await page.locator("#nodes input").fill("epyc-b-numa1")
        await expect(page.locator(".dots .node")).to_have_count(1)
        await drawn(page, "epyc-b-numa1")
        await page.locator(".dots .node").click()
        await expect(page.locator("#node")).to_contain_text("epyc-b-numa1")


@pytest.mark.parametrize("size", ["dots", "tiles"])
async def test_the_tab_key_stops_once_and_arrows_go_on(tmp_path: Path, size: str) -> None:
    async with a_wall(tmp_path) as (_, page):
        names = ["epyc-a-numa0", "epyc-a-numa1", "epyc-b-numa0", "epyc-b-numa1"]
        chosen = page.locator("#nodes select")
        await chosen.select_option(size)
        await chosen.focus()
        for key, name in (
            *(("Tab", names[0]), ("ArrowLeft", names[0]), ("ArrowRight", names[1])),
            *(("End", names[3]), ("Home", names[0]), ("ArrowRight", names[1])),
        ):
            await page.keyboard.press(key)
            await expect(page.locator(f'.{size} [data-node="{name}"] a')).to_be_focused()
        await page.keyboard.press("Shift+Tab")
        await expect(chosen).to_be_focused()
        for _ in range(2):
            await page.keyboard.press("Tab")
        await expect(page.locator("#nodes :focus")).to_have_count(0)
        # The node that had the focus goes: the list can be reached again.
        await page.locator("#nodes input").fill("epyc-b")
        await expect(page.locator(f".{size} [data-node]")).to_have_count(2)
        await chosen.focus()
        await page.keyboard.press("Tab")
        await expect(page.locator(f'.{size} [data-node="{names[2]}"] a')).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("#node")).to_contain_text(names[2])
