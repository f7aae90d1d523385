"""Memory bandwidth, in bytes/s: measured by a short stream test, or from the memory modules."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gateway.tools.local.topology import Topology

STREAM_ROUNDS = 8  # the fastest counts: other work can only make a round slower

LEAST_STREAM_BYTES = 64 << 20  # of a thread

MOST_STREAM_BYTES = 4 << 30  # of all threads

CACHE_MULTIPLE = 4  # of the caches that the test must not fit into

CHANNEL_BYTES = 8  # of a transfer: a DDR channel has 64 data lines

REACHED_SHARE = 0.75
"""Of the modules' peak that a program reads at. McCalpin's STREAM reaches 70 to 85 % of it on
server processors."""


class StreamError(Exception):
    """The stream test can't run. The text says why."""


def bandwidth_of_modules(channels: int, transfers: float) -> float:
    """Return bytes/s of so many channels at so many MT/s."""
    return channels * transfers * 1e6 * CHANNEL_BYTES * REACHED_SHARE


def measure_bandwidth(topology: Topology, threads: int | None = None) -> float:
    """Read memory with a thread for each core; return bytes/s of the fastest round.

    It takes about a second, and memory of four times the last-level caches. Raises StreamError
    where there is too little.
    """
    count = threads or sum(topology.threads_per_server(node) for node in topology.nodes)
    top = max((cache.level for cache in topology.caches), default=0)
    cached = sum(cache.size for cache in topology.caches if cache.level == top)
    size = max(LEAST_STREAM_BYTES, CACHE_MULTIPLE * cached // count)
    size = min(size, MOST_STREAM_BYTES // count)
    if size * count > topology.memory_available // 2:
        raise StreamError(
            f"--measure reads {size * count >> 20} MiB, more than half of the available memory. "
            "Remedy: give --channels and --mt-per-s instead"
        )
    # Each thread fills its own part, so that its pages lie on its own NUMA node.
    parts: list[np.ndarray[Any, np.dtype[np.int8]]] = []
    _run([lambda: parts.append(np.ones(size, dtype=np.int8))] * count)
    seconds = min(_run([part.max for part in parts]) for _ in range(STREAM_ROUNDS))
    return size * count / seconds


def _run(jobs: Sequence[Callable[[], object]]) -> float:
    """Run the jobs in threads of their own; return the seconds until the last has ended."""
    barrier = threading.Barrier(len(jobs) + 1)

    def work(job: Callable[[], object]) -> None:
        barrier.wait()
        job()

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    barrier.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began
