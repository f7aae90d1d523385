"""A coroutine without a task: which waits need none, and which make a task of it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import pytest

from gateway.transport.eager_task import EagerTask, ensure_task


class Response:
    """A `Wakeable`, as a connection is."""

    def __init__(self) -> None:
        self.on_wake: Callable[[bool], None] | None = None

    def __await__(self) -> Generator[Response, None, None]:
        yield self

    def wake(self, *, whole: bool) -> None:
        assert self.on_wake is not None
        on_wake, self.on_wake = self.on_wake, None
        on_wake(whole)


class Witness:
    """A coroutine that notes in which task each of its steps ran."""

    def __init__(self, *waits: Callable[[], Any]) -> None:
        self.waits = waits
        self.steps: list[asyncio.Task[Any] | None] = []
        self.cancelled = False

    async def __call__(self) -> None:
        self.steps.append(asyncio.current_task())
        for wait in self.waits:
            try:
                await wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            self.steps.append(asyncio.current_task())


async def from_a_callback(work: Callable[[], object]) -> None:
    """Call it as the event loop calls a protocol: outside of any task."""
    done = asyncio.get_running_loop().create_future()

    def call() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the waiter gets it
            done.set_exception(error)

    asyncio.get_running_loop().call_soon(call)
    await done


async def settled(tasks: set[asyncio.Task[None]]) -> None:
    async with asyncio.timeout(30):
        while tasks:
            await asyncio.wait(set(tasks))
            await asyncio.sleep(0)


class Failing(EagerTask):
    __slots__ = ("errors",)

    def __init__(self, tasks: set[asyncio.Task[None]]) -> None:
        super().__init__(tasks)
        self.errors: list[BaseException] = []

    def failed(self, error: BaseException) -> None:
        self.errors.append(error)


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_what_a_coroutine_raises_is_told_once_with_or_without_a_task(
    error: type[BaseException],
) -> None:
    async def fail() -> None:
        raise error

    tasks: set[asyncio.Task[None]] = set()
    without, within = Failing(tasks), Failing(tasks)
    await from_a_callback(lambda: without.run(fail()))
    within.run_in_task(fail())
    await settled(tasks)
    assert [type(one) for one in (*without.errors, *within.errors)] == [error, error]


async def test_a_whole_response_continues_it_at_once_and_without_a_task() -> None:
    tasks: set[asyncio.Task[None]] = set()
    reply = Response()
    witness = Witness(lambda: reply)
    await from_a_callback(lambda: EagerTask(tasks).run(witness()))
    assert witness.steps == [None]
    await from_a_callback(lambda: reply.wake(whole=True))
    assert witness.steps == [None, None]
    assert not tasks


async def test_a_part_of_a_response_makes_a_task_of_it() -> None:
    tasks: set[asyncio.Task[None]] = set()
    reply = Response()
    witness = Witness(lambda: reply)
    await from_a_callback(lambda: EagerTask(tasks).run(witness()))
    await from_a_callback(lambda: reply.wake(whole=False))
    assert len(tasks) == 1
    [task] = tasks
    await settled(tasks)
    assert witness.steps == [None, task]


@pytest.mark.parametrize(
    "wait", [ensure_task, lambda: asyncio.sleep(0), lambda: asyncio.sleep(0.001)]
)
async def test_any_other_wait_makes_a_task_of_it(
    wait: Callable[[], Coroutine[Any, Any, Any]],
) -> None:
    tasks: set[asyncio.Task[None]] = set()
    witness = Witness(wait, lambda: asyncio.wait_for(asyncio.sleep(0), 30))
    await from_a_callback(lambda: EagerTask(tasks).run(witness()))
    async with asyncio.timeout(30):
        while len(witness.steps) < 3:  # noqa: ASYNC110 - a list tells nobody
            await asyncio.sleep(0.001)
    first, second, third = witness.steps
    assert first is None
    assert second is not None
    assert third is second
    await settled(tasks)


async def test_cancelling_raises_where_it_waits() -> None:
    tasks: set[asyncio.Task[None]] = set()
    reply, future = Response(), asyncio.get_running_loop().create_future()
    first, second = Witness(lambda: reply), Witness(lambda: future)
    runs = [EagerTask(tasks), EagerTask(tasks)]
    for run, witness in zip(runs, (first, second), strict=True):
        await from_a_callback(functools.partial(run.run, witness()))
        run.cancel()
    # What comes meanwhile does not run it a second time.
    reply.wake(whole=True)
    future.set_result(None)
    await settled(tasks)
    assert first.cancelled
    assert second.cancelled
    assert first.steps == [None]
    runs[0].cancel()
    assert not tasks
