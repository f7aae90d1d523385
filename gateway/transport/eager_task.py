"""A coroutine that runs without a task while all that it waits for is a node's whole reply.

A task costs its making, a future for each wait and a turn of the event loop for each step: for a
small request that is a fifth of its whole price. So its coroutine is run on from where things
happen, first by the client's connection and then by the node's. As soon as it waits for anything
else, or what came is not the whole reply, the same coroutine goes on as an ordinary task.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol


class Wakeable(Protocol):
    """What a coroutine without a task may wait for: it yields this."""

    on_wake: Callable[[bool], None] | None
    """Called once when there is something to wake for; True: that nothing more will come."""


@types.coroutine
def ensure_task() -> Generator[None, None, None]:
    """From here on there is a task: for what can't do without, such as `asyncio.timeout`."""
    if asyncio.current_task() is None:
        yield


class EagerTask:
    """Runs one coroutine. It must catch its own exceptions."""

    __slots__ = ("_coroutine", "_task", "_tasks")

    def __init__(self, tasks: set[asyncio.Task[None]]) -> None:
        self._tasks = tasks
        """Owns the task, should one be needed."""
        self._task: asyncio.Task[None] | None = None
        self._coroutine: Coroutine[Any, Any, None] | None = None

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it as far as it goes by itself."""
        self._coroutine = coroutine
        self._step()

    def run_in_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it soon."""
        self._coroutine = coroutine
        self._go_on_in_task()

    def cancel(self) -> None:
        """Raise `CancelledError` where it waits, soon; nothing if it has ended."""
        self._go_on_in_task()
        if self._task is not None:
            self._task.cancel()

    def _step(self) -> None:
        assert self._coroutine is not None
        try:
            awaited = self._coroutine.send(None)
        except (StopIteration, asyncio.CancelledError):
            self._coroutine = None
            return
        if awaited is None:
            self._go_on_in_task()
        elif getattr(awaited, "_asyncio_future_blocking", None) is not None:
            # A future, by asyncio's own test. A task, too, says so that it waits for it.
            awaited._asyncio_future_blocking = False  # noqa: SLF001
            awaited.add_done_callback(self._go_on_in_task)
        else:
            waited: Wakeable = awaited
            waited.on_wake = self._woken

    def _woken(self, whole: bool) -> None:  # noqa: FBT001 - the only argument of a callback
        if self._task is not None or self._coroutine is None:
            return  # it was cancelled meanwhile
        if whole:
            self._step()
        else:
            self._go_on_in_task()

    def _go_on_in_task(self, _: object = None) -> None:
        # The task takes up a coroutine where it stands, begun or not.
        if self._task is None and self._coroutine is not None:
            self._task = asyncio.get_running_loop().create_task(self._coroutine)
            self._tasks.add(self._task)
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._coroutine = None
