"""The running gateway, emulated nodes and their clients in one process, in virtual time.

An event loop whose clock stands still while anything can be done, and then jumps to the next timer:
what the machine does besides makes no difference, and a minute of the fleet's time takes seconds.
All that it runs must go by `VirtualLoop.time`; sockets on loopback are ready nearly at once.

So a test that is about time may tell exactly how long something took, and is never late.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

BEGIN = 1000.0
"""Where virtual time begins: as on a machine, no moment is 0."""
LOOKS = 4
"""Times that the sockets are asked before it is believed that nothing is under way there."""
LEAP = 0.1
"""Seconds of virtual time; before it moves so far without anything from the sockets ..."""
GRACE = 0.002
"""... the kernel gets so many seconds of real time: under load it may bring what was sent later."""
PATIENCE = 0.01
"""Seconds of real time for which a thread is waited for before the sockets are asked again."""


class _Selector(selectors.DefaultSelector):
    """Never waits for a timer: moves the loop's clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = BEGIN
        self.quiet = 0.0
        """Seconds of virtual time since the sockets had something, or the kernel got its grace."""
        self.threads = 0
        """Pieces of work that run in real time; meanwhile the clock stands still."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        for _ in range(LOOKS):
            ready = super().select(0)
            if ready:
                self.quiet = 0.0
            if ready or timeout == 0:
                return ready
        if timeout is None or self.threads:
            return super().select(PATIENCE)
        self.quiet += max(0.0, timeout)
        if self.quiet >= LEAP:
            self.quiet = 0.0
            if ready := super().select(GRACE):
                return ready
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        self._virtual.threads += 1
        done = super().run_in_executor(executor, func, *args)
        done.add_done_callback(self._back)
        return done

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """End the executor's threads in real time, without the timer that newer Pythons set.

        From Python 3.12 on, `asyncio.Runner` gives them 300 seconds: virtual ones pass at once.
        """
        self._virtual.threads += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._virtual.threads -= 1

    def _back(self, _: asyncio.Future[Any]) -> None:
        self._virtual.threads -= 1


def now() -> float:
    """The clock of tests: virtual where the loop's time is, else the machine's."""
    loop = asyncio.get_running_loop()
    return loop.time() if isinstance(loop, VirtualLoop) else time.monotonic()


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on a `VirtualLoop`. Its fixtures must not need a loop."""

    @functools.wraps(test)
    def run(*args: P.args, **keys: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **keys))

    return run
