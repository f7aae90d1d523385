"""The dashboard in a real browser, over a whole gateway with emulated nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, expect

from gateway.callers.keys import AdminRole, new_key
from tests.admin.browser import confirm, needs_browser, opened_at, turn_to
from tests.emulator import EmulatedNode
from tests.gateways import NO_TLS, Running, running_gateway

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


@pytest.mark.parametrize("wrong", ["lg_wrong_wrong", "lg_\u2013\u200b_key"], ids=["", "no header"])
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
