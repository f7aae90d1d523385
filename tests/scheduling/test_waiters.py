"""Waiting requests fall due in time, and many of them cost no more, each, than few."""

from __future__ import annotations

import asyncio
import math
import random

from gateway.lease import NOTHING_TRIED, LeaseRequest, PromptKey
from gateway.scheduling.fleet_sync import NodeCandidates
from gateway.scheduling.node_slots import QueuedRequest
from gateway.scheduling.waiters import MOST_STALE_TIMERS, Waiter, Waiters
from tests.calls import count_calls
from tests.fleet.build import Clock
from tests.scheduling.build import a_request, a_scheduler, node, settle, start_lease, take_lease


def a_waiter(until: float, open_at: float = math.inf) -> Waiter:
    request = a_request()
    candidates = NodeCandidates((), ((),), fallback_at=open_at)
    ask = QueuedRequest(
        request.id, candidates.groups, request.caller.priority, "caller", 0.0, 1, 9.0, 9.0, {}, {}
    )
    return Waiter(request, NOTHING_TRIED, candidates, ask, 0.0, until, asyncio.Future())


async def test_each_waiter_falls_due_once_at_the_sooner_of_its_limits() -> None:
    rng, waiters = random.Random(1), Waiters()
    staying = []
    for number in range(500):
        waiter = a_waiter(rng.uniform(0, 100), rng.choice([math.inf, rng.uniform(0, 100)]))
        waiters.add(waiter)
        if number % 3:
            staying.append(waiter)
        else:
            assert waiters.pop(waiter.queued) is waiter
            assert waiters.pop(waiter.queued) is None
    for waiter in staying[::5]:
        waiters.set_candidates(waiter, NodeCandidates((), ((),), fallback_at=rng.uniform(0, 100)))
    for until in range(0, 101, 5):
        expected = {
            one
            for one in staying
            if until - 5 < min(one.expires_at, one.candidates.fallback_at) <= until
        }
        found = waiters.pop_due(until)
        assert set(found) == expected
        assert len(found) == len(expected)
        assert all(waiter.queued in waiters for waiter in found)
    assert waiters.next_due() == math.inf
    assert list(waiters) == staying


async def test_the_timers_of_waiters_that_have_left_are_dropped() -> None:
    waiters = Waiters()
    here = a_waiter(1e9)
    waiters.add(here)
    for _ in range(1000):
        waiter = a_waiter(1e9)
        waiters.add(waiter)
        waiters.pop(waiter.queued)
    assert list(waiters) == [here]
    assert len(waiters.timers) <= MOST_STALE_TIMERS + 3
    assert waiters.pop_due(1e9) == [here]


def long_prompt_request(number: int, time_limit: float | None = None) -> LeaseRequest:
    """A request with a long prompt of its own, of one of five callers."""
    blocks = tuple(hash((number, place)) for place in range(20))
    return a_request(
        fairness_key=f"caller {number % 5}",
        prompt_key=PromptKey(blocks, 2500.0, size=10_000),
        text_bytes=10_000,
        time_limit=time_limit,
    )


async def costs(waiting: int) -> dict[str, int]:
    """Calls of an arrival, of a release, and of a wait that expires."""
    clock = Clock()
    scheduler = a_scheduler(node(slots=4), clock=clock, queue={"max": 10_000, "max_wait": 9999})
    running = [(await take_lease(scheduler, long_prompt_request(-n)))[0] for n in range(4)]
    tasks = []
    for number in range(waiting):
        limit = 0.1 if number == waiting // 2 else 1000.0 + number
        tasks.append(asyncio.create_task(take_lease(scheduler, long_prompt_request(number, limit))))
    await settle()
    assert scheduler.dispatcher.waiting == waiting
    arrival = scheduler.wait_for_lease(long_prompt_request(waiting))

    def arrives() -> None:
        arrival.send(None)
        scheduler.match()

    def leaves() -> None:
        running[0].release()
        scheduler.match()

    found = {"comes": count_calls(arrives), "goes": count_calls(leaves)}
    assert scheduler.dispatcher.waiting == waiting
    clock.passes(0.2)
    found["is over"] = count_calls(scheduler.check_due)
    assert scheduler.dispatcher.waiting == waiting - 1
    arrival.close()
    for task in tasks:
        task.cancel()
    await settle()
    assert scheduler.dispatcher.waiting == 0
    scheduler.close()
    return found


async def test_ten_times_as_many_waiters_cost_no_more_for_each() -> None:
    few, many = await costs(200), await costs(2000)
    for what, count in few.items():
        assert many[what] < 1.25 * count + 20, (what, few, many)


async def test_deadlines_are_kept_between_two_ticks() -> None:
    clock = Clock()
    scheduler = a_scheduler(node(slots=1), clock=clock)
    await take_lease(scheduler, a_request())
    first = await start_lease(scheduler, a_request(time_limit=0.1))
    other = await start_lease(scheduler, a_request(time_limit=0.2))
    clock.passes(0.1)
    scheduler.check_due()
    await settle()
    assert (first.done(), other.done()) == (True, False)
    clock.passes(0.1)
    scheduler.check_due()
    await settle()
    assert other.done()
    for task in (first, other):
        assert getattr(task.exception(), "code", None) == "queue_timeout"
    scheduler.close()
