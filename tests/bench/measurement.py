"""One measurement: CPU of proxy and load, wall time, and optionally perf's samples."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.load import Address
from tests.bench.process import cpu_seconds, waited_seconds
from tests.bench.upstream import Upstream

SETTLE = 0.1
"""Seconds after the last answer in which the proxy's CPU still counts: it may log or clean up."""


@dataclass(frozen=True, slots=True)
class RunningTarget:
    """A running target and its upstream; `pid` is None for direct."""

    address: Address
    pid: int | None
    upstream: Upstream
    perf: Path | None = None  # the file for the samples of `perf record`


@dataclass(slots=True)
class Measurement:
    """CPU and wall seconds; filled when the measurement ends.

    `waited` is the time for which proxy and load were runnable while other work had their cores.
    """

    proxy: float = 0.0
    load: float = 0.0
    waited: float = 0.0
    wall: float = 0.0
    connections: int = 0
    extra: dict[str, float] = field(default_factory=dict)

    def figures(self, units: int) -> dict[str, float]:
        """The figures; the CPU time is divided by `units`, the number of requests or chunks."""
        units = max(units, 1)
        return {
            "cpu_us": self.proxy / units * 1e6,
            "load_us": self.load / units * 1e6,
            "rate": units / self.wall,
            "proxy_busy": self.proxy / self.wall,
            "load_busy": self.load / self.wall,
            "disturbed": self.waited / self.wall,
            "upstream_connections": self.connections,
            **self.extra,
        }


@asynccontextmanager
async def measuring(subject: RunningTarget) -> AsyncIterator[Measurement]:
    """Measure the body of the `async with`."""
    measured = Measurement()
    opened = subject.upstream.counters.connections
    with _recording(subject):
        proxy = cpu_seconds(subject.pid) if subject.pid else 0.0
        waited = waited_seconds(os.getpid())  # the proxy is a child of this process
        load, wall = time.process_time(), time.perf_counter()
        yield measured
        measured.load = time.process_time() - load
        measured.wall = time.perf_counter() - wall
        measured.waited = waited_seconds(os.getpid()) - waited
        await asyncio.sleep(SETTLE)
        measured.proxy = cpu_seconds(subject.pid) - proxy if subject.pid else 0.0
    measured.connections = subject.upstream.counters.connections - opened


@contextlib.contextmanager
def _recording(subject: RunningTarget) -> Iterator[None]:
    if subject.perf is None or subject.pid is None:
        yield
        return
    command = ["perf", "record", "-q", "-g", "-F", "999", "-p", str(subject.pid)]
    recorder = subprocess.Popen([*command, "-o", str(subject.perf)])
    try:
        yield
    finally:
        recorder.terminate()
        recorder.wait()
