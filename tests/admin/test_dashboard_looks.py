"""How every page looks: in each condition, and in the pictures of the docs.

Light, dark, in forced colours, on a phone, and with letters twice as large. Names are hostile and
long. No page may be wider than its viewport, cut a text off, have a target smaller than 32 pixels,
a chart that nothing feeds, or a fault that axe finds.

`DASHBOARD_PICTURES=docs/images pytest -n 0 tests/admin/test_dashboard_looks.py -k pictures` makes
the pictures anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from PIL import Image
from playwright.async_api import FloatRect, Page, expect

from gateway.callers.keys import AdminRole, new_key
from gateway.watch.history import STEP_SECONDS
from tests.admin import test_dashboard as dashboard
from tests.admin.browser import (
    WatchedPage,
    a_browser,
    a_page,
    needs_browser,
    open_with,
    opened_at,
    press,
)
from tests.admin.test_caller_page import own_page
from tests.admin.test_dashboard import GIB, HOSTILE, a_router, order, sizes, streams
from tests.admin.test_keys import upload
from tests.callers.metered_gateway import bearer, recorded
from tests.emulator import EmulatedNode
from tests.emulator.routed_model import ModelFile
from tests.gateways import Running, answered, running_gateway, until
from tests.known import known
from tests.stored.batch_gateway import lines
from tests.web.test_route_tables import ADMIN
from tests.web.test_route_tables import ADMIN_KEYS as KEYS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_browser]

LOOKS = (Path(__file__).parent / "looks.js").read_text()
CONDITIONS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "forced": {"forced_colors": "active"},
    "phone": {"viewport": {"width": 360, "height": 740}, "has_touch": True},
    "large letters": {},
    "phone, large letters": {"viewport": {"width": 360, "height": 740}, "has_touch": True},
}
LONG = "n" * 48
NAME = HOSTILE.replace("\u202e", "").replace("\u0007", "") + LONG
OWN, BUSY = new_key("hostile"), new_key("busy")
FILES = {
    "loaded": ModelFile(memory=4 * GIB),
    NAME: ModelFile(memory=9 * GIB, load_seconds=3600.0),
}
SETTINGS: dict[str, Any] = {
    "admin": ADMIN,
    "listen": {"caller_page": True},
    "keys": [
        {"id": "hostile", "sha256": OWN.sha256, "name": NAME, "group": LONG,
         "limits": {"rpm": 100, "tokens_per_day": 700, "budget": "5/month"}},
        {"id": "busy", "sha256": BUSY.sha256, "name": f"busy {NAME}"},
    ],
    "groups": {LONG: {"limits": {"budget": "1/month", "concurrency": 40}}},
    "models": {
        **sizes(FILES),
        f"alias{LONG}": {"use": [HOSTILE]},
    },
    "health": {"interval": 1.0, "fall": 1},
}  # fmt: skip
UNFOLD = "document.querySelectorAll('#page details').forEach((one) => { one.open = true; })"
ASKS_FIRST = ("Drain", "Cancel", "Revoke", "Remove", "unload", "Roll back")
"""Words in the names of buttons that ask before they do it."""


PAGES = {
    "overview": "#charts .uplot",
    "nodes": ".cards .node",
    "nodes?size=tiles": ".tiles .node",
    "nodes?size=dots": ".dots .node",
    "nodes/fast": "#day .uplot",
    "requests": "#ended tbody tr",
    f"requests/mine-{LONG}": "#request .life",
    "queue": "#queue .lane",
    "batches": "#batches tbody tr",
    "models": "#models .memory",
    "models/loaded": "#model table",
    "keys": "#usage svg.columns",
    "playground": "#playground form",
    "settings": "#values tbody tr",
}
"""What tells that a page is whole, by its address."""


@contextlib.asynccontextmanager
async def a_gateway(folder: Path) -> AsyncIterator[tuple[Running, Mapping[str, str]]]:
    """A gateway that is at work for hostile names, and its pages with what makes them whole."""
    fast: dict[str, Any] = {"model": HOSTILE, "decode_tps": 40.0, "answer_tokens": 20, "slots": 2}
    dead, router = EmulatedNode(**fast), a_router(FILES)
    slow = EmulatedNode(**{**fast, "decode_tps": 4.0, "answer_tokens": 4000})
    own = {"fast": EmulatedNode(**fast), f"slow-{LONG}": slow, "dead": dead}
    labels = {"rack": HOSTILE, "numa": "0"}
    async with contextlib.AsyncExitStack() as stack:
        specs: list[dict[str, Any]] = []
        for name, one in {**own, "idle": EmulatedNode(**fast), "r1": router}.items():
            await stack.enter_async_context(one)
            host = "big" if one is router else f"host-{LONG}"
            specs.append({"name": name, "url": one.url, "host": host, "labels": labels,
                          "cost_per_hour": 900.0})  # fmt: skip
        specs[-1]["memory"] = "16GiB"
        running = await stack.enter_async_context(running_gateway(folder, specs, SETTINGS))
        await until(lambda: "r1/loaded" in running.gateway.fleet.nodes)
        running.admin.headers.update(bearer(KEYS[AdminRole.ADMIN]))
        await order(running, "load", "loaded")
        await order(running, "load", NAME)
        running.gateway.fleet.drain("idle")
        await dead.kill()
        put = {"name": f"stored {NAME}", "group": LONG, "limits": {"rpm": 9}, "models": [HOSTILE]}
        key = (await answered(running.admin, "/admin/keys", "POST", json=put))["id"]
        headers = {"x-request-id": f"mine-{LONG}"}
        for _ in range(3):
            await running.chat(OWN, headers, model=HOSTILE, user=HOSTILE, max_tokens=20)
        await recorded(running, 3)
        dashboard.a_day(running, "fast")
        broken = {"custom_id": HOSTILE + LONG}
        batch = await upload(running, [*lines(30, model=HOSTILE), broken], key="hostile")
        await dashboard.written(running, {**SETTINGS, "queue": {"max": 9}}, 2)
        version = running.gateway.config_files.histories["gateway"].versions()[0].name
        await stack.enter_async_context(streams(running, 5, BUSY, model=HOSTILE))
        yield (
            running,
            {
                **PAGES,
                f"keys/{key}": "#key dl",
                f"batches/{batch.json()['id']}": "#batch .facts",
                f"settings/{version}": "#compared pre",
            },
        )


async def wrong(page: Page, at: str) -> list[str]:
    found = await page.evaluate("window.looks()")
    return [f"{at}: {kind}: {one}" for kind, all_ in found.items() for one in all_]


@pytest.mark.parametrize("condition", CONDITIONS)
async def test_every_page_is_whole_whatever_its_names(tmp_path: Path, condition: str) -> None:
    context = {**CONDITIONS[condition], "bypass_csp": True}
    async with a_gateway(tmp_path) as (running, pages):
        async with opened_at(running.admin_url, **context) as watched:
            found = await of_the_dashboard(watched, condition, pages)
            assert watched.trouble == []
        async with own_page(running, None, **context) as watched:
            found += await of_the_callers_page(watched, condition)
    if condition == "phone, large letters":  # an example need not fit into its field
        found = [one for one in found if "cutOff: placeholder" not in one]
    assert not found, "\n".join(found)


async def of_the_dashboard(
    watched: WatchedPage, condition: str, pages: Mapping[str, str]
) -> list[str]:
    page = watched.page
    found = await of_the_form(watched, condition, "Admin key")
    await open_with(page, KEYS[AdminRole.ADMIN].text)
    for address, whole in pages.items():
        await page.evaluate("to => { location.hash = `#/${to}`; }", address)
        await expect(page.locator(whole).first).to_be_visible()
        if address == "playground":
            await page.get_by_label("Model").select_option("loaded")
            await page.get_by_label("Message").fill("Hello")
            await press(page, "Send")
            await expect(page.locator(".turn.assistant")).to_be_visible()
        found += await wrong(page, address)
        # Names are texts, whatever they are.
        assert await page.locator("#page img, #page script").count() == 0
        assert not {"\u202e", "\u0007"} & {*await page.locator("#page").inner_text()}
        found += await of_questions(page, address)
        found += await of_forms(page, address)
    return found


async def of_the_callers_page(watched: WatchedPage, condition: str) -> list[str]:
    page = watched.page
    found = await of_the_form(watched, condition, "API key")
    await open_with(page, OWN.text, "API key")
    await expect(page.locator("#requests tbody tr").first).to_be_visible()
    found += await wrong(page, "me")
    await expect(page.locator("body")).to_contain_text("<img src=x onerror=alert(1)>")
    return found


async def of_the_form(watched: WatchedPage, condition: str, label: str) -> list[str]:
    """What is wrong with the form that asks for a key, on a page that is now prepared."""
    page = watched.page
    page.on("dialog", lambda one: watched.trouble.append(f"a dialog: {one.message}"))
    await expect(page.get_by_label(label)).to_be_visible()
    if condition.endswith("large letters"):  # twice as large, as a reader sets them in the browser
        session = await page.context.new_cdp_session(page)
        await session.send("Page.setFontSizes", {"fontSizes": {"standard": 32, "fixed": 26}})
        size = "getComputedStyle(document.documentElement).fontSize"
        assert await page.evaluate(size) == "28px"
    await page.evaluate(dashboard.AXE)
    await page.evaluate(LOOKS)
    return await wrong(page, "the form")


async def of_forms(page: Page, address: str) -> list[str]:
    """What is wrong with the forms that the page opens, and with what it unfolds."""
    found = []
    for opener in ("Make a key", "Make a group", "Change", "Rotate"):
        button = page.locator("#keys, #groups, #key").get_by_role("button", name=opener, exact=True)
        if await button.count():
            await button.click()
            await expect(page.locator("form.sheet")).to_be_visible()
            found += await wrong(page, f"{address}, {opener}")
            await page.locator("form.sheet").get_by_role("button", name="Cancel").click()
    if address in {"overview", "batches"}:
        await page.evaluate(UNFOLD)
        found += await wrong(page, f"{address}, unfolded")
    return found


async def of_questions(page: Page, address: str) -> list[str]:
    """Buttons that end or move something without a question, and what is wrong with these."""
    found = []
    for word in ASKS_FIRST:
        name = re.compile(rf"\b{word}\b", re.IGNORECASE)  # "Drain", not "draining 1"
        named = page.locator("#page").get_by_role("button", name=name)
        buttons = named.and_(page.locator(":not(form *)"))
        if not await buttons.count():
            continue
        await buttons.first.click()
        dialog = page.locator("#confirm[open]")
        try:
            await expect(dialog).to_be_visible(timeout=5000)
        except AssertionError:
            found.append(f"{address}: asks nothing first: {word}")
        else:
            found += await wrong(page, f"{address}, {word}")
            await dialog.get_by_role("button").first.click()
    return found


# The pictures of the docs, of a fleet at work.


FOLDER = os.environ.get("DASHBOARD_PICTURES")
SECONDS = 100.0 if FOLDER else 1.0  # that the fleet works before the first picture
LEAST_HEIGHT = 420  # of a picture, where the page shows less than it has room for
END = "document.querySelector('#page').lastElementChild.getBoundingClientRect().bottom"
COLOURS = 96  # of a picture: more take more bytes than they show
SIZE = {"width": 1280, "height": 880}
RIGHTS: dict[str, dict[str, Any]] = {
    "chat": {"class": "premium", "group": "product", "limits": {"rpm": 600}},
    "search": {"group": "product", "limits": {"tokens_per_day": 400_000}},
    "agents": {"max_class": "premium", "group": "research", "limits": {"budget": "5/month"}},
    "reports": {"group": "research"},
    "nightly": {"class": "batch", "limits": {"concurrency": 64}},
}
CALLERS = {name: new_key(name) for name in RIGHTS}
GROUPS = {
    "product": {"limits": {"budget": "40/month"}},
    "research": {"limits": {"budget": "0.3/day", "tokens_per_day": 1_000_000}},
}
MODELS = {
    "qwen-14b": ModelFile(memory=10 * GIB),
    "phi-4-mini": ModelFile(memory=4 * GIB),
    "gemma-27b": ModelFile(memory=18 * GIB, load_seconds=60.0),
    "bge-m3": ModelFile(memory=2 * GIB),
}
NODE: dict[str, Any] = {
    "slots": 4,
    "model": "mistral-7b",
    "prefill_tps": 150.0,
    "decode_tps": 11.0,
    "answer_tokens": 90,
    "prefill_stalls": True,
    "decode_step": 0.02,
    "cache_ram": 60_000,
}


def settings() -> dict[str, Any]:
    keys = [
        {"id": key.id, "name": name, "sha256": key.sha256, **RIGHTS[name]}
        for name, key in CALLERS.items()
    ]
    models = {**sizes(MODELS), "helper": {"use": ["phi-4-mini", "mistral-7b"]}}
    return {"keys": keys, "groups": GROUPS, "models": models, "admin": ADMIN}


async def hand_in(running: Running, name: str, number: int, *more: dict[str, Any]) -> None:
    """Have the gateway do a batch of so many chats, and `more` lines, beside the rest."""
    items = [*lines(number, model="mistral-7b", max_tokens=40), *more]
    made = await upload(running, items, key=name, completion_window="24h")
    assert made.status_code == 200, made.text


async def picture(page: Page, folder: Path, name: str) -> None:
    """Keep a picture of what is shown, in few bytes."""
    end = await page.evaluate(END)
    height = max(LEAST_HEIGHT, min(SIZE["height"], end + 16))
    clip: FloatRect = {"x": 0, "y": 0, "width": SIZE["width"], "height": height}
    shot = Image.open(io.BytesIO(await page.screenshot(clip=clip)))
    shot.convert("RGB").quantize(COLOURS).save(folder / f"dashboard-{name}.png", optimize=True)
    assert (folder / f"dashboard-{name}.png").stat().st_size > 4000


async def test_the_pictures_of_the_docs_are_made(tmp_path: Path) -> None:
    """Where DASHBOARD_PICTURES names a folder, they are made there."""
    folder = Path(FOLDER) if FOLDER else tmp_path
    key = KEYS[AdminRole.ADMIN].text
    async with contextlib.AsyncExitStack() as stack:
        # Its name is in a picture.
        home = Path(stack.enter_context(TemporaryDirectory(prefix="llama-gateway-")))
        router = await stack.enter_async_context(a_router(MODELS))
        more = [{"name": "epyc-e", "url": router.url, "host": "epyc-e", "memory": "48GiB"}]
        running, nodes = await stack.enter_async_context(
            dashboard.a_fleet(home, hosts="abcd", settings=settings(), more=more, **NODE)
        )
        running.admin.headers["authorization"] = f"Bearer {key}"
        await until(lambda: "epyc-e/qwen-14b" in running.gateway.fleet.nodes)
        for model in ("qwen-14b", "phi-4-mini"):
            await order(running, "load", model, "epyc-e")
        await hand_in(running, "reports", 12)
        for number, caller, model in (
            *((6, caller, "mistral-7b") for caller in CALLERS.values()),
            (2, CALLERS["search"], "qwen-14b"),
        ):
            chats = streams(running, number, caller, model=model, max_tokens=80)
            await stack.enter_async_context(chats)
        browser = await stack.enter_async_context(a_browser())
        await at_work(running, nodes)
        for scheme in ("light", "dark"):
            context: dict[str, Any] = {"color_scheme": scheme, "viewport": SIZE}
            async with a_page(browser, running.admin_url, key=key, **context) as watched:
                page = watched.page
                await expect(page.locator("#problems")).to_contain_text("epyc-c-numa1 is down")
                await expect(page.locator("#timeline tbody tr").nth(8)).to_be_attached()
                await picture(page, folder, scheme)
                if scheme == "light":
                    await order(running, "load", "gemma-27b", "epyc-e")
                    await each_page(page, folder)
                assert watched.trouble == []


async def at_work(running: Running, nodes: Mapping[str, EmulatedNode]) -> None:
    """Until the fleet has worked for a while, in which a node died, with batches beside."""
    fleet = running.gateway.fleet.nodes
    history = running.gateway.live.view.history
    await until(lambda: all(fleet[name].speed.decode_tps for name in nodes), 120.0)
    await hand_in(running, "nightly", 400)
    await hand_in(running, "agents", 30, {"custom_id": "line-30", "method": "GET", "url": "/"})
    await until(lambda: len(history.points) * STEP_SECONDS >= SECONDS / 2, 200.0)
    await nodes["epyc-c-numa1"].kill()
    running.write_settings({**settings(), "queue": {"max": 500}})
    await until(lambda: len(history.points) * STEP_SECONDS >= SECONDS, 200.0)


async def each_page(page: Page, folder: Path) -> None:
    for link in (await page.locator("#rail a").all())[1:]:
        address = known(await link.get_attribute("href"))
        await link.click()
        if address == "#/playground":
            await page.get_by_label("Model").select_option("mistral-7b")
            await page.get_by_label("Message").fill("Which of our reports were late last week?")
            await press(page, "Send")
            await expect(page.locator(".turn .way").last).to_contain_text("prompt tokens cached")
        await page.wait_for_timeout(3000)  # until the page has what it asks for
        await picture(page, folder, address.removeprefix("#/"))
