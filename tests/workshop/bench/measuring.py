"""Benchmarks of servers in this process."""

from __future__ import annotations

from typing import Any

from gateway.workshop.bench.exchange import CHAT
from gateway.workshop.bench.load import BenchPlan, Load, Loop, RequestPattern, parse_loads
from gateway.workshop.bench.report import BenchReport, BenchSession
from tests.virtual import now

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def plan(url: str, loads: list[Load] | None = None, **options: Any) -> BenchPlan:
    """A plan of a few small requests."""
    usual: dict[str, Any] = {"pattern": RequestPattern(64, 8), "endpoint": CHAT, "warm_up": 1}
    loads = loads or parse_loads(Loop.CLOSED, "2", 4, None)
    return BenchPlan(url=url, loads=loads, **usual | options)


async def measure(url: str, loads: list[Load] | None = None, **options: Any) -> BenchReport:
    """Measure a server."""
    session = BenchSession(plan(url, loads, **options), clock=now)
    await session.run()
    return session.report()
