"""The pages of the settings and of one node."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from gateway.callers.keys import AdminRole
from tests.admin.browser import confirm, needs_browser, opened_at
from tests.admin.test_dashboard import (
    ADMIN,
    HOSTILE,
    KEYS,
    a_dashboard,
    a_fleet,
    node_card,
    opened,
)
from tests.gateways import Running, until

pytestmark = [pytest.mark.slow, needs_browser]

SETTINGS: dict[str, Any] = {
    "admin": ADMIN,
    "queue": {"max": 7},
    "models": {HOSTILE: {"use": "emulated"}},
    "webhooks": {
        "targets": [{"url": "https://hooks.example.org/T0/secret-path",
                     "secret_env": "HOOK"}]
    },
}  # fmt: skip


async def written(running: Running, settings: dict[str, Any], versions: int) -> None:
    """Edit the settings, and wait until so many versions of them are kept."""
    running.write_settings(settings)
    history = running.gateway.config_files.histories["gateway"]
    await until(lambda: len(history.versions()) == versions)


async def test_an_edit_is_compared_rolled_back_once_confirmed_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    async with a_fleet(tmp_path, hosts="a", settings=SETTINGS) as (running, _):
        await written(running, {**SETTINGS, "queue": {"max": 9}}, 2)
        async with opened(running, AdminRole.ADMIN, at="settings") as page:
            value = page.locator("#values tr", has=page.get_by_text("queue.max", exact=True))
            await expect(value).to_contain_text("9")
            await expect(value).to_contain_text("gateway.yaml:")
            await page.locator("#values input[type=search]").fill("models.")
            # A name is a text, whatever it is.
            await expect(page.locator("#values")).to_contain_text("<img src=x onerror=alert(1)>")
            assert await page.locator("#values img").count() == 0
            rows = page.get_by_role("region", name="Versions of").first.locator("tbody tr")
            await expect(rows).to_have_count(2)
            await expect(rows.first).to_contain_text("in force, on the disk")
            await rows.last.get_by_role("link", name="Compare").click()
            shown = page.locator("#compared")
            await expect(shown).to_contain_text("-  max: 7")
            await expect(shown).to_contain_text("+  max: 9")
            body = await page.locator("body").inner_text()
            assert "secret-path" not in body
            await shown.get_by_role("button", name="Roll back…").click()
            await page.get_by_role("dialog").get_by_role("button", name="Leave it").click()
            assert running.gateway.settings.queue.max == 9
            await shown.get_by_role("button", name="Roll back…").click()
            await confirm(page, "Roll back to gateway-")
            await until(lambda: running.gateway.settings.queue.max == 7)
            await expect(shown).to_contain_text("the file is that version")
            await expect(page.locator("#reload")).to_contain_text("Both are valid")
            await expect(rows).to_have_count(3)


async def test_the_errors_of_a_reload_are_listed_one_by_one(tmp_path: Path) -> None:
    async with a_fleet(tmp_path, hosts="a", settings={"admin": ADMIN}) as (running, _):
        key = KEYS[AdminRole.ADMIN].text
        async with opened_at(running.admin_url, key=key, at="settings") as watched:
            page = watched.page
            await expect(page.locator("#values")).to_be_visible()
            running.write_settings({"admin": ADMIN, "queue": {"max": "many"}, "retrise": {}})
            running.write_nodes([{"name": "a", "url": "ftp://x"}])
            await page.get_by_role("button", name="Read both again").click()
            faults = page.locator("#reload li")
            await expect(faults).to_have_count(3)
            await expect(faults.nth(0)).to_contain_text("queue.max")
            await expect(faults.nth(1)).to_contain_text("did you mean retries?")
            await expect(faults.nth(2)).to_contain_text("nodes[0].url")
            assert [one for one in watched.trouble if "status of 422" not in one] == []
        # Whoever comes later sees them too, if it is an admin.
        async with opened(running, AdminRole.ADMIN, at="settings") as page:
            await expect(page.locator("#reload li")).to_have_count(3)
        key = KEYS[AdminRole.OPERATOR].text
        async with opened_at(running.admin_url, key=key, at="settings") as watched:
            await expect(watched.page.locator("#page")).to_contain_text("the key of an admin")


def a_day(running: Running, name: str) -> None:
    """Let the gateway have seen a node at work for a day, but for an hour."""
    history, node = running.gateway.live.view.node_history, running.gateway.fleet.nodes[name]
    now = time.time()
    for minutes in (*range(24 * 60, 180, -5), *range(120, 0, -5)):
        history.read(name, now - 60 * minutes, minutes // 5 % 3, 2, node.speed)


async def asked(running: Running, number: int) -> None:
    """Send chats with one long beginning, so that nodes find it in their caches."""
    for turn in range(number):
        words = "You help the team with its mail. " * 60
        messages = [{"role": "system", "content": words}, {"role": "user", "content": f"No {turn}"}]
        response = await running.client.post("/v1/chat/completions", json={"messages": messages})
        assert response.status_code == 200


async def test_a_node_shows_its_day_and_what_its_cache_has_saved(tmp_path: Path) -> None:
    name = "epyc-a-numa0"
    speeds = {"decode_tps": 1000.0, "prefill_tps": 10_000.0}
    fast: dict[str, Any] = {"answer_tokens": 2, "cache_ram": 0, **speeds}
    async with a_dashboard(tmp_path, hosts="a", **fast) as (running, _, page):
        a_day(running, name)
        await asked(running, 6)
        node = running.gateway.fleet.nodes[name]
        cache = running.gateway.scheduler.fleet_sync.cache_of(node)
        assert cache is not None
        await node_card(page, name).get_by_role("link").click()
        await expect(page.locator("#day .uplot")).to_have_count(3)
        await expect(page.locator('[data-chart="busy"] .plot')).to_have_attribute(
            "aria-label",
            "Busy slots, the last 24 hours: busy from 0.0 to 2.0, now 1.0; "
            "slots from 2.0 to 2.0, now 2.0",
        )
        await expect(page.locator("table.heat tbody tr")).to_have_count(len(cache.hits))
        await page.get_by_role("link", name="All nodes").click()
        await expect(page.locator("#nodes .node")).to_have_count(2)
        await page.go_back()
        await expect(page.locator("#day .uplot")).to_have_count(3)
