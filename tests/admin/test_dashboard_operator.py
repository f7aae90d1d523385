"""The dashboard of an operator in a bad night: the connection, the key, the keyboard, a phone."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from playwright.async_api import expect

from gateway.callers.keys import AdminRole
from tests.admin.browser import a_browser, a_page, needs_browser, opened_at, turn_to
from tests.admin.test_dashboard import ADMIN, KEYS, a_dashboard, a_fleet, node_card
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway, until

pytestmark = [pytest.mark.slow, needs_browser]

WITHOUT_OPERATOR = {"keys": [key for key in ADMIN["keys"] if key["role"] != "operator"]}


async def test_a_page_without_its_gateway_does_not_look_calm_and_comes_back(tmp_path: Path) -> None:
    async with EmulatedNode() as node, a_browser() as browser, contextlib.AsyncExitStack() as one:
        running = await one.enter_async_context(running_gateway(tmp_path, [node.url]))
        port = int(running.admin_url.rpartition(":")[2])
        async with a_page(browser, running.admin_url) as watched:
            page = watched.page
            await expect(page.locator("#problems")).to_contain_text("Nothing needs attention")
            await expect(page.locator(".uplot").first).to_be_visible()
            await one.aclose()
            await expect(page.locator("#lost")).to_contain_text("No connection")
            await expect(page.locator("#lost")).to_contain_text("The gateway does not answer.")
            await expect(page.locator("#problems")).to_have_count(0)
            # What was known last is still there.
            await expect(node_card(page, "node-0")).to_be_visible()
            specs = [{"name": name, "url": node.url} for name in ("node-0", "new")]
            async with running_gateway(tmp_path, specs, admin_port=port) as successor:
                successor.gateway.version = "99.0"
                await expect(page.locator(".connection")).to_contain_text("live")
                await expect(node_card(page, "new")).to_be_visible()
                await expect(page.locator("#lost")).to_have_count(0)
                await expect(page.locator("#problems")).to_contain_text("Nothing needs attention")
                # Its files are those of the old version.
                await page.get_by_role("button", name="Reload for the new version").click()
                await expect(page.locator("#top")).to_contain_text("99.0")
                await expect(page.get_by_role("button", name="Reload")).to_have_count(0)


async def test_a_revoked_key_is_asked_for_anew_and_the_page_is_whole_with_another(
    tmp_path: Path,
) -> None:
    async with a_dashboard(tmp_path, AdminRole.OPERATOR, at="nodes") as (running, _, page):
        await page.locator("#nodes input").fill("epyc-a")
        await page.locator("#nodes select").select_option("tiles")
        await page.locator(".tiles .node").first.get_by_role("link").click()
        await expect(page.locator("#node")).to_be_visible()
        running.write_settings({"admin": WITHOUT_OPERATOR})
        field = page.get_by_label("Admin key")
        await expect(field).to_be_focused()
        await expect(page.get_by_role("alert")).to_contain_text("not valid")
        # What the key had shown is gone.
        await expect(page.locator("#node")).to_have_count(0)
        assert "epyc" not in await page.locator("body").inner_text()
        await field.fill(KEYS[AdminRole.VIEWER].text)
        await page.keyboard.press("Enter")
        await expect(page.locator("#node")).to_be_visible()
        await page.go_back()
        await expect(page.locator(".tiles .node")).to_have_count(2)
        await expect(page.locator("#nodes input")).to_have_value("epyc-a")
        await expect(page.locator("#nodes select")).to_have_value("tiles")
        await turn_to(page, "Overview")
        await expect(page.locator(".uplot").first).to_be_visible()


async def test_a_key_file_may_have_any_text(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("schlüssel-für-die-nacht-\u2603")
    settings = {"admin": {"key_file": str(tmp_path / "key")}}
    async with (
        a_fleet(tmp_path, hosts="a", settings=settings) as (running, _),
        opened_at(running.admin_url, key="schlüssel-für-die-nacht-\u2603") as watched,
    ):
        await expect(watched.page.locator("#nodes .node")).to_have_count(2)


async def test_a_chosen_state_can_be_left_though_no_node_is_in_it_any_more(tmp_path: Path) -> None:
    async with a_dashboard(tmp_path, at="nodes") as (running, _, page):
        running.gateway.fleet.drain("epyc-a-numa0")
        chip = page.locator(".chip", has_text="draining")
        await chip.click()
        await expect(page.locator("#nodes .node")).to_have_count(1)
        running.gateway.fleet.resume("epyc-a-numa0")
        await expect(page.locator("#nodes")).to_contain_text("No node is like that")
        await expect(chip).to_contain_text("0")
        await chip.click()
        await expect(page.locator("#nodes .node")).to_have_count(4)
        await expect(chip).to_have_count(0)


async def test_the_keyboard_alone_drains_and_resumes_and_a_held_key_does_nothing(
    tmp_path: Path,
) -> None:
    async with a_dashboard(tmp_path, at="nodes") as (running, _, page):
        name = "epyc-a-numa1"
        nodes = running.gateway.fleet.nodes
        await node_card(page, name).get_by_role("link", name=name, exact=True).focus()
        for _ in range(5):  # Down again without being up: the key repeats.
            await page.keyboard.down("Enter")
        await page.keyboard.up("Enter")
        shown = page.locator("#node")
        # Its first button, which drains, has not got the focus.
        await expect(shown).to_be_visible()
        await expect(page.locator("#page")).to_be_focused()
        assert not nodes[name].draining
        for _ in range(2):  # past the way to all nodes
            await page.keyboard.press("Tab")
        for _ in range(5):
            await page.keyboard.down("Enter")
        await page.keyboard.up("Enter")
        question = page.locator("#confirm")
        await expect(question.get_by_role("heading")).to_be_focused()
        for _ in range(2):
            await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await expect(question).to_be_hidden()
        await expect(shown.get_by_role("button", name="Resume")).to_be_focused()
        assert nodes[name].draining
        await expect(page.locator("#toasts")).to_contain_text("gets no new work")
        await page.keyboard.press("Enter")
        await expect(shown.get_by_role("button", name="Drain")).to_be_focused()
        await until(lambda: not nodes[name].draining)
        await expect(page.locator("body > #toasts")).to_contain_text("back at work")
        await page.go_back()
        await expect(node_card(page, name)).to_be_visible()
