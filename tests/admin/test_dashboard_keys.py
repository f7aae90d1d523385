"""Keys and usage on the dashboard, in a real browser: a key's life, groups, limits and reports."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from gateway.callers.keys import AdminRole, hash_key, new_key
from tests.admin.browser import needs_browser, opened_at
from tests.admin.test_dashboard import ADMIN, KEYS
from tests.callers.metered_gateway import recorded
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway

pytestmark = [pytest.mark.slow, needs_browser]

OWNER = new_key("owner")
SETTINGS: dict[str, Any] = {
    "admin": ADMIN,
    "keys": [
        {"id": "owner", "sha256": OWNER.sha256, "name": "Owner", "group": "team",
         "limits": {"rpm": 10}},
    ],
    "groups": {"team": {"limits": {"budget": "5/month"}}},
}  # fmt: skip


@contextlib.asynccontextmanager
async def a_gateway(folder: Path, chats: int = 0, **node: Any) -> AsyncIterator[Running]:
    """A gateway over a node with a price; the owner has had so many chats."""
    async with EmulatedNode(answer_tokens=8, **node) as one:
        spec = {"name": "node-0", "url": one.url, "cost_per_hour": 3.0}
        async with running_gateway(folder, [spec], SETTINGS) as running:
            for _ in range(chats):
                assert await status_with(running, OWNER.text) == 200
            await recorded(running, chats)
            yield running


@contextlib.asynccontextmanager
async def keys_page(
    running: Running, role: AdminRole = AdminRole.ADMIN, at: str = "keys", **context: Any
) -> AsyncIterator[Page]:
    async with opened_at(running.admin_url, key=KEYS[role].text, at=at, **context) as watched:
        yield watched.page
        # The browser, too, tells of a form that was refused.
        assert [one for one in watched.trouble if "status of 400" not in one] == []


async def status_with(running: Running, key: str) -> int:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    headers = {"authorization": f"Bearer {key}"}
    sent = await running.client.post("/v1/chat/completions", json=body, headers=headers)
    return sent.status_code


async def secret_of(page: Page) -> str:
    key = await page.locator(".secret code").inner_text()
    await page.get_by_role("button", name="I have it").click()
    await expect(page.locator(".secret")).to_have_count(0)
    return key


async def test_a_key_is_made_limited_rotated_and_revoked(tmp_path: Path) -> None:
    async with a_gateway(tmp_path) as running, keys_page(running) as page:
        await expect(page.locator("#keys tbody tr")).to_have_count(1)
        await page.get_by_role("button", name="Make a key").click()
        form = page.get_by_role("form", name="A new key")
        await expect(form.get_by_label("Name", exact=True)).to_be_focused()
        await form.get_by_label("Name", exact=True).fill("alice")
        await form.get_by_label("Requests a minute").fill("20")
        await page.keyboard.press("Enter")
        made = await secret_of(page)
        assert await status_with(running, made) == 200
        await page.get_by_role("link", name="alice").click()
        await expect(page).to_have_url(re.compile(r"#/keys/alice$"))
        own = page.locator("#key")
        await expect(own).to_contain_text("1 of 20 used, 19 left")
        # The secret is nowhere any more.
        assert hash_key(made).id in await page.content()
        assert made not in await page.content()

        await own.get_by_role("button", name="Change").click()
        form = page.get_by_role("form", name="Change alice")
        await expect(form.get_by_label("Requests a minute")).to_have_value("20")
        await form.get_by_label("Requests a minute").fill("30")
        await form.get_by_label("Money").fill("2/day")
        await form.get_by_label("Highest class").select_option("premium")
        await form.get_by_role("button", name="Change it").click()
        await expect(own).to_contain_text("of 30 used")
        await expect(own).to_contain_text("at most premium")
        await expect(own.get_by_role("meter", name="Money a day")).to_be_visible()

        await own.get_by_role("button", name="Rotate").click()
        await page.get_by_role("button", name="Rotate it").click()
        fresh = await secret_of(page)
        await expect(own).to_contain_text("Old secret")
        assert (await status_with(running, made), await status_with(running, fresh)) == (200, 200)

        await own.get_by_role("button", name="Revoke").click()
        await page.get_by_role("button", name="Leave it").click()
        await expect(own.get_by_role("button", name="Revoke")).to_be_focused()
        assert await status_with(running, fresh) == 200
        await own.get_by_role("button", name="Revoke").click()
        await page.get_by_role("button", name="Revoke it").click()
        await expect(own.get_by_role("heading", name="alice")).to_contain_text("revoked")
        await expect(own.get_by_role("button", name="Revoke")).to_have_count(0)
        assert await status_with(running, fresh) == 401


async def test_a_secret_is_gone_with_its_page_and_a_refusal_keeps_the_form(tmp_path: Path) -> None:
    async with a_gateway(tmp_path) as running, keys_page(running) as page:
        await page.get_by_role("button", name="Make a key").click()
        form = page.get_by_role("form", name="A new key")
        await form.get_by_label("Name", exact=True).fill("Owner")
        await form.get_by_role("button", name="Make it").click()
        await expect(page.locator("#toasts")).to_contain_text("called 'Owner' already")
        await form.get_by_label("Name", exact=True).fill("bob")
        await form.get_by_role("button", name="Make it").click()
        key = await page.locator(".secret code").inner_text()
        assert await status_with(running, key) == 200
        await page.locator("#rail").get_by_role("link", name="Overview").click()
        await page.go_back()
        await expect(page.get_by_role("link", name="bob")).to_be_visible()
        assert key not in await page.content()
        # A key of the settings is changed there.
        await page.get_by_role("link", name="Owner").click()
        await expect(page.locator("#key")).to_contain_text("It stands in the settings")
        await expect(page.get_by_role("button", name="Revoke")).to_have_count(0)
