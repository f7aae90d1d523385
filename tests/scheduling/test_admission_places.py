"""Whose crowd fills the queue has it: others get their places all the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.fleet.node import Node
from gateway.request import Caller, Priority, Request
from gateway.scheduling.scheduler import Scheduler
from tests.scheduling.build import a_request, a_scheduler, node, settle, start_lease
from tests.virtual import VirtualLoop

BEST = Priority.URGENT


def of(caller: str, user: str = "", **keys: Any) -> Request:
    """A request of a caller, or of a user that it names."""
    request = a_request(**keys)
    request.caller = Caller(caller, caller, BEST)
    request.fairness_key = f"{caller}/{user}" if user else caller
    return request


class Crowd:
    """Requests that wait for the one slot of a node."""

    def __init__(self, **queue: Any) -> None:
        self.node: Node = node(slots=1)
        self.scheduler: Scheduler = a_scheduler(self.node, queue=queue)
        self.tasks: dict[str, tuple[Request, asyncio.Task[Any]]] = {}

    async def ask(self, request: Request) -> str:
        """What has become of it at once: `waits`, or a code."""
        task = await start_lease(self.scheduler, request)
        self.tasks[request.id] = request, task
        return self.fate(request)

    def fate(self, request: Request) -> str:
        task = self.tasks[request.id][1]
        if not task.done():
            return "waits"
        error = task.exception()
        assert isinstance(error, GatewayError), error
        assert error.retry_after is not None
        assert error.retry_after >= 1
        return error.code

    def waiting(self, by: str = "caller") -> Counter[str]:
        found = [one for one, task in self.tasks.values() if not task.done()]
        if by == "user":
            return Counter(one.fairness_key for one in found)
        return Counter(one.caller.id for one in found)

    async def __aenter__(self) -> Self:
        self.running = await start_lease(self.scheduler, of("runs"))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.scheduler.close()
        await asyncio.gather(*(task for _, task in self.tasks.values()), return_exceptions=True)


async def test_another_callers_requests_wait_where_ones_crowd_was_turned_away() -> None:
    async with Crowd(max=16) as crowd:
        fates = Counter([await crowd.ask(of("a")) for _ in range(300)])
        assert fates == {"waits": 14, "queue_full": 286}
        for _ in range(7):
            assert await crowd.ask(of("b")) == "waits"
        assert await crowd.ask(of("b")) == "queue_full", "it would have more than the other"
        assert await crowd.ask(of("a")) == "queue_full"
        assert crowd.waiting() == {"a": 8, "b": 7}


async def test_the_newest_of_the_largest_goes_and_nothing_that_was_at_a_node() -> None:
    async with Crowd(max=4) as crowd:
        retried = of("a", failed_nodes=frozenset({"a"}))
        early, late = of("a"), of("a")
        for request in (early, late, retried, of("c")):
            assert await crowd.ask(request) == "waits"
        assert await crowd.ask(of("b")) == "waits"
        assert [crowd.fate(one) for one in (early, late, retried)] == [
            "waits",
            "queue_full",
            "waits",
        ]
        # One has two, and each of the others one: for as many as that nobody goes.
        assert await crowd.ask(of("b")) == "queue_full"
        assert await crowd.ask(of("d")) == "waits"
        assert [crowd.fate(one) for one in (early, retried)] == ["queue_full", "waits"]


@pytest.mark.parametrize("theirs", list(Priority))
async def test_a_crowd_takes_room_from_no_class_of_another(theirs: Priority) -> None:
    async with Crowd(max=20) as crowd:
        for _ in range(40):
            await crowd.ask(of("a"))
        for _ in range(5):
            assert await crowd.ask(of("b", priority=theirs)) == "waits"


async def test_of_the_largest_the_lowest_class_goes_first() -> None:
    async with Crowd(max=4) as crowd:
        urgent = of("a", priority=Priority.URGENT)
        batch = of("a", priority=Priority.BATCH)
        normal = of("a")
        for request in (batch, normal, urgent, of("a", priority=Priority.URGENT)):
            assert await crowd.ask(request) == "waits"
        assert await crowd.ask(of("b", priority=Priority.BATCH)) == "waits"
        assert [crowd.fate(one) for one in (batch, normal, urgent)] == [
            "queue_full",
            "waits",
            "waits",
        ]


async def test_nobody_goes_while_the_queue_has_room_for_both() -> None:
    async with Crowd(max=100) as crowd:
        first = [of("a", priority=Priority.PREMIUM) for _ in range(60)]
        for request in first:
            assert await crowd.ask(request) == "waits"
        # More than the share of this class wait, but of one other caller.
        for _ in range(20):
            assert await crowd.ask(of("b", priority=Priority.BATCH)) == "waits"
        assert all(crowd.fate(one) == "waits" for one in first)


async def test_many_with_little_each_leave_a_better_class_its_places() -> None:
    async with Crowd(max=20) as crowd:
        for number in range(12):
            told = await crowd.ask(of(f"k{number}", priority=Priority.BATCH))
            assert told == ("waits" if number < 10 else "queue_full")
        for number in range(10):
            assert await crowd.ask(of(f"n{number}")) == ("waits" if number < 8 else "queue_full")
        for number in range(2):
            assert await crowd.ask(of(f"u{number}", priority=Priority.URGENT)) == "waits"


async def test_one_that_was_told_to_wait_is_the_last_to_go() -> None:
    async with Crowd(max=4) as crowd:
        told = [of("a"), of("a")]
        for request in (of("a"), of("a"), *told):
            request.response_started = request in told
            assert await crowd.ask(request) == "waits"
        for other in ("b", "c"):
            assert await crowd.ask(of(other)) == "waits"
        assert [crowd.fate(one) for one in told] == ["waits", "waits"]
        assert await crowd.ask(of("d")) == "waits"
        assert [crowd.fate(one) for one in told] == ["waits", "queue_full"]


async def test_a_key_that_names_its_users_has_one_share_and_they_divide_it() -> None:
    async with Crowd(max=16) as crowd:
        for user in range(40):
            await crowd.ask(of("web", f"u{user}"))
        assert crowd.waiting() == {"web": 14}
        for _ in range(7):
            assert await crowd.ask(of("b")) == "waits"
        assert crowd.waiting() == {"web": 8, "b": 7}
    async with Crowd(max=16) as crowd:
        for _ in range(40):
            await crowd.ask(of("web", "anna"))
        for _ in range(5):
            assert await crowd.ask(of("web", "ben")) == "waits"
        assert crowd.waiting("user") == {"web/anna": 9, "web/ben": 5}


async def test_it_is_ready_while_a_newcomer_would_get_a_place() -> None:
    async with Crowd(max=2) as crowd:
        for _ in range(2):
            await crowd.ask(of("a"))
        assert crowd.scheduler.has_room()
        await crowd.ask(of("b"))
        assert crowd.waiting() == {"a": 1, "b": 1}
        assert not crowd.scheduler.has_room()


async def test_what_is_gone_is_not_counted_any_more() -> None:
    async with Crowd(max=16) as crowd:
        for _ in range(14):
            await crowd.ask(of("a", "anna"))
        for _, task in list(crowd.tasks.values()):
            task.cancel()
        await settle()
        holdings = crowd.scheduler.waiters.fair_share
        assert (holdings.total, holdings.by_caller, holdings.by_user) == (0, {}, {})
        assert crowd.scheduler.waiters.newest_sheddable("a", "a/anna") is None


arrivals = st.lists(
    st.tuples(st.sampled_from("abcde"), st.sampled_from(list(Priority))), max_size=80
)


@settings(max_examples=40, deadline=None)
@given(arrivals, st.integers(1, 20))
def test_no_one_with_fewer_is_turned_away_for_one_with_more(
    arrivals: list[tuple[str, Priority]], most: int
) -> None:
    async def play() -> None:
        async with Crowd(max=most) as crowd:
            for caller, priority in arrivals:
                before = crowd.waiting()
                told = await crowd.ask(of(caller, priority=priority))
                after = crowd.waiting()
                assert sum(after.values()) <= most
                for other, held in before.items():
                    if after[other] < held:
                        assert told == "waits"
                        assert held > after[caller]
                if told != "waits" and priority <= Priority.PREMIUM:
                    assert sum(before.values()) >= most - most // 8
                    assert max(before.values(), default=0) <= before[caller] + 1

    loop = VirtualLoop()
    try:
        loop.run_until_complete(play())
    finally:
        loop.close()
