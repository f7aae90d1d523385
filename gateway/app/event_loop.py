"""The event loop of a process that serves clients, its tasks, and the garbage collector."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog
import uvloop

GARBAGE_SECONDS = 10.0  # seconds between two looks whether garbage of all ages may be collected
# Collections of middle-aged objects after which those of all ages are worth one: of those there
# were 4,000 more each time.
DUE_AFTER = 100
# Of those as well: then Python collects all garbage, though there was no idle moment.
FORCED_AFTER = 25_000
TASKS_SECONDS = 10.0  # most seconds for tasks to end, once they are cancelled
log = structlog.get_logger()


def run_event_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine on uvloop, with the garbage collector tuned for the gateway."""
    # Requests leave almost no reference cycles, and a full collection for every few hundred of
    # them cost 7 % of the time. The event loop waits for each collection: 20 ms for 50,000 young
    # objects, those of 400 streams that have begun. How long all of them take together does not
    # depend on how many objects each visits. So these are small and frequent: 2,000 objects, 4,000
    # in every second one. Full ones take 0.2 s beside 2,000 streams: `collect_garbage` waits for a
    # moment without requests.
    freeze_objects()
    gc.set_threshold(2_000, 0, FORCED_AFTER)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def freeze_objects() -> None:
    """Let no later collection visit the objects that exist by now: they live until the end."""
    gc.collect()
    gc.freeze()


async def collect_garbage(is_idle: Callable[[], bool]) -> None:
    """Collect garbage of all ages while the gateway is idle, until cancelled."""
    while True:
        await asyncio.sleep(GARBAGE_SECONDS)
        if is_idle() and gc.get_count()[2] >= DUE_AFTER:
            gc.collect()


async def wait_for_first(*works: Awaitable[Any], timeout: float | None = None) -> None:
    """Wait until one of these has ended, at most so many seconds; the others are cancelled."""
    waits = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


class OwnTasks:
    """Tasks that end with their owner; the log tells if one fails, or does not end."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run it in a task."""
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def end(self) -> None:
        """Cancel all of them, and wait until they have ended."""
        for task in self._running:
            task.cancel()
        if self._running:
            _, late = await asyncio.wait(set(self._running), timeout=TASKS_SECONDS)
            for task in late:
                log.error("a task does not end", task=task.get_name())

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task failed", task=task.get_name(), exc_info=error)
