"""A caller that fills the queue is shed from it: others get their places."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Self

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.fleet.node import Node
from gateway.lease import NOTHING_TRIED, LeaseRequest, Tried
from gateway.request import Priority
from gateway.scheduling.scheduler import Scheduler
from tests.each_case import each_case
from tests.scheduling.build import a_request, a_scheduler, failed_on, node, settle, start_lease
from tests.virtual import VirtualLoop


def of(caller: str, user: str = "", **keys: Any) -> LeaseRequest:
    """A request of a caller, or of a user that it names."""
    return a_request(caller=caller, fairness_key=f"{caller}/{user}" if user else caller, **keys)


class BusyNode:
    """A node whose one slot is taken, and the requests that wait for it."""

    def __init__(self, **queue: Any) -> None:
        self.node: Node = node(slots=1)
        self.scheduler: Scheduler = a_scheduler(self.node, queue=queue)
        self.tasks: dict[str, tuple[LeaseRequest, asyncio.Task[Any]]] = {}

    async def send(
        self, request: LeaseRequest, tried: Tried = NOTHING_TRIED, *, response_started: bool = False
    ) -> str:
        """Send a request; its `outcome`."""
        task = await start_lease(self.scheduler, request, tried, response_started=response_started)
        self.tasks[request.id] = request, task
        return self.outcome(request)

    def outcome(self, request: LeaseRequest) -> str:
        """`waits`, or the code of its error."""
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
            return Counter(one.caller.fairness_key for one in found)
        return Counter(one.caller.id for one in found)

    async def __aenter__(self) -> Self:
        self.running = await start_lease(self.scheduler, of("runs"))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.scheduler.close()
        await asyncio.gather(*(task for _, task in self.tasks.values()), return_exceptions=True)


async def test_another_callers_requests_wait_where_a_flood_was_refused() -> None:
    async with BusyNode(max=16) as busy:
        outcomes = Counter([await busy.send(of("a")) for _ in range(300)])
        assert outcomes == {"waits": 14, "queue_full": 286}
        for _ in range(7):
            assert await busy.send(of("b")) == "waits"
        assert await busy.send(of("b")) == "queue_full", "it would have more than the other caller"
        assert await busy.send(of("a")) == "queue_full"
        assert busy.waiting() == {"a": 8, "b": 7}


async def test_the_newest_of_the_largest_caller_is_shed_but_no_retry() -> None:
    async with BusyNode(max=4) as busy:
        early, late, retried = of("a"), of("a"), of("a")
        for request in (early, late, retried, of("c")):
            tried = failed_on("a") if request is retried else NOTHING_TRIED
            assert await busy.send(request, tried) == "waits"
        assert await busy.send(of("b")) == "waits"
        assert [busy.outcome(one) for one in (early, late, retried)] == [
            "waits",
            "queue_full",
            "waits",
        ]
        # "a" has two, each other caller one: nothing is shed for a caller's second.
        assert await busy.send(of("b")) == "queue_full"
        assert await busy.send(of("d")) == "waits"
        assert [busy.outcome(one) for one in (early, retried)] == ["queue_full", "waits"]


@each_case("theirs", list(Priority))
async def test_a_flood_takes_room_from_no_class_of_another_caller(theirs: Priority) -> None:
    async with BusyNode(max=20) as busy:
        for _ in range(40):
            await busy.send(of("a"))
        for _ in range(5):
            assert await busy.send(of("b", priority=theirs)) == "waits"


async def test_of_the_largest_caller_the_lowest_class_is_shed_first() -> None:
    async with BusyNode(max=4) as busy:
        urgent = of("a", priority=Priority.URGENT)
        batch = of("a", priority=Priority.BATCH)
        normal = of("a")
        for request in (batch, normal, urgent, of("a", priority=Priority.URGENT)):
            assert await busy.send(request) == "waits"
        assert await busy.send(of("b", priority=Priority.BATCH)) == "waits"
        assert [busy.outcome(one) for one in (batch, normal, urgent)] == [
            "queue_full",
            "waits",
            "waits",
        ]


async def test_work_that_can_wait_gives_way_to_its_own_callers_requests() -> None:
    async with BusyNode(max=4) as busy:
        early, late = of("a", patient=True), of("a", patient=True)
        sent = [early, of("a"), late, of("a")]
        assert [await busy.send(one) for one in sent] == ["waits"] * 4
        assert await busy.send(of("a", patient=True)) == "queue_full"
        assert await busy.send(of("a")) == "waits"
        assert [busy.outcome(one) for one in (early, late)] == ["waits", "queue_full"]
        assert await busy.send(of("a")) == "waits"
        assert busy.outcome(early) == "queue_full"
        assert await busy.send(of("a")) == "queue_full"
        assert busy.waiting() == {"a": 4}


async def test_nothing_is_shed_while_the_queue_has_room_for_both() -> None:
    async with BusyNode(max=100) as busy:
        first = [of("a", priority=Priority.PREMIUM) for _ in range(60)]
        for request in first:
            assert await busy.send(request) == "waits"
        # More wait than this class's share, but all of one other caller.
        for _ in range(20):
            assert await busy.send(of("b", priority=Priority.BATCH)) == "waits"
        assert all(busy.outcome(one) == "waits" for one in first)


async def test_many_callers_with_few_requests_leave_a_higher_class_its_places() -> None:
    async with BusyNode(max=20) as busy:
        for number in range(12):
            outcome_ = await busy.send(of(f"k{number}", priority=Priority.BATCH))
            assert outcome_ == ("waits" if number < 10 else "queue_full")
        for number in range(10):
            assert await busy.send(of(f"n{number}")) == ("waits" if number < 8 else "queue_full")
        for number in range(2):
            assert await busy.send(of(f"u{number}", priority=Priority.URGENT)) == "waits"


async def test_a_request_whose_response_has_begun_is_shed_last() -> None:
    async with BusyNode(max=4) as busy:
        outcome_ = [of("a"), of("a")]
        for request in (of("a"), of("a"), *outcome_):
            assert await busy.send(request, response_started=request in outcome_) == "waits"
        for other in ("b", "c"):
            assert await busy.send(of(other)) == "waits"
        assert [busy.outcome(one) for one in outcome_] == ["waits", "waits"]
        assert await busy.send(of("d")) == "waits"
        assert [busy.outcome(one) for one in outcome_] == ["waits", "queue_full"]


async def test_a_key_that_names_its_users_has_one_share_which_they_divide() -> None:
    async with BusyNode(max=16) as busy:
        for user in range(40):
            await busy.send(of("web", f"u{user}"))
        assert busy.waiting() == {"web": 14}
        for _ in range(7):
            assert await busy.send(of("b")) == "waits"
        assert busy.waiting() == {"web": 8, "b": 7}
    async with BusyNode(max=16) as busy:
        for _ in range(40):
            await busy.send(of("web", "anna"))
        for _ in range(5):
            assert await busy.send(of("web", "ben")) == "waits"
        assert busy.waiting("user") == {"web/anna": 9, "web/ben": 5}


async def test_the_scheduler_has_room_while_a_new_caller_would_get_a_place() -> None:
    async with BusyNode(max=2) as busy:
        for _ in range(2):
            await busy.send(of("a"))
        assert busy.scheduler.has_room()
        await busy.send(of("b"))
        assert busy.waiting() == {"a": 1, "b": 1}
        assert not busy.scheduler.has_room()


async def test_requests_that_have_left_are_not_counted() -> None:
    async with BusyNode(max=16) as busy:
        for _ in range(14):
            await busy.send(of("a", "anna"))
        for _, task in list(busy.tasks.values()):
            task.cancel()
        await settle()
        holdings = busy.scheduler.waiters.fair_share
        assert (holdings.total, holdings.by_caller, holdings.by_user) == (0, {}, {})
        assert busy.scheduler.waiters.newest_sheddable("a", "a/anna") is None


arrivals = st.lists(
    st.tuples(st.sampled_from("abcde"), st.sampled_from(list(Priority))), max_size=80
)


@settings(max_examples=40, deadline=None)
@given(arrivals, st.integers(1, 20))
def test_no_caller_with_fewer_is_shed_for_one_with_more(
    arrivals: list[tuple[str, Priority]], most: int
) -> None:
    async def play() -> None:
        async with BusyNode(max=most) as busy:
            for caller, priority in arrivals:
                before = busy.waiting()
                outcome_ = await busy.send(of(caller, priority=priority))
                after = busy.waiting()
                assert sum(after.values()) <= most
                for other, held in before.items():
                    if after[other] < held:
                        assert outcome_ == "waits"
                        assert held > after[caller]
                if outcome_ != "waits" and priority <= Priority.PREMIUM:
                    assert sum(before.values()) >= most - most // 8
                    assert max(before.values(), default=0) <= before[caller] + 1

    loop = VirtualLoop()
    try:
        loop.run_until_complete(play())
    finally:
        loop.close()


async def test_a_request_whose_response_begins_while_it_waits_is_shed_last() -> None:
    async with BusyNode(max=4) as busy:
        requests = [of("a") for _ in range(4)]
        for request in requests:
            assert await busy.send(request) == "waits"
        for request in requests[2:]:
            busy.scheduler.keep_in_queue(request.id)
        busy.scheduler.keep_in_queue("unknown")
        for other in ("b", "c"):
            assert await busy.send(of(other)) == "waits"
        assert [busy.outcome(one) for one in requests] == [
            "queue_full",
            "queue_full",
            "waits",
            "waits",
        ]
