"""The dashboard over a thousand nodes, in a real browser; the figures are printed, not judged.

The nodes are in the inventory of a real gateway and switched off there, so that nothing probes
them; their figures change at each update as those of busy nodes would.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import CDPSession

from gateway.nodes.node import Node
from tests.admin.browser import a_browser, a_page, needs_browser
from tests.gateways import Running, running_gateway, until
from tests.nodes.build import take

pytestmark = [pytest.mark.slow, needs_browser]

NODES = 1000
UPDATES = 20
NIGHT = int(os.environ.get("DASHBOARD_UPDATES", "64"))
"""Updates at high speed, after which memory must be what it was; a night has 30,000."""
BUSY_SHARE = 0.5
"""Share of the nodes whose picture changes with each update."""


def a_thousand() -> list[dict[str, Any]]:
    return [
        {
            "name": f"epyc-{number // 2:03}-numa{number % 2}",
            "url": f"http://10.0.{number // 250}.{1 + number % 250}:8080",
            "host": f"epyc-{number // 2:03}",
            "slots": 4,
            "model": "mistral-7b",
            "labels": {"numa": str(number % 2)},
            "enabled": False,
        }
        for number in range(NODES)
    ]


def work(nodes: list[Node], round_: int) -> None:
    """Take and return leases, so that the cells of some nodes differ from those before."""
    step = int(1 / BUSY_SHARE)
    for number, node in enumerate(nodes):
        if number % step == round_ % step:
            for lease in list(node.leases):
                lease.release()
            for _ in range(round_ % 4):
                take(node, expected_prefill=30.0, expected_total=90.0)


async def figures(session: CDPSession) -> dict[str, float]:
    told = await session.send("Performance.getMetrics")
    return {one["name"]: one["value"] for one in told["metrics"]}


async def next_update(running: Running, before: object) -> object:
    """Wait until another frame is published; returns it."""
    live = running.gateway.live
    await until(lambda: live._frame is not before)
    return live._frame


async def test_a_thousand_nodes_are_painted_and_updated_and_memory_stays_flat(
    tmp_path: Path,
) -> None:
    async with (
        running_gateway(tmp_path, a_thousand(), wait_ready=False) as running,
        a_browser() as browser,
    ):
        live, nodes = running.gateway.live, list(running.gateway.fleet.nodes.values())
        paints = []
        for _ in range(5):
            async with a_page(browser, running.admin_url) as watched:
                await watched.page.wait_for_selector(".dots .node")
                paints.append(
                    await watched.page.evaluate(
                        "performance.getEntriesByName('fleet drawn')[0].startTime"
                    )
                )
        paint = statistics.median(paints)
        print(f"\nfirst paint of {NODES} nodes: {paint:.0f} ms (median of 5)", flush=True)
        async with a_page(browser, running.admin_url) as watched:
            page = watched.page
            await page.wait_for_selector(".uplot")
            assert await page.locator(".dots .node").count() == NODES
            session = await page.context.new_cdp_session(page)
            await session.send("Performance.enable", {"timeDomain": "threadTicks"})
            frame: object = live._frame
            tasks = []
            for round_ in range(UPDATES + 1):
                before = await figures(session)
                work(nodes, round_)
                frame = await next_update(running, frame)
                await page.evaluate("new Promise((done) => requestAnimationFrame(done))")
                after = await figures(session)
                tasks.append(1000 * (after["TaskDuration"] - before["TaskDuration"]))
            task = statistics.median(tasks[1:])
            print(
                f"CPU time of tasks in an update: {task:.0f} ms (median of {UPDATES})", flush=True
            )
            live._update_seconds = 0.03
            sizes = []
            for round_ in range(NIGHT):
                work(nodes, round_)
                frame = await next_update(running, frame)
                if round_ % (NIGHT // 8) == NIGHT // 8 - 1:
                    await session.send("HeapProfiler.collectGarbage")
                    told = await figures(session)
                    sizes.append((told["JSHeapUsedSize"] / 1e6, int(told["Nodes"])))
            assert watched.trouble == []
        print(f"heap in MB and DOM nodes, {NIGHT} updates: {sizes}")
        # The first of them still has what the page's start has left.
        assert sizes[-1][0] < sizes[1][0] + 5
        assert sizes[-1][1] < sizes[1][1] + 1000
