"""The screen over a real gateway process, driven by Textual's pilot and on a terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Static

from gateway.cli.client import AdminClient
from gateway.cli.top.app import Confirm, Explanation, Top
from tests.cli.running import run_on_terminal
from tests.emulator import EmulatedNode
from tests.gateway_processes import Succession, serving
from tests.gateways import NO_TLS

LIMIT = 60.0

pytestmark = pytest.mark.slow


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Let the screen run until the condition holds."""
    async with asyncio.timeout(LIMIT):
        while not condition():
            await pilot.pause(0.05)


@asynccontextmanager
async def screen(
    gateway: Succession, columns: int = 80, lines: int = 24
) -> AsyncIterator[tuple[Top, Pilot[None]]]:
    """The screen over this gateway."""
    with AdminClient(gateway.admin_url, None) as admin:
        app = Top(admin, time.monotonic)
        async with app.run_test(size=(columns, lines)) as pilot:
            yield app, pilot
        await asyncio.to_thread(app.following.join, LIMIT)
        assert not app.following.is_alive()


def shown(app: App[None], name: str) -> str:
    return str(app.query_one(name, Static).visual)


def drawn(widget: Widget) -> str:
    """What is seen of a widget."""
    return "\n".join(
        "".join(segment.text for segment in strip)
        for strip in widget.render_lines(widget.outer_size.region)
    )


async def stream_forever(gateway: Succession) -> None:
    async with httpx.AsyncClient(trust_env=False, verify=NO_TLS, timeout=LIMIT) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        headers = {"x-request-id": "the-long-one"}
        url = f"{gateway.url}/v1/chat/completions"
        await client.post(url, json={**body, "max_tokens": 2000}, headers=headers)


async def test_an_operator_drains_resumes_cancels_and_sees_a_node_die(tmp_path: Path) -> None:
    async with (
        EmulatedNode(model="demo", slots=2, answer_tokens=2000, decode_tps=10) as node,
        serving(tmp_path, node) as gateway,
        screen(gateway) as (app, pilot),
    ):
        await until(pilot, lambda: app.picture.nodes.get("one", {}).get("state") == "ready")
        assert "1 of 1 nodes work" in shown(app, "#headline")
        chat = asyncio.create_task(stream_forever(gateway))
        await until(pilot, lambda: app.picture.requests)

        for answer in "ny":
            await pilot.press("d")
            await until(pilot, lambda: isinstance(app.screen, Confirm))
            await pilot.press(answer)
        await until(pilot, lambda: app.picture.nodes["one"]["state"] == "draining")
        await until(pilot, lambda: shown(app, "#note") == "drained one")
        await pilot.press("r")
        await until(pilot, lambda: app.picture.nodes["one"]["state"] == "ready")

        await pilot.press("3")
        await until(pilot, lambda: app.query_one("#requests-table").has_focus)
        await pilot.press("c")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("y")
        await asyncio.wait_for(chat, LIMIT)
        await until(pilot, lambda: app.picture.requests == {})

        await node.kill()
        await until(pilot, lambda: app.picture.nodes["one"]["state"] == "down")
        await until(pilot, lambda: "one is down" in shown(app, "#problems-above"))


async def test_a_request_is_explained_by_a_key_and_its_words_stay_text(tmp_path: Path) -> None:
    hostile = "[bold]demo[/bold]"
    async with (
        EmulatedNode(model=hostile, slots=1, answer_tokens=2000, decode_tps=10) as node,
        serving(tmp_path, node) as gateway,
        screen(gateway) as (app, pilot),
    ):
        await until(pilot, lambda: app.picture.nodes.get("one", {}).get("state") == "ready")
        await pilot.press("w")
        await until(pilot, lambda: "choose a request first" in shown(app, "#note"))
        chat = asyncio.create_task(stream_forever(gateway))
        await until(pilot, lambda: app.picture.requests)
        await pilot.press("3", "w")
        await until(pilot, lambda: isinstance(app.screen, Explanation))
        await pilot.pause()
        explanation = drawn(app.screen.query_one("#explanation"))
        for words in ("the-long-one", hostile, "attempt 1", "PREDICTED"):
            assert words in explanation
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, Explanation))
        chat.cancel()


async def test_the_screen_is_drawn_on_a_terminal_and_a_key_ends_it(tmp_path: Path) -> None:
    async with EmulatedNode(model="demo") as node, serving(tmp_path, node) as gateway:
        command = partial(run_on_terminal, "top", "--admin-url", gateway.admin_url)
        ready = b"1 of 1 nodes work"
        status, shown = await asyncio.to_thread(command, question=ready, typed="q")
    assert status == 0
    assert "Drain" in shown
