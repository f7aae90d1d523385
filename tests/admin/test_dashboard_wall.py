"""The wall of the dashboard, whose slots one canvas draws over the nodes, in a real browser."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from gateway.nodes.node import Node
from tests.admin.browser import PATIENCE, needs_browser, opened_at
from tests.admin.test_dashboard import a_fleet, opened, streams
from tests.gateways import Running, running_gateway
from tests.nodes.build import take

pytestmark = [pytest.mark.slow, needs_browser]

EDGE, READING = "136,150,165", "224,155,27"
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

SIDES = """(name) => {
  const canvas = document.querySelector(".wall canvas");
  const node = document.querySelector(`[data-node="${name}"]`)?.getBoundingClientRect();
  // Until the wall is laid out, nothing is drawn.
  if (!canvas?.width || !node?.width) return [0, 1];
  const corner = canvas.getBoundingClientRect();
  const across = canvas.width / corner.width, down = canvas.height / corner.height;
  const { data, width } = canvas.getContext("2d").getImageData((node.left - corner.left) * across,
    (node.top - corner.top) * down, node.width * across, node.height * down);
  const inked = [];
  for (let place = 0; place < data.length; place += 4) {
    if (data[place + 3] > 60) {
      const isReading = data[place] - data[place + 2] > 80;
      inked.push([(place / 4) % width, isReading]);
    }
  }
  inked.sort((a, b) => a[0] - b[0]);
  const third = Math.floor(inked.length / 3);
  const busy = (part) => part.filter(([, isReading]) => isReading).length;
  const share = (part) => busy(part) / Math.max(1, part.length);
  return [share(inked.slice(0, third)), share(inked.slice(-third))];
}"""
"""The share of what is drawn that is a busy slot: at the left side of a node, and at the right."""


async def seen(look: Callable[[], Any], is_right: Callable[[Any], bool]) -> None:
    """Wait until what is seen is right."""
    found = None
    try:
        async with asyncio.timeout(PATIENCE / 1000):
            while not is_right(found := await look()):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"at last: {found}") from None


async def inked(page: Page, *names: str, colour: str = EDGE) -> None:
    """Wait until one of these nodes has the colour."""

    async def colours() -> set[str]:
        return {found for name in names for found in await page.evaluate(INK, name)}

    await seen(colours, lambda found: colour in found)


def keep_busy(node: Node, slots: int) -> None:
    for _ in range(slots):
        take(node, expected_prefill=300.0, expected_total=900.0)


@contextlib.asynccontextmanager
async def a_wall(folder: Path, **node: Any) -> AsyncIterator[tuple[Running, Page]]:
    """The wall over four nodes."""
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
            await inked(page, name)
        running.gateway.fleet.drain("epyc-a-numa0")
        async with streams(running, 2):
            writing = [name for name in nodes if name != "epyc-a-numa0"]
            await inked(page, *writing, colour=WRITING)
            assert WRITING not in await page.evaluate(INK, "epyc-a-numa0")
            await page.get_by_role("button", name="Colours: auto").click()
            await page.get_by_role("button", name="Colours: light").click()
            await inked(page, *writing, colour=DARK_WRITING)
        await page.get_by_role("button", name="Colours: dark").click()
        # A smaller page places the nodes elsewhere, and a search leaves one at the first place.
        await page.set_viewport_size({"width": 390, "height": 844})
        for name in nodes:
            await inked(page, name)
        await page.locator("#nodes input").fill("epyc-b-numa1")
        await expect(page.locator(".dots .node")).to_have_count(1)
        await inked(page, "epyc-b-numa1")
        await page.locator(".dots .node").click()
        await expect(page.locator("#node")).to_contain_text("epyc-b-numa1")


async def test_nodes_that_come_beside_a_single_one_have_their_own_places(tmp_path: Path) -> None:
    async with a_wall(tmp_path) as (_, page):
        # The wall is laid out anew with one node alone.
        await page.locator("#nodes input").fill("nobody")
        await expect(page.locator(".dots")).to_have_count(0)
        await page.locator("#nodes input").fill("epyc-a-numa0")
        await inked(page, "epyc-a-numa0")
        await page.locator("#nodes input").fill("epyc-a")
        await expect(page.locator(".dots .node")).to_have_count(2)
        await inked(page, "epyc-a-numa1")
        await page.locator("#nodes input").fill("")
        await inked(page, "epyc-b-numa1")


async def test_a_node_with_more_slots_than_fit_shows_the_right_share_of_them(
    tmp_path: Path,
) -> None:
    async with a_wall(tmp_path, slots=64) as (running, page):
        name = "epyc-a-numa0"
        keep_busy(running.gateway.fleet.nodes[name], 32)
        await seen(
            lambda: page.evaluate(SIDES, name),
            lambda shares: shares[0] > 0.5 and shares[1] < 0.1,
        )


@pytest.mark.parametrize("size", ["dots", "tiles"])
async def test_the_tab_key_stops_once_and_the_arrows_go_from_node_to_node(
    tmp_path: Path, size: str
) -> None:
    async with a_wall(tmp_path) as (_, page):
        names = ["epyc-a-numa0", "epyc-a-numa1", "epyc-b-numa0", "epyc-b-numa1"]
        await page.locator("#nodes select").select_option(size)
        await page.set_viewport_size({"width": 390, "height": 844})

        async def press(key: str, name: str) -> None:
            await page.keyboard.press(key)
            focused = page.locator(f'.{size} [data-node="{name}"] a')
            await expect(focused).to_be_focused()

        await page.locator("#nodes select").focus()
        await press("Tab", names[0])
        await press("ArrowLeft", names[0])
        await press("ArrowRight", names[1])
        await press("End", names[3])
        columns = "getComputedStyle(document.querySelector('.dots, .tiles')).gridTemplateColumns"
        across = len((await page.evaluate(columns)).split())
        await press("ArrowUp", names[3 - across] if across <= 3 else names[3])
        await press("Home", names[0])
        await press("ArrowRight", names[1])
        await page.keyboard.press("Shift+Tab")
        await expect(page.locator("#nodes select")).to_be_focused()
        await press("Tab", names[1])
        await page.keyboard.press("Tab")
        await expect(page.locator("#nodes :focus")).to_have_count(0)
        await page.locator("#nodes select").focus()
        await press("Tab", names[1])
        await page.keyboard.press("Enter")
        await expect(page.locator("#node")).to_contain_text(names[1])
        await page.go_back()
        # The node that has the focus goes: the list can be reached again.
        await page.locator("#nodes input").fill("epyc-b")
        await expect(page.locator(f".{size} [data-node]")).to_have_count(2)
        await page.locator("#nodes select").focus()
        await press("Tab", names[2])


async def test_the_slots_keep_their_colours_where_the_system_forces_its_own(tmp_path: Path) -> None:
    async with a_wall(tmp_path) as (running, page):
        name = "epyc-a-numa0"
        keep_busy(running.gateway.fleet.nodes[name], 1)
        await inked(page, name, colour=READING)
        for forced in ("active", "none"):
            await page.emulate_media(forced_colors=forced)
            # Another width: all is drawn anew.
            await page.set_viewport_size(
                {"width": 800 if forced == "active" else 900, "height": 700}
            )
            await inked(page, name, colour=READING)


async def test_the_printed_wall_has_its_slots_as_elements(tmp_path: Path) -> None:
    """A page of paper is narrower: it would have the nodes elsewhere than the canvas."""
    async with a_wall(tmp_path, slots=64) as (running, page):
        name = "epyc-a-numa0"
        keep_busy(running.gateway.fleet.nodes[name], 32)
        await inked(page, "epyc-b-numa0")
        busy = page.locator(f'[data-node="{name}"] a[aria-label*="32 reading"]')
        await expect(busy).to_be_visible()
        await page.evaluate(
            """addEventListener("beforeprint", () => {
              window.printed = [...document.querySelectorAll(".dots .cell")].map(
                (cell) => cell.classList[1]).join(""); })"""
        )
        await page.pdf()
        # Of 64 slots a sample in which half are busy.
        assert await page.evaluate("window.printed") == "rrff" + 3 * "ffff"
        await expect(page.locator(".dots .cell")).to_have_count(0)
        await inked(page, "epyc-b-numa1")


async def test_a_long_wall_is_no_longer_than_what_browsers_draw(tmp_path: Path) -> None:
    nodes = [
        {"name": f"n{number}", "url": f"http://127.0.0.1:9/{number}", "slots": 2, "model": "m",
         "enabled": False}
        for number in range(1000)
    ]  # fmt: skip
    narrow: dict[str, Any] = {"viewport": {"width": 150, "height": 400}, "device_scale_factor": 3}
    async with (
        running_gateway(tmp_path, nodes, wait_ready=False) as running,
        opened_at(running.admin_url, at="nodes", **narrow) as watched,
    ):
        page = watched.page
        await page.wait_for_selector(".wall canvas")
        keep_busy(running.gateway.fleet.nodes["n999"], 2)
        await seen(lambda: page.evaluate(SIDES, "n999"), lambda shares: min(shares) > 0)
        sides = "(({ width, height }) => [width, height])(document.querySelector('.wall canvas'))"
        assert max(await page.evaluate(sides)) <= 32_767
        assert watched.trouble == []
