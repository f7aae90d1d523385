"""The dashboard in a real browser, over a whole gateway with emulated nodes."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, expect

from gateway.callers.keys import AdminRole, new_key
from tests.admin.browser import a_browser, a_page, confirm, needs_browser, opened_at, turn_to
from tests.emulator import EmulatedNode
from tests.gateways import NO_TLS, Running, running_gateway, until

pytestmark = [pytest.mark.slow, needs_browser]

KEYS = {role: new_key(f"the-{role.label}") for role in AdminRole}
ADMIN = {
    "keys": [{"id": key.id, "sha256": key.sha256, "role": role.label} for role, key in KEYS.items()]
}
AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text()
HOSTILE = "<img src=x onerror=alert(1)>\u202e\u0007</script><script>alert(2)</script>"


@contextlib.asynccontextmanager
async def a_fleet(
    folder: Path,
    *,
    hosts: str = "ab",
    settings: dict[str, Any] | None = None,
    more: Iterable[dict[str, Any]] = (),
    **node: Any,
) -> AsyncIterator[tuple[Running, dict[str, EmulatedNode]]]:
    """A gateway over two emulated nodes on each host, and over `more`."""
    emulated: dict[str, EmulatedNode] = {}
    async with contextlib.AsyncExitStack() as stack:
        specs: list[dict[str, Any]] = []
        for host in hosts:
            for numa in "01":
                name = f"epyc-{host}-numa{numa}"
                options: dict[str, Any] = {
                    "slots": 2,
                    "decode_tps": 25.0,
                    "answer_tokens": 2000,
                    **node,
                }
                one = await stack.enter_async_context(EmulatedNode(**options))
                emulated[name] = one
                specs.append(
                    {"name": name, "url": one.url, "host": f"epyc-{host}",
                     "labels": {"numa": numa}, "cost_per_hour": 0.2}
                )  # fmt: skip
        nodes = [*specs, *more]
        running = await stack.enter_async_context(running_gateway(folder, nodes, settings))
        yield running, emulated


@contextlib.asynccontextmanager
async def opened(
    running: Running, role: AdminRole | None = None, *, at: str = "", **context: Any
) -> AsyncIterator[Page]:
    """The dashboard at an address, with the key of this role; nothing of it may go wrong."""
    key = None if role is None else KEYS[role].text
    async with opened_at(running.admin_url, key=key, at=at, **context) as watched:
        await expect(watched.page.locator("#rail [aria-current]")).to_be_visible()
        yield watched.page
        assert watched.trouble == []


@contextlib.asynccontextmanager
async def a_dashboard(
    folder: Path, role: AdminRole | None = None, *, at: str = "", chats: int = 0, **fleet: Any
) -> AsyncIterator[tuple[Running, dict[str, EmulatedNode], Page]]:
    """The dashboard of `a_fleet` at an address, with this role's key, while so many chats run."""
    fleet |= {} if role is None else {"settings": {"admin": ADMIN}}
    async with (
        a_fleet(folder, **fleet) as (running, nodes),
        opened(running, role, at=at) as page,
        streams(running, chats),
    ):
        yield running, nodes, page


def node_card(page: Page, name: str) -> Any:
    return page.locator(f'[data-node="{name}"]')


@contextlib.asynccontextmanager
async def streams(
    running: Running, number: int, key: str | None = None, **body: Any
) -> AsyncIterator[None]:
    """So many chats, each begun anew when it ends; with the key, if there is one."""

    async def chat(caller: int) -> None:
        async with httpx.AsyncClient(base_url=running.url, trust_env=False, verify=NO_TLS) as one:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    words = f"caller {caller}: " + "word " * (20 + 9 * caller)
                    asked = {"messages": [{"role": "user", "content": words}], "stream": True}
                    headers = {"x-priority": ("normal", "premium", "batch", "urgent")[caller % 4]}
                    if key is not None:
                        headers["authorization"] = f"Bearer {key}"
                    async with one.stream(
                        "POST", "/v1/chat/completions", json={**asked, **body}, headers=headers,
                        timeout=120.0,
                    ) as response:  # fmt: skip
                        async for _ in response.aiter_raw():
                            pass
                await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(chat(caller)) for caller in range(number)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_operator_drains_resumes_and_probes_a_node_by_a_click(tmp_path: Path) -> None:
    async with a_dashboard(tmp_path, at="nodes") as (running, _, page):
        name = "epyc-a-numa1"
        card, nodes = node_card(page, name), running.gateway.fleet.nodes
        drain = card.get_by_role("button", name=f"Drain {name}")
        await drain.click()
        await page.get_by_role("button", name="Leave it").click()
        await expect(drain).to_be_focused()
        assert not nodes[name].draining
        await drain.click()
        await confirm(page, f"Drain {name}?")
        await expect(card.locator(".state")).to_contain_text("draining")
        assert nodes[name].draining
        await card.get_by_role("button", name=f"Resume {name}").click()
        await expect(card.locator(".state")).to_contain_text("ready")
        assert not nodes[name].draining
        await card.get_by_role("link", name=name).click()
        await page.locator("#node").get_by_role("button", name="Probe").click()
        await expect(page.locator("#toasts")).to_contain_text(f"{name}:")


async def test_an_operator_cancels_a_request_by_a_click(tmp_path: Path) -> None:
    async with a_dashboard(tmp_path, at="requests") as (running, _, page):
        body = {"messages": [{"role": "user", "content": "words-nobody-knows"}], "stream": True}
        async with running.client.stream(
            "POST", "/v1/chat/completions", json=body, headers={"x-request-id": "mine-17"}
        ) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await expect(page.locator("#requests tbody tr")).to_have_count(1)
            assert "words-nobody-knows" not in await page.content()
            await page.get_by_role("button", name="Cancel request mine-17").click()
            await confirm(page, "Cancel request mine-17?")
            rest = "\n".join([line async for line in lines])
            assert "operator" in rest
        await expect(page.locator("#requests")).to_contain_text("Nothing waits and nothing runs")


async def test_an_explanation_that_can_not_be_had_says_so(tmp_path: Path) -> None:
    async with (
        a_fleet(tmp_path, hosts="a") as (running, _),
        streams(running, 1),
        opened_at(running.admin_url, at="requests") as watched,
    ):
        page = watched.page
        await page.get_by_role("link", name="Why request").first.click()
        await expect(page.locator("#request")).to_contain_text("Attempt 1")
        await page.context.set_offline(offline=True)
        await page.get_by_role("button", name="Ask again").click()
        await expect(page.get_by_role("alert")).to_have_text("The gateway does not answer.")
        # What was known last is still there.
        await expect(page.locator("#request")).to_contain_text("Attempt 1")


@pytest.mark.parametrize(
    "wrong", ["lg_wrong_wrong", "lg_\u2013\u200b_key"], ids=["unknown", "no header"]
)
async def test_a_wrong_key_is_refused_and_the_key_is_stored_nowhere(
    wrong: str, tmp_path: Path
) -> None:
    """Also one with characters that no header takes."""
    async with (
        a_fleet(tmp_path, hosts="a", settings={"admin": ADMIN}) as (running, _),
        opened_at(running.admin_url, key=wrong) as watched,
    ):
        page = watched.page
        await expect(page.get_by_role("alert")).to_contain_text("not valid")
        await page.get_by_label("Admin key").fill(KEYS[AdminRole.OPERATOR].text)
        await page.get_by_role("button", name="Open").click()
        await expect(page.locator("#nodes .node")).to_have_count(2)
        await expect(page.locator("#top")).to_contain_text("role operator")
        stored = "[localStorage.length, sessionStorage.length, document.cookie]"
        assert await page.evaluate(stored) == [0, 0, ""]
        assert await page.context.cookies() == []
        await page.reload()
        await expect(page.get_by_label("Admin key")).to_be_visible()
        assert watched.trouble == []


@pytest.mark.smoke
async def test_a_viewer_sees_the_fleet_and_may_change_nothing(tmp_path: Path) -> None:
    async with a_dashboard(tmp_path, AdminRole.VIEWER) as (_, _, page):
        await expect(page.locator("#nodes .node")).to_have_count(4)
        for name in ("Drain", "Probe"):
            assert await page.get_by_role("button", name=name).count() == 0
        pages = page.locator("#rail").get_by_role("link")
        await expect(pages).to_have_text(["Overview", "Nodes", "Queue", "Models"])
        for address in ("requests", "requests/req_17", "playground", "keys"):
            await page.evaluate("address => { location.hash = address; }", f"#/{address}")
            await expect(page.locator("#page")).to_contain_text("needs the key of an operator")
            assert await page.locator("#page button, #page input, dialog[open]").count() == 0


async def test_hostile_words_of_nodes_and_callers_stay_text(tmp_path: Path) -> None:
    async with EmulatedNode(model=HOSTILE, decode_tps=20.0, answer_tokens=500) as node:
        spec = {
            "name": "node-0", "url": node.url,
            "labels": {"rack": HOSTILE, "numa": HOSTILE}, "model": {HOSTILE: HOSTILE},
        }  # fmt: skip
        async with (
            running_gateway(tmp_path, [spec]) as running,
            opened(running, at="requests") as page,
        ):
            body = {"messages": [{"role": "user", "content": HOSTILE}], "model": HOSTILE,
                    "stream": True}  # fmt: skip
            async with running.client.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                await expect(page.locator("#requests tbody tr")).to_have_count(1)
                text = await page.locator("#page").inner_text()
                await page.get_by_role("link", name="Why request").click()
                why = page.locator("#request")
                await expect(why).to_contain_text("model <img src=x onerror=alert(1)>")
                assert "\u202e" not in await why.inner_text()
                assert await why.locator("img, script").count() == 0
                await turn_to(page, "Nodes")
                await page.get_by_role("link", name="node-0", exact=True).click()
                await expect(page.locator("#node")).to_contain_text("rack=<img src=x")
                text += await page.locator("#page").inner_text()
                assert text.count("<img src=x onerror=alert(1)>") > 1
                assert "\u202e" not in text
                assert "\u0007" not in text
                assert await page.locator("#page img, #page script").count() == 0
                await page.evaluate("hash => { location.hash = hash; }", f"#/{HOSTILE}")
                await expect(page.locator("#page")).to_have_text("There is no such page.")
                await page.evaluate("hash => { location.hash = hash; }", f"#/nodes/{HOSTILE}")
                await expect(page.locator("#node")).to_contain_text("not in the inventory")
                assert await page.locator("#page img, #page script").count() == 0


# The addresses of pages and of the things on them, and the way back.


async def is_at(page: Page, address: str) -> None:
    """Wait until the page is at the address."""
    await expect(page).to_have_url(re.compile(rf"/#/{re.escape(address)}$"))


async def test_each_page_has_an_address_a_title_and_the_way_back(tmp_path: Path) -> None:
    async with a_dashboard(tmp_path, hosts="a") as (_, _, page):
        await expect(page).to_have_title("Overview · llama-gateway")
        for title in ("Nodes", "Requests", "Queue", "Models", "Playground"):
            await turn_to(page, title)
            await is_at(page, title.lower())
            await expect(page).to_have_title(f"{title} · llama-gateway")
            await expect(page.locator("#rail [aria-current=page]")).to_have_text(title)
            await expect(page.locator("#page")).to_be_focused()
        await page.go_back()
        await is_at(page, "models")
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
            await is_at(page, f"nodes/{name}")
            await expect(page).to_have_title(f"{name} · Nodes · llama-gateway")
            await page.go_back()
            await expect(page.locator("#charts")).to_be_attached()
            await expect(shown).to_have_count(0)
        # Sent to a colleague, it opens the same.
        async with opened(running, at=f"nodes/{name}") as page:
            await expect(page.locator("#node")).to_contain_text("NUMA node 1")
            await expect(page.locator("#rail [aria-current=page]")).to_have_text("Nodes")
            await page.get_by_role("link", name="All nodes").click()
            await is_at(page, "nodes")


async def test_what_is_looked_for_is_in_the_address(tmp_path: Path) -> None:
    async with a_fleet(tmp_path) as (running, _):
        async with opened(running, at="nodes") as page:
            await page.keyboard.press("/")
            await page.keyboard.type("epyc-b")
            await page.locator("#nodes select").select_option("tiles")
            await is_at(page, "nodes?find=epyc-b&size=tiles")
            address = page.url.partition("#/")[2]
        async with opened(running, at=address) as page:
            await expect(page.locator(".tiles .node")).to_have_count(2)
            await expect(page.locator("#nodes input")).to_have_value("epyc-b")
            await page.locator(".tiles .node").first.get_by_role("link").click()
            await expect(page.locator("#node")).to_be_visible()
            await page.go_back()
            await is_at(page, address)


async def test_the_keyboard_reaches_the_page_past_the_rail(tmp_path: Path) -> None:
    async with a_dashboard(tmp_path, hosts="a") as (_, _, page):
        await turn_to(page, "Nodes")
        await page.reload()
        await expect(page.locator("#rail [aria-current]")).to_be_visible()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("#page")).to_be_focused()
        await is_at(page, "nodes")


# An operator in a bad night: the connection, the key, the keyboard.


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
