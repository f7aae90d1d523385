"""The screen where there is little room, over a real gateway with many problems."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.containers import VerticalScroll
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import DataTable, Static

from gateway.tools.cli.client import AdminClient
from gateway.tools.top.app import Confirm, Top
from tests.gateway_processes import serving
from tests.tools.top.test_app import until

pytestmark = pytest.mark.slow

NODES = 24
DEAD = [
    {"name": f"node-{number}", "url": f"http://127.0.0.1:9/{number}", "host": f"host-{number}"}
    for number in range(NODES)
]


@asynccontextmanager
async def screen(folder: Path, columns: int, lines: int) -> AsyncIterator[tuple[Top, Pilot[None]]]:
    """The screen over nodes none of which is there."""
    async with serving(folder, DEAD) as gateway:
        with AdminClient(gateway.admin_url, None) as admin:
            app = Top(admin, time.monotonic)
            async with app.run_test(size=(columns, lines)) as pilot:
                await until(pilot, lambda: len(app.picture.problems) > NODES / 2)
                yield app, pilot


def drawn(widget: Widget) -> str:
    """What is seen of a widget."""
    return "\n".join(
        "".join(segment.text for segment in strip)
        for strip in widget.render_lines(widget.outer_size.region)
    )


async def test_problems_leave_room_for_the_nodes_on_a_low_screen(tmp_path: Path) -> None:
    async with screen(tmp_path, 40, 10) as (app, pilot):
        table = app.query_one("#nodes-table", DataTable)
        # Its head and some rows.
        await until(pilot, lambda: table.region.height >= 4)
        assert table.region.bottom <= 10
        assert "critical" in drawn(app.query_one("#problems-above"))
        for columns, lines, least in ((80, 24, 8), (200, 50, 30), (40, 10, 4)):
            await pilot.resize_terminal(columns, lines)
            await until(pilot, lambda: app.size == (columns, lines))  # noqa: B023 - awaited here
            await until(pilot, lambda: table.region.height >= least)  # noqa: B023
            assert table.region.bottom <= lines
        # Nothing is drained whose name was not seen.
        await pilot.press("d")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.pause()
        question = app.screen.query_one(Static)
        assert question.region.right <= 40
        assert question.region.bottom <= 10
        words = " ".join(drawn(question).split())
        assert "may end." in words
        assert "y: yes n: no" in words
        await pilot.press("n")


async def test_all_problems_can_be_read_by_scrolling(tmp_path: Path) -> None:
    async with screen(tmp_path, 80, 24) as (app, pilot):
        await pilot.press("4")
        scroll = app.query_one("#problems-scroll", VerticalScroll)
        await until(pilot, lambda: scroll.has_focus)
        # They are not shown a second time above.
        await until(pilot, lambda: not app.query_one("#problems-above").display)
        await until(pilot, lambda: scroll.max_scroll_y > 10)
        await pilot.press("end")
        await until(pilot, lambda: scroll.scroll_y == scroll.max_scroll_y)
        heard = app.picture.at
        await until(pilot, lambda: app.picture.at > heard)
        assert scroll.scroll_y == scroll.max_scroll_y
        await pilot.press("1")
        await until(pilot, lambda: app.query_one("#problems-above").display)
