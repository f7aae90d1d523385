"""A real browser for tests of the dashboard: the distribution's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.async_api import (
    Browser,
    ConsoleMessage,
    Locator,
    Page,
    Route,
    async_playwright,
    expect,
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 60_000.0
"""Milliseconds to wait for what the page is to show; a slow machine may stand still for seconds."""

expect.set_options(timeout=PATIENCE)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: apt-get install chromium"
)


@dataclass  # Without slots: Playwright marks the object of a method that it calls.
class WatchedPage:
    """A page of the dashboard, and what it did that it should not."""

    page: Page
    origin: str
    trouble: list[str] = field(default_factory=list)
    """Errors of its scripts, refusals by its policy, and requests to other origins."""

    def heard(self, message: ConsoleMessage) -> None:
        """Note an error; that a key is needed or wrong is none."""
        if message.type == "error" and "status of 401" not in message.text:
            self.trouble.append(message.text)

    async def guard(self, route: Route) -> None:
        """Let requests to the gateway pass, and no others: the rest of the network is cut off."""
        if route.request.url.startswith(f"{self.origin}/"):
            await route.continue_()
        else:
            self.trouble.append(f"asked for {route.request.url}")
            await route.abort()


@contextlib.asynccontextmanager
async def a_browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def a_page(
    browser: Browser,
    url: str,
    *,
    key: str | None = None,
    path: str = "/#/",
    at: str = "",
    **context: Any,
) -> AsyncIterator[WatchedPage]:
    """The dashboard of this admin listener, opened at an address, or the page at another path.

    `context` is for Playwright's.
    """
    context = {"viewport": {"width": 1440, "height": 900}, "reduced_motion": "reduce", **context}
    opened = await browser.new_context(**context)
    opened.set_default_timeout(PATIENCE)
    page = await opened.new_page()
    watched = WatchedPage(page, url)
    page.on("pageerror", lambda error: watched.trouble.append(f"failed: {error}"))
    page.on("console", watched.heard)

    await opened.route("**/*", watched.guard)
    try:
        await page.goto(f"{url}{path}{at}")
        if key is not None:
            await open_with(page, key)
        yield watched
    finally:
        await opened.close()


@contextlib.asynccontextmanager
async def opened_at(url: str, **options: Any) -> AsyncIterator[WatchedPage]:
    async with a_browser() as browser, a_page(browser, url, **options) as watched:
        yield watched


async def open_with(page: Page, key: str, label: str = "Admin key") -> None:
    await page.get_by_label(label).fill(key)
    await press(page, "Open")


async def press(part: Page | Locator, *names: str) -> None:
    """Press the buttons of these names, one after the other."""
    for name in names:
        await part.get_by_role("button", name=name).click()


async def turn_to(page: Page, title: str) -> None:
    await page.locator("#rail").get_by_role("link", name=title).click()
    await expect(page.get_by_role("heading", level=1)).to_have_text(title)


async def confirm(page: Page, question: str) -> None:
    asked = page.locator("#confirm")
    await expect(asked).to_contain_text(question)
    await asked.get_by_role("button").last.click()
