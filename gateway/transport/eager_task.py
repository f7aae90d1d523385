"""Runs a coroutine without a task as long as it only waits for a node's whole response.

A task costs its creation, a future for each wait and an iteration of the event loop for each step:
13,000 instructions, 3 to 6 % of the CPU of a small request (`docs/performance.md`, "Caches"). So
the coroutine is stepped by callbacks: first by the client's connection, then by the node's. As soon
as it waits for anything else, or only a part of the response has come, the same coroutine goes on
as an ordinary task.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any, Protocol

_ENDED: Any = object()  # in place of what the coroutine waits for
_NO_STEPS: Iterator[Any] = iter(())


class Wakeable(Protocol):
    """An object that a coroutine without a task may wait for: its `__await__` yields it."""

    on_wake: Callable[[bool], None] | None
    """Called once when the wait is over; with True when nothing more will come."""


@types.coroutine
def ensure_task() -> Generator[None, None, None]:
    """Go on as a task: for code that needs one, such as `asyncio.timeout`."""
    if asyncio.current_task() is None:
        yield


class EagerTask:
    """Runs one coroutine; what it raises goes to `failed`."""

    __slots__ = ("_coroutine", "_steps", "_task", "_tasks")

    def __init__(self, tasks: set[asyncio.Task[None]]) -> None:
        self._tasks = tasks  # holds the task, if one is needed
        self._task: asyncio.Task[None] | None = None
        self._coroutine: Coroutine[Any, Any, None] | None = None
        self._steps: Iterator[Any] = _NO_STEPS

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it until it waits."""
        self._coroutine, self._steps = coroutine, coroutine.__await__()
        self._step()

    def failed(self, error: BaseException) -> None:
        """The coroutine has raised `error`, or was cancelled."""
        if not isinstance(error, asyncio.CancelledError):
            raise error

    def run_in_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it as a task, from the next iteration of the event loop on."""
        self._coroutine = coroutine
        self._go_on_in_task()

    def cancel(self) -> None:
        """Raise `CancelledError` where it waits, soon; does nothing if it has ended."""
        self._go_on_in_task()
        if self._task is not None:
            self._task.cancel()

    def _step(self) -> None:
        try:
            # Not `send`, which would raise an exception at the end.
            awaited = next(self._steps, _ENDED)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - `failed` gets it
            self._coroutine = None
            self.failed(error)
            return
        if awaited is _ENDED:
            self._coroutine = None
        elif awaited is None:
            self._go_on_in_task()
        elif hasattr(awaited, "on_wake"):
            wakeable: Wakeable = awaited
            wakeable.on_wake = self._woken
        else:
            # A future; when it is done, a task takes its result.
            awaited.add_done_callback(self._go_on_in_task)

    def _woken(self, whole: bool) -> None:  # noqa: FBT001 - the only argument of a callback
        if self._task is not None or self._coroutine is None:
            return  # it was cancelled meanwhile
        if whole:
            self._step()
        else:
            self._go_on_in_task()

    def _go_on_in_task(self, _: object = None) -> None:
        # A task can continue a coroutine from any point.
        if self._task is None and self._coroutine is not None:
            self._task = asyncio.get_running_loop().create_task(self._coroutine)
            self._tasks.add(self._task)
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # The task refers to what was raised, whose traceback may refer to this object.
        self._coroutine = self._task = None
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self.failed(error)
