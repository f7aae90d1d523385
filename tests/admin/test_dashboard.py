"""The dashboard in a real browser, over a whole gateway with emulated nodes.

`pytest tests/admin/test_dashboard.py -k questions -n 0 -s` prints the clicks and the seconds that
each of five questions takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import FilePayload, Locator, Page, expect
from sqlalchemy import update

from gateway.callers.keys import AdminRole, ApiKey, hash_key, new_key
from gateway.store.schema import usage
from gateway.terms import Priority
from tests.admin.browser import (
    PATIENCE,
    a_browser,
    a_page,
    confirm,
    needs_browser,
    open_with,
    opened_at,
    press,
    turn_to,
)
from tests.admin.test_keys import upload
from tests.beside import beside
from tests.emulator import EmulatedNode
from tests.emulator.routed_model import HostMemory, ModelFile
from tests.emulator.router import EmulatedRouter
from tests.gateways import Running, answered, running_gateway, until
from tests.known import known
from tests.polling import eventually
from tests.stored.batch_gateway import CALM, KEY, key, lines
from tests.web.test_route_tables import ADMIN
from tests.web.test_route_tables import ADMIN_KEYS as KEYS

pytestmark = [pytest.mark.slow, needs_browser]

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
    options: dict[str, Any] = {"slots": 2, "decode_tps": 25.0, "answer_tokens": 2000, **node}
    emulated: dict[str, EmulatedNode] = {}
    specs: list[dict[str, Any]] = []
    async with contextlib.AsyncExitStack() as stack:
        for host, numa in itertools.product(hosts, "01"):
            name = f"epyc-{host}-numa{numa}"
            emulated[name] = await stack.enter_async_context(EmulatedNode(**options))
            specs.append(
                {"name": name, "url": emulated[name].url, "host": f"epyc-{host}",
                 "labels": {"numa": numa}, "cost_per_hour": 0.2}
            )  # fmt: skip
        started = running_gateway(folder, [*specs, *more], settings)
        yield await stack.enter_async_context(started), emulated


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
    running: Running, number: int, key: ApiKey | str = "", **body: Any
) -> AsyncIterator[None]:
    """So many chats, each begun anew when it ends; with the key, if there is one."""

    async def chat(caller: int) -> None:
        words = f"caller {caller}: " + "word " * (20 + 9 * caller)
        asked = {"messages": [{"role": "user", "content": words}], "stream": True, **body}
        headers = {"x-priority": ("normal", "premium", "batch", "urgent")[caller % 4]}
        while True:
            with contextlib.suppress(httpx.HTTPError):
                await running.chat(key, headers, **asked)
            await asyncio.sleep(0.05)

    async with beside(*map(chat, range(number))):
        yield


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
        await open_with(page, KEYS[AdminRole.OPERATOR].text)
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
    async with a_dashboard(tmp_path, AdminRole.VIEWER, chats=3) as (_, _, page):
        await expect(page.locator("#nodes .node")).to_have_count(4)
        # And what its slots do, but not for whom.
        await inked(page, FIRST_CALLER)
        await expect(page.locator("#timeline .caller")).to_have_count(0)
        await expect(page.locator("#figures h2").last).to_have_text("Spent in the last hour")
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
                await press(page, "Reload for the new version")
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
            await press(page, "Send")
            await until(lambda: running.gateway.scheduler.depths()[Priority.NORMAL] == 1)
            way = page.locator(".turn.assistant .way")
            told = re.compile(r"^Place 1 in the queue, waited [1-9]\d*(\.\d)? s")
            await expect(way).to_have_text(told)
        await expect(way).to_contain_text("node-0 (cpu) answered")
        await expect(way).to_contain_text("prompt tokens cached")
        await expect(page.locator(".turn.assistant .text")).not_to_be_empty()
        waited = known(re.search(r"waited (\d+(?:\.\d)?) s", await way.inner_text()))
        assert float(waited[1]) >= 1.0


async def ask(
    running: Running, name: str, class_: str = "normal", key: ApiKey | str = "", **body: Any
) -> None:
    ledger = known(running.gateway.ledger)
    written = ledger.written
    headers = {"x-request-id": name, "x-priority": class_}
    await running.chat(key, headers, stream=True, **body)
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


# The first page: its figures, its problems, the timeline of slots and the wall.


INKS = """([selector, part]) => {
  const canvas = document.querySelector(selector);
  const box = document.querySelector(part ?? selector)?.getBoundingClientRect();
  // Until the first answer is there and laid out, nothing is drawn.
  if (!canvas?.width || !box?.width) return {};
  const scale = canvas.width / canvas.clientWidth, corner = canvas.getBoundingClientRect();
  const { data } = canvas.getContext("2d").getImageData((box.left - corner.left) * scale,
    (box.top - corner.top) * scale, box.width * scale, box.height * scale);
  const found = {};
  for (let place = 0; place < data.length; place += 4) {
    if (data[place + 3] === 255) {
      const ink = data.slice(place, place + 3).join();
      found[ink] = (found[ink] ?? 0) + 1;
    }
  }
  return found;
}"""
"""How many dots of each colour a canvas has, or the part of it where another element stands."""
FIRST_CALLER, DARK_FIRST_CALLER = "9,105,218", "88,166,255"


async def inked(page: Page, colour: str) -> None:
    """Wait until the timeline has some dots of a colour."""

    async def look() -> bool | None:
        dots = await page.evaluate(INKS, ["#timeline canvas", None])
        return dots.get(colour, 0) >= 20 or None

    await eventually(look, PATIENCE / 1000)


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
        await press(problems, "Hide for a day")
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
        await press(problems, "Show")
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
        box = known(await canvas.bounding_box())
        assert running.gateway.fleet.nodes["epyc-b-numa0"].slots_busy
        await canvas.hover(position={"x": box["width"] - 12, "y": 80})
        await expect(picture.locator(".tip")).to_contain_text(re.compile("epyc-.*runs"))
        await canvas.click(position={"x": box["width"] - 12, "y": 80})
        await expect(page).to_have_url(re.compile("#/requests/"))
        await expect(page.locator("#page")).to_contain_text("Attempt 1")


EDGE = "136,150,165"
WRITING, DARK_WRITING = "32,120,184", "74,163,223"


async def on_wall(page: Page, *names: str) -> set[str]:
    """The colours that the wall has where these nodes stand."""
    places = [[".wall canvas", f'[data-node="{name}"]'] for name in names]
    return {ink for place in places for ink in await page.evaluate(INKS, place)}


async def drawn(page: Page, *names: str, colour: str = EDGE) -> None:
    """Wait until a colour is there."""

    async def look() -> bool | None:
        return colour in await on_wall(page, *names) or None

    await eventually(look, PATIENCE / 1000)


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
            assert WRITING not in await on_wall(page, "epyc-a-numa0")
            await press(page, "Colours: auto", "Colours: light")
            await drawn(page, *writing, colour=DARK_WRITING)
        await press(page, "Colours: dark")
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


# The pages of the settings, of models, of batches and of keys.


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
            await press(shown, "Roll back…")
            await page.get_by_role("dialog").get_by_role("button", name="Leave it").click()
            assert running.gateway.settings.queue.max == 9
            await press(shown, "Roll back…")
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
            await press(page, "Read both again")
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


HOSTILE_NAME = "<img src=x onerror=alert(1)>'\"</script>/x"
GIB = 1 << 30


def a_router(files: Mapping[str, ModelFile]) -> EmulatedRouter:
    return EmulatedRouter(files, models_max=0, memory=HostMemory(64 * GIB), slots=2, decode_tps=20)


def sizes(files: Mapping[str, ModelFile]) -> dict[str, Any]:
    """What the settings say of these files."""
    return {name: {"memory": f"{file.memory}"} for name, file in files.items()}


async def order(running: Running, verb: str, model: str, node: str = "r1") -> None:
    body = {"order": verb, "model": model, "node": node}
    await answered(running.admin, "/admin/placements", "POST", json=body)


async def test_the_memory_of_a_host_fills_with_models_whatever_their_names(tmp_path: Path) -> None:
    name, files = (
        f"r1/{HOSTILE_NAME}",
        {
            "small": ModelFile(memory=2 * GIB),
            HOSTILE_NAME: ModelFile(memory=4 * GIB, load_seconds=2.0),
            "large": ModelFile(memory=9 * GIB, load_seconds=60.0),
        },
    )
    async with a_router(files) as router:
        spec = {"name": "r1", "url": router.url, "host": "big", "memory": "16GiB"}
        chosen = {"models": sizes(files)}
        async with (
            running_gateway(tmp_path, [spec], chosen, wait_ready=False) as running,
            opened(running, at="models") as page,
        ):
            nodes, picture = running.gateway.fleet.nodes, page.locator("#models")
            await expect(picture).to_contain_text("big 0 MiB of 16.0 GiB taken")
            await order(running, "pin", "small")
            await order(running, "load", HOSTILE_NAME)
            row = picture.locator("li[data-model]").filter(has_text=name)
            await expect(row).to_contain_text("ready, 4.0 GiB, 0 of 2 slots busy")
            small = "r1/small ready, 2.0 GiB, 0 of 2 slots busy, pinned"
            await expect(picture).to_contain_text(small)
            await expect(picture).to_contain_text("big 6.0 GiB of 16.0 GiB taken")
            bars = await picture.locator("rect.filled").all()
            assert [await bar.get_attribute("width") for bar in bars] == ["248", "123"]
            # One that is being loaded tells how far it is.
            await order(running, "load", "large")
            loading = picture.locator("li[data-model]").filter(has_text="r1/large")
            await expect(loading).to_contain_text(re.compile(r"loading, \d+ %, 9.0 GiB"))
            await row.get_by_role("link").click()
            shown = page.locator("#node")
            await press(shown, "Drain")
            await confirm(page, HOSTILE_NAME)
            await expect(shown.locator(".state")).to_contain_text("draining")
            assert nodes[name].draining
            assert await page.locator("#page img, #page script").count() == 0


HOSTILE_KEY = "<img src=x onerror=alert(1)>\u202e"


async def test_a_batch_is_uploaded_followed_paused_cancelled_and_downloaded(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=4, answer_tokens=20)
    content = "".join(json.dumps(one) + "\n" for one in [*lines(40), {"custom_id": HOSTILE_KEY}])
    async with (
        running_gateway(tmp_path, [node], {"keys": [key(name=HOSTILE_KEY)], **CALM}) as running,
        opened_at(running.admin_url, at="batches") as watched,
    ):
        page = watched.page
        await page.get_by_text("Upload a batch").click()
        file: FilePayload = {"name": "in.jsonl", "mimeType": "", "buffer": content.encode()}
        await page.get_by_label("File").set_input_files(file)
        for name in ("nobody", "k1"):
            await page.get_by_label("For the key").fill(name)
            await page.get_by_role("button", name="Upload", exact=True).click()
            if name == "nobody":
                alert = page.get_by_role("alert")
                await expect(alert).to_contain_text("There is no key 'nobody'")

        batch = page.locator("#batch")
        await expect(batch).to_contain_text(" of 41 lines")
        await expect(batch).to_contain_text("<img src=x onerror=alert(1)>\ufffd")
        await expect(batch.locator("dd", has_text="before the deadline")).to_be_visible()
        await press(batch, "Pause")
        await expect(batch).to_contain_text("It waits: paused")
        await press(batch, "Resume")
        await expect(batch).not_to_contain_text("It waits: paused")

        # The list leads back to it, by a filter that the address has.
        await page.get_by_role("link", name="All batches").click()
        await expect(page.locator("#batches tbody tr")).to_have_count(1)
        await page.get_by_label("Show").select_option("ended")
        await expect(page.locator("#batches")).to_contain_text("There are no such batches")
        assert page.url.endswith("#/batches?state=ended")
        await page.get_by_label("Show").select_option("")
        await page.locator("#batches tbody a").click()

        await press(batch, "Cancel")
        await confirm(page, "will never run")
        await expect(batch).to_contain_text("batch_cancelled")
        async with page.expect_download() as saved:
            await press(batch, "Download errors")
        found = await asyncio.to_thread((await (await saved.value).path()).read_text)
        assert any(json.loads(one)["custom_id"] == "line-39" for one in found.splitlines())
        assert KEY not in await page.content()
        # Of the key that there is not.
        assert [one.partition(" of ")[2] for one in watched.trouble] == ["404 (Not Found)"]


OWN = {"id": "owner", "sha256": new_key("owner").sha256, "name": "Owner"}


async def status_with(running: Running, key: str) -> int:
    return (await running.chat(key, max_tokens=8)).status_code


async def secret_of(page: Page) -> str:
    key = await page.locator(".secret code").inner_text()
    await press(page, "I have it")
    await expect(page.locator(".secret")).to_have_count(0)
    return key


async def test_a_key_is_made_limited_rotated_and_revoked_and_its_secret_goes_with_the_page(
    tmp_path: Path,
) -> None:
    admin = KEYS[AdminRole.ADMIN].text
    async with (
        running_gateway(tmp_path, [EmulatedNode()], {"admin": ADMIN, "keys": [OWN]}) as running,
        opened_at(running.admin_url, key=admin, at="keys") as watched,
    ):
        page = watched.page
        await expect(page.locator("#keys tbody tr")).to_have_count(1)
        await press(page, "Make a key")
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

        await press(own, "Change")
        form = page.get_by_role("form", name="Change alice")
        await expect(form.get_by_label("Requests a minute")).to_have_value("20")
        await form.get_by_label("Requests a minute").fill("30")
        await form.get_by_label("Money").fill("2/day")
        await form.get_by_label("Highest class").select_option("premium")
        await press(form, "Change it")
        await expect(own).to_contain_text("of 30 used")
        await expect(own).to_contain_text("at most premium")
        await expect(own.get_by_role("meter", name="Money a day")).to_be_visible()

        await press(own, "Rotate")
        await press(page, "Rotate it")
        fresh = await secret_of(page)
        await expect(own).to_contain_text("Old secret")
        assert (await status_with(running, made), await status_with(running, fresh)) == (200, 200)

        await press(own, "Revoke")
        await press(page, "Leave it")
        await expect(own.get_by_role("button", name="Revoke")).to_be_focused()
        assert await status_with(running, fresh) == 200
        await press(own, "Revoke")
        await press(page, "Revoke it")
        await expect(own.get_by_role("heading", name="alice")).to_contain_text("revoked")
        await expect(own.get_by_role("button", name="Revoke")).to_have_count(0)
        assert await status_with(running, fresh) == 401

        await page.locator("#rail").get_by_role("link", name="Keys").click()
        await press(page, "Make a key")
        form = page.get_by_role("form", name="A new key")
        await form.get_by_label("Name", exact=True).fill("Owner")
        await press(form, "Make it")
        await expect(page.locator("#toasts")).to_contain_text("called 'Owner' already")
        await form.get_by_label("Name", exact=True).fill("bob")
        await press(form, "Make it")
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
        # The browser, too, tells of a form that was refused.
        assert [one for one in watched.trouble if "status of 400" not in one] == []


# Five questions of week two, each answered within three clicks from the overview, and timed.


WEB, CRAWLER = new_key("web"), new_key("crawler")
TEAMS: dict[str, Any] = {
    "keys": [
        {"id": key.id, "sha256": key.sha256, "name": key.id, "group": group}
        for key, group in ((WEB, "research"), (CRAWLER, "lab"))
    ]
}
CLICKS = """() => {
  window.clicks = 0;
  addEventListener("click", () => { window.clicks += 1; }, true);
  addEventListener("change", (event) => { window.clicks += event.target.matches("select"); }, true);
}"""
"""Counts what one clicks and chooses."""


@contextlib.asynccontextmanager
async def asked(page: Page, question: str) -> AsyncIterator[None]:
    """Begin at the overview; what follows may take three clicks."""
    await page.evaluate("location.hash = '#/overview'")
    await expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    await page.evaluate("window.clicks = 0")
    begun = time.perf_counter()
    yield
    took, clicks = time.perf_counter() - begun, await page.evaluate("window.clicks")
    print(f"\n{question:<45} {clicks} clicks, {took:.1f} s", end="")
    assert 1 <= clicks <= 3, question


async def move_back(running: Running, seconds: float) -> None:
    """Let what ended within this hour have ended so many seconds before."""
    times = {name: usage.c[name] - seconds for name in ("started_at", "ended_at")}
    moved = update(usage).where(usage.c.ended_at > time.time() - 3600).values(times)
    await known(running.gateway.store).run(lambda connection: connection.execute(moved))


async def test_five_questions_are_answered_within_three_clicks(tmp_path: Path) -> None:
    present = datetime.now(UTC)
    last_month = present.replace(day=1) - timedelta(days=1)
    async with EmulatedNode(slots=2, decode_tps=60.0, answer_tokens=4000) as node:
        spec = {"name": "epyc-a", "url": node.url, "cost_per_hour": 3600.0}
        async with running_gateway(tmp_path, [spec], TEAMS) as running:
            for _ in range(2):
                await ask(running, "long-ago", key=WEB, max_tokens=30)
            await move_back(running, (present - last_month).total_seconds())
            await ask(running, "quick", key=WEB, max_tokens=3)
            await ask(running, "slow-one", key=WEB, max_tokens=60)
            await move_back(running, 86_400)
            # Yesterday is more than memory keeps.
            running.gateway.scheduler.decision_log.grants.clear()
            running.gateway.live.view.history._served.clear()
            async with opened(running) as page:
                await page.evaluate(CLICKS)
                flood = (running.chat(key, max_tokens=4000) for key in (*[CRAWLER] * 20, WEB))
                async with beside(*flood), asked(page, "Who floods?"):
                    problem = page.locator("#problems .problem", has_text="One caller floods")
                    await problem.locator("summary").click()
                    await expect(problem).to_contain_text("Its caller: crawler")
                async with asked(page, "Why was it slow yesterday?"):
                    await why_slow_yesterday(page)
                async with asked(page, "Give a team a budget"):
                    await give_a_budget(page, running)
                async with asked(page, f"What did the team cost in {last_month:%B}?"):
                    await cost_in(page, f"{last_month:%B %Y}")
                async with page.expect_download() as download:
                    await press(page, "Download CSV")
                table = await asyncio.to_thread((await (await download.value).path()).read_text)
                assert table.startswith("group,requests")
                await upload(running, lines(40), key="web", completion_window="24h")
                async with asked(page, "Is the batch done in time?"):
                    await turn_to(page, "Batches")
                    await page.locator("#batches tbody a").click()
                    await expect(page.locator("#batch")).to_contain_text("before the deadline")


async def why_slow_yesterday(page: Page) -> None:
    await turn_to(page, "Requests")
    await page.get_by_role("link", name="Slowest yesterday").click()
    rows = page.locator("#ended tbody tr")
    await expect(rows).to_have_count(2)
    await rows.first.get_by_role("link").click()
    told = page.locator("#request")
    await expect(told.locator("h2")).to_have_text("Request slow-one")
    await expect(told.locator(".summary")).to_contain_text(re.compile(r"\d s to write 60"))
    # Only the ledger knows it still.
    await expect(told).to_contain_text("No longer known: the nodes that were compared")
    await expect(told.get_by_role("table")).to_have_count(0)


async def give_a_budget(page: Page, running: Running) -> None:
    await page.locator("#rail").get_by_role("link", name="Keys").click()
    team = page.locator("#groups .group").filter(has_text="research")
    await expect(team).to_contain_text("it has no limit")
    await press(team, "Limits of research")
    await team.get_by_label("Money").fill("500/month")
    await press(team, "Set them")
    await expect(team).to_contain_text("of 500")
    groups = (await answered(running.admin, "/admin/groups"))["groups"]
    limits = {one["name"]: one["limits"] for one in groups}
    assert limits["research"]["budget"] == "500/month"


async def cost_in(page: Page, month: str) -> None:
    await page.locator("#rail").get_by_role("link", name="Keys").click()
    used = page.locator("#usage")
    await used.get_by_label("By").select_option(value="group")
    await used.get_by_label("Time").select_option(label=month)
    await expect(used.locator("tbody tr")).to_have_count(1)
    await expect(used.locator("tbody tr")).to_contain_text("research")
    # Twice thirty tokens at sixty a second, and a slot of two at 3600 an hour.
    cost = used.locator("tbody tr td").last
    await expect(cost).to_have_text(re.compile(r"^[0-2]\.\d+$|^[1-9]$"))
