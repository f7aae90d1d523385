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
from playwright.async_api import Locator, Page, expect

from gateway.callers.keys import AdminRole, new_key
from gateway.terms import Priority
from tests.admin.browser import a_browser, a_page, needs_browser, opened_at, turn_to
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


@pytest.mark.parametrize(
    "wrong", ["lg_wrong_wrong", "lg_\u2013\u200b_key"], ids=["unknown", "no header"]
)
async def test_a_wrong_key_is_refused_and_no_key_is_stored(wrong: str, tmp_path: Path) -> None:
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


async def is_at(page: Page, address: str) -> None:
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
        # The keyboard reaches the page past the rail.
        await page.reload()
        await expect(page.locator("#rail [aria-current]")).to_be_visible()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("#page")).to_be_focused()
        await is_at(page, "playground")


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


async def test_after_a_revoked_key_the_page_is_whole_with_another_one(tmp_path: Path) -> None:
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


async def test_the_keyboard_alone_drains_and_resumes_but_not_a_held_key(tmp_path: Path) -> None:
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


async def test_what_has_ended_is_listed_with_its_life_as_the_address_says(tmp_path: Path) -> None:
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


async def test_a_request_is_followed_to_its_end_beside_what_was_predicted(tmp_path: Path) -> None:
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
