"""The addresses of the dashboard's pages and of the things on them, and the way back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.admin.browser import needs_browser, turn_to
from tests.admin.test_dashboard import a_dashboard, a_fleet, opened

pytestmark = [pytest.mark.slow, needs_browser]


async def at(page: Page, address: str) -> None:
    """Wait until the page is at the address."""
    await expect(page).to_have_url(re.compile(rf"/#/{re.escape(address)}$"))


async def test_each_page_has_an_address_a_title_and_the_way_back(tmp_path: Path) -> None:
    async with a_dashboard(tmp_path, hosts="a") as (_, _, page):
        await expect(page).to_have_title("Overview · llama-gateway")
        for title in ("Nodes", "Requests", "Queue", "Models", "Playground"):
            await turn_to(page, title)
            await at(page, title.lower())
            await expect(page).to_have_title(f"{title} · llama-gateway")
            await expect(page.locator("#rail [aria-current=page]")).to_have_text(title)
            await expect(page.locator("#page")).to_be_focused()
        await page.go_back()
        await at(page, "models")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Models")
        await page.go_forward()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Playground")


async def test_a_node_has_a_page_from_which_the_way_back_leads_to_where_the_reader_was(
    tmp_path: Path,
) -> None:
    async with a_fleet(tmp_path, hosts="a") as (running, _):
        async with opened(running) as page:
            name, shown = "epyc-a-numa1", page.locator("#node")
            await page.locator(f'[data-node="{name}"] a').click()
            await at(page, f"nodes/{name}")
            await expect(page).to_have_title(f"{name} · Nodes · llama-gateway")
            await page.go_back()
            await expect(page.locator("#charts")).to_be_attached()
            await expect(shown).to_have_count(0)
        # Sent to a colleague, it opens the same.
        async with opened(running, at=f"nodes/{name}") as page:
            await expect(page.locator("#node")).to_contain_text("NUMA node 1")
            await expect(page.locator("#rail [aria-current=page]")).to_have_text("Nodes")
            await page.get_by_role("link", name="All nodes").click()
            await at(page, "nodes")


async def test_what_is_looked_for_is_in_the_address(tmp_path: Path) -> None:
    async with a_fleet(tmp_path) as (running, _):
        async with opened(running, at="nodes") as page:
            await page.keyboard.press("/")
            await page.keyboard.type("epyc-b")
            await page.locator("#nodes select").select_option("tiles")
            await at(page, "nodes?find=epyc-b&size=tiles")
            address = page.url.partition("#/")[2]
        async with opened(running, at=address) as page:
            await expect(page.locator(".tiles .node")).to_have_count(2)
            await expect(page.locator("#nodes input")).to_have_value("epyc-b")
            await page.locator(".tiles .node").first.get_by_role("link").click()
            await expect(page.locator("#node")).to_be_visible()
            await page.go_back()
            await at(page, address)


async def test_the_keyboard_reaches_the_page_past_the_rail(tmp_path: Path) -> None:
    async with a_dashboard(tmp_path, hosts="a") as (_, _, page):
        await turn_to(page, "Nodes")
        await page.reload()
        await expect(page.locator("#rail [aria-current]")).to_be_visible()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("#page")).to_be_focused()
        await at(page, "nodes")
