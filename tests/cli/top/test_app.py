"""The screen over a real gateway process, driven by Textual's pilot and in a terminal by tmux."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Static

from gateway.cli.client import AdminClient
from gateway.cli.top.app import Confirm, Explanation, Top
from tests.emulator import EmulatedNode
from tests.gateway_processes import Succession, serving
from tests.gateways import NO_TLS
from tests.polling import eventually

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


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed here")
async def test_the_screen_fits_into_eighty_columns_of_a_terminal(tmp_path: Path) -> None:
    async with EmulatedNode(model="demo") as node, serving(tmp_path, node) as gateway:
        socket = str(tmp_path / "tmux")

        async def tmux(*words: str) -> str:
            process = await asyncio.create_subprocess_exec(
                "tmux", "-S", socket, "-f", "/dev/null", *words,
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            output, _ = await process.communicate()
            return output.decode()

        command = f"{sys.executable} -m gateway top --admin-url {gateway.admin_url}"
        await tmux("new-session", "-d", "-x", "80", "-y", "24", command)
        try:

            async def drawn() -> str | None:
                text = await tmux("capture-pane", "-p")
                return text if " one " in text else None

            async def ended() -> bool | None:
                return not await tmux("list-sessions") or None

            text = await eventually(drawn, LIMIT)
            assert "1 of 1 nodes work" in text
            assert "d Drain" in text
            assert all(len(line) <= 80 for line in text.splitlines())
            await tmux("send-keys", "q")
            await eventually(ended, LIMIT)
        finally:
            await tmux("kill-server")
