"""A coroutine without a task: which waits need none, and which make a task of it.

What it raises is told to clients and the log: tests/http/test_exchange.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import pytest

from gateway.transport.eager_task import EagerTask, ensure_task

Tasks = set[asyncio.Task[None]]


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
    done = asyncio.Event()

    def call() -> None:
        work()
        done.set()

    asyncio.get_running_loop().call_soon(call)
    async with asyncio.timeout(30):
        await done.wait()


async def settled(tasks: Tasks) -> None:
    async with asyncio.timeout(30):
        while tasks:
            await asyncio.wait(set(tasks))
            await asyncio.sleep(0)


@pytest.mark.parametrize("whole", [True, False])
async def test_a_whole_response_continues_it_at_once_and_a_part_makes_a_task_of_it(
    whole: bool,
) -> None:
    tasks: Tasks = set()
    reply = Response()
    witness = Witness(lambda: reply)
    await from_a_callback(lambda: EagerTask(tasks).run(witness()))
    assert witness.steps == [None]
    await from_a_callback(lambda: reply.wake(whole=whole))
    made = [None] if whole else [*tasks]
    await settled(tasks)
    assert witness.steps == [None, *made]


@pytest.mark.parametrize(
    "wait", [ensure_task, lambda: asyncio.sleep(0), lambda: asyncio.sleep(0.001)]
)
async def test_any_other_wait_makes_a_task_of_it(wait: Callable[[], Any]) -> None:
    tasks: Tasks = set()
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
    reply, future = Response(), asyncio.get_running_loop().create_future()
    for wait, come in (
        (lambda: reply, lambda: reply.wake(whole=True)),
        (lambda: future, lambda: future.set_result(None)),
    ):
        tasks: Tasks = set()
        run, witness = EagerTask(tasks), Witness(wait)
        await from_a_callback(lambda run=run, witness=witness: run.run(witness()))
        run.cancel()
        come()  # What comes meanwhile does not run it a second time.
        await settled(tasks)
        assert (witness.cancelled, len(witness.steps)) == (True, 1)
        run.cancel()
        assert not tasks
