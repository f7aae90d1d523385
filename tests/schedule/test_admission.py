"""Which requests may wait, who is shed for another, and which batch work yields its slot."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.lease import NOTHING_TRIED, LeaseCaller, LeaseRequest, PromptKey, Tried
from gateway.schedule.admission import (
    DEFAULT_RETRY_AFTER,
    RATE_WINDOW,
    Admission,
    CompletionRate,
    Waiter,
    combine_waits,
)
from gateway.schedule.candidates import NodeCandidates
from gateway.schedule.core.batch_slots import (
    LEAST_DECODE_SECONDS,
    LEAST_SECONDS_LEFT,
    MOST_YIELDS,
    YieldCandidate,
    choose_yields,
    may_yield,
)
from gateway.schedule.core.requests import QueuedRequest
from gateway.schedule.scheduler import LeaseRecord, Scheduler
from gateway.terms import Priority
from tests.calls import count_calls
from tests.each_case import each_case
from tests.known import known
from tests.nodes.build import Clock
from tests.schedule.build import (
    a_request,
    a_scheduler,
    failed_on,
    lease_at_once,
    node,
    settle,
    start_lease,
    take_lease,
)
from tests.virtual import VirtualLoop

NORMAL, BATCH, URGENT = Priority.NORMAL, Priority.BATCH, Priority.URGENT


def an_admission(**settings: Any) -> Admission:
    return Admission(Settings.model_validate(settings))


def refusal(admission: Admission, priority: Priority, *of: Any) -> GatewayError | None:
    """Why one more request of the class may not wait; `of` as `Admission.check` takes it."""
    try:
        admission.check(LeaseCaller("caller", "caller", priority), *of)
    except GatewayError as error:
        return error
    return None


def asker(deadline: float | None = None, tried: Tried = NOTHING_TRIED) -> Waiter:
    queued = QueuedRequest("r", (), NORMAL, "caller", 0.0, deadline=deadline)
    return Waiter(a_request(), tried, NodeCandidates((), ()), queued, 0.0)


def code(found: GatewayError | None) -> str | None:
    return None if found is None else found.code


@each_case(
    ("most", "counts"), [(100, [100, 100, 90, 50]), (0, [0] * 4), (1, [1] * 4), (3, [3, 3, 3, 2])]
)
def test_lower_classes_are_refused_first_but_a_short_queue_has_room_for_all(
    most: int, counts: list[int]
) -> None:
    admission = an_admission()
    admission.configure(Settings.model_validate({"queue": {"max": most}}))
    assert [admission.limits[priority].most_waiting for priority in Priority] == counts


def test_a_full_queue_advises_when_a_place_comes_free() -> None:
    found = known(refusal(an_admission(queue={"max": 3}), NORMAL, 3, 0.0, 7.0))
    assert (found.status, found.code, found.retry_after) == (429, "queue_full", 7.0)


def test_a_predicted_wait_beyond_the_classes_limit_is_refused_at_once() -> None:
    admission = an_admission(queue={"max_wait": 100}, classes={"batch": {"max_wait": 1000}})
    found = known(refusal(admission, NORMAL, 1, 101.0, 5.0))
    assert (found.status, found.code, found.retryable) == (503, "queue_timeout", False)
    # When the wait has fallen to where the class is admitted again: 0.8 x 0.9 x 100 s.
    assert found.retry_after == pytest.approx(101.0 - 72.0)
    assert refusal(admission, BATCH, 1, 101.0, 5.0) is None


def test_a_class_refused_for_the_wait_stays_refused_until_the_wait_has_fallen() -> None:
    admission = an_admission(queue={"max_wait": 100, "reopen": 0.5})
    assert refusal(admission, NORMAL, 5, 89.0, 5.0) is None
    refused = known(refusal(admission, NORMAL, 5, 91.0, 5.0))
    assert refused.code == "queue_full"
    assert refused.retry_after == pytest.approx(91.0 - 45.0)
    assert code(refusal(admission, NORMAL, 5, 60.0, 5.0)) == "queue_full"
    assert refusal(admission, URGENT, 5, 60.0, 5.0) is None
    assert refusal(admission, NORMAL, 5, 45.0, 5.0) is None
    assert refusal(admission, NORMAL, 5, 60.0, 5.0) is None


def test_a_deadline_bounds_the_wait_and_is_refused_at_once_if_it_cannot_be_met() -> None:
    admission = an_admission(queue={"max_wait": 100})
    assert admission.admit(asker(1010.0), 1, 9.0, 5.0, 1000.0) == 1010.0
    assert admission.admit(asker(), 1, 9.0, 5.0, 1000.0) == 1100.0
    with pytest.raises(GatewayError) as raised:
        admission.admit(asker(1010.0), 1, 11.0, 5.0, 1000.0)
    assert (raised.value.status, raised.value.code) == (503, "queue_timeout")
    assert raised.value.retry_after == 1.0
    # A deadline in the past: a predicted wait of 0 is too long.
    with pytest.raises(GatewayError):
        admission.admit(asker(999.0), 1, 0.0, 5.0, 1000.0)


def test_an_admitted_request_is_refused_only_for_its_deadline() -> None:
    admission, tried = an_admission(queue={"max": 1}), failed_on("a")
    assert admission.admit(asker(None, tried), 9, None, 5.0, 0.0) > 0
    with pytest.raises(GatewayError):
        admission.admit(asker(5.0, tried), 9, 6.0, 5.0, 0.0)


def test_the_lower_of_two_predictions_counts() -> None:
    rate = CompletionRate()
    for moment in range(11):
        rate.completed(float(moment))
    # Eleven in ten seconds: four more take less than 4 s.
    assert combine_waits(rate, 1, 3, None, 10.0) == pytest.approx(4 / 1.1)
    assert combine_waits(rate, 1, 3, 2.0, 10.0) == 2.0
    assert combine_waits(rate, 1, 3, 9.0, 10.0) == pytest.approx(4 / 1.1)
    assert combine_waits(CompletionRate(), 1, 3, 9.0, 10.0) == 9.0
    assert combine_waits(CompletionRate(), 1, 3, None, 10.0) is None
    # With nobody ahead half of one answer's length counts.
    assert combine_waits(CompletionRate(), 1, 0, 8.0, 0.0) == 4.0
    assert combine_waits(CompletionRate(), 1, 0, None, 0.0) is None


# A caller that fills the queue is shed from it: others get their places.


def of(caller: str, user: str = "", **keys: Any) -> LeaseRequest:
    """A request of a caller, or of a user that it names."""
    return a_request(caller=caller, fairness_key=f"{caller}/{user}" if user else caller, **keys)


WAITS, FULL = "waits", "queue_full"


class BusyNode:
    """A node whose one slot is taken, and the requests that wait for it."""

    def __init__(self, **queue: Any) -> None:
        self.scheduler: Scheduler = a_scheduler(node(slots=1), queue=queue)
        self.tasks: dict[str, tuple[LeaseRequest, asyncio.Task[Any]]] = {}

    async def send(
        self, *requests: LeaseRequest, tried: Tried = NOTHING_TRIED, response_started: bool = False
    ) -> list[str]:
        """Send requests one after the other; what came of each at once."""
        found = []
        for request in requests:
            task = await start_lease(
                self.scheduler, request, tried, response_started=response_started
            )
            self.tasks[request.id] = request, task
            found += self.outcomes(request)
        return found

    def outcomes(self, *requests: LeaseRequest) -> list[str]:
        """`waits`, or the code of its error."""
        found = []
        for task in (self.tasks[request.id][1] for request in requests):
            error = task.exception() if task.done() else None
            if isinstance(error, GatewayError):
                assert (error.retry_after or 0) >= 1
                found.append(error.code)
            else:
                assert not task.done()
                found.append(WAITS)
        return found

    def waiting(self) -> Counter[str]:
        return Counter(one.caller.id for one, task in self.tasks.values() if not task.done())

    async def __aenter__(self) -> Self:
        self.running = await start_lease(self.scheduler, of("runs"))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.scheduler.close()
        await asyncio.gather(*(task for _, task in self.tasks.values()), return_exceptions=True)


async def test_the_newest_of_the_largest_caller_is_shed_but_no_retry() -> None:
    async with BusyNode(max=4) as busy:
        early, late, retried = of("a"), of("a"), of("a")
        assert await busy.send(early, late) == [WAITS] * 2
        assert await busy.send(retried, tried=failed_on("a")) == [WAITS]
        assert await busy.send(of("c"), of("b")) == [WAITS] * 2
        assert busy.outcomes(early, late, retried) == [WAITS, FULL, WAITS]
        # "a" has two, each other caller one: nothing is shed for a caller's second.
        assert await busy.send(of("b"), of("d")) == [FULL, WAITS]
        assert busy.outcomes(early, retried) == [FULL, WAITS]
        assert not busy.scheduler.has_room()


async def test_work_that_can_wait_gives_way_to_its_own_callers_requests() -> None:
    async with BusyNode(max=4) as busy:
        early, late = of("a", patient=True), of("a", patient=True)
        assert await busy.send(early, of("a"), late, of("a")) == [WAITS] * 4
        assert await busy.send(of("a", patient=True), of("a")) == [FULL, WAITS]
        assert busy.outcomes(early, late) == [WAITS, FULL]
        assert await busy.send(of("a"), of("a")) == [WAITS, FULL]
        assert busy.outcomes(early) == [FULL]
        assert busy.waiting() == {"a": 4}


@each_case("begins_later", [False, True])
async def test_a_request_whose_response_has_begun_is_shed_last(begins_later: bool) -> None:
    async with BusyNode(max=4) as busy:
        plain, begun = [of("a"), of("a")], [of("a"), of("a")]
        assert await busy.send(*plain) == [WAITS] * 2
        assert await busy.send(*begun, response_started=not begins_later) == [WAITS] * 2
        for request in begun if begins_later else ():
            busy.scheduler.keep_in_queue(request.id)
        busy.scheduler.keep_in_queue("unknown")
        assert await busy.send(of("b"), of("c")) == [WAITS] * 2
        assert busy.outcomes(*plain, *begun) == [FULL, FULL, WAITS, WAITS]
        assert await busy.send(of("d")) == [WAITS]
        assert busy.outcomes(*begun) == [WAITS, FULL]


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
                (outcome,) = await busy.send(of(caller, priority=priority))
                after = busy.waiting()
                assert sum(after.values()) <= most
                for other, held in before.items():
                    if after[other] < held:
                        assert outcome == WAITS
                        assert held > after[caller]
                if outcome != WAITS and priority <= Priority.PREMIUM:
                    assert sum(before.values()) >= most - most // 8
                    assert max(before.values(), default=0) <= before[caller] + 1
            # What has left is not counted.
            for _, task in list(busy.tasks.values()):
                task.cancel()
            await settle()
            holdings = busy.scheduler.waiters.fair_share
            assert (holdings.total, holdings.by_caller, holdings.by_user) == (0, {}, {})

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(play())


# The completion rate, and the `Retry-After` that follows from it.


def test_the_rate_is_completions_per_second_of_the_window_and_unknown_at_first() -> None:
    rate = CompletionRate()
    assert rate.seconds_until(3, 0.0) is None
    assert rate.retry_after(3, 0.0) == DEFAULT_RETRY_AFTER
    for second in range(100, 110):
        rate.completed(float(second))
        assert (rate.seconds_until(1, float(second)) is None) is (second == 100)
    assert rate.seconds_until(1, 110.0) == 1.0
    assert rate.seconds_until(5, 110.0) == 5.0
    assert rate.retry_after(5, 110.0) == 5.0
    assert rate.seconds_until(1, 110.0 + RATE_WINDOW) is None


# Many waiting requests cost no more, each, than few.


def long_prompt_request(number: int) -> LeaseRequest:
    """A request with a long prompt of its own, of one of five callers."""
    blocks = tuple(hash((number, place)) for place in range(20))
    return a_request(
        fairness_key=f"caller {number % 5}",
        prompt_key=PromptKey(blocks, 2500.0, size=10_000),
        text_bytes=10_000,
    )


async def costs(waiting: int) -> list[int]:
    """Calls of an arrival, and of a release."""
    scheduler = a_scheduler(node(slots=4), queue={"max": 10_000, "max_wait": 9999})
    running = [await take_lease(scheduler, long_prompt_request(-n)) for n in range(4)]
    tasks = []
    for number in range(waiting):
        tasks.append(asyncio.create_task(take_lease(scheduler, long_prompt_request(number))))
        if number % 100 == 0:
            await settle()  # They do not all come in one turn of the event loop.
    await settle()
    assert scheduler.dispatcher.waiting == waiting
    arrival = scheduler.wait_for_lease(long_prompt_request(waiting))

    def arrives() -> None:
        arrival.send(None)
        scheduler.match()

    def leaves() -> None:
        running[0].release()
        scheduler.match()

    found = [count_calls(arrives), count_calls(leaves)]
    assert scheduler.dispatcher.waiting == waiting
    arrival.close()
    scheduler.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def test_ten_times_as_many_waiters_cost_no_more_for_each() -> None:
    for few, many in zip(await costs(200), await costs(2000), strict=True):
        assert many < 1.25 * few + 20


async def test_the_room_for_batch_is_told_without_the_reserve_and_with_what_waits() -> None:
    reserve = {"batch": {"reserve_slots": 0.5}}
    scheduler = a_scheduler(node("a", slots=4), node("b", slots=4), classes=reserve)

    def room(seconds: float = 0.0) -> tuple[int, ...]:
        found = scheduler.batch_room(("demo",), seconds)
        return found.slots, found.free, found.soon, found.waiting, found.ahead

    assert room() == (4, 4, 0, 0, 0)
    for _ in range(4):
        lease_at_once(scheduler, a_request(priority=BATCH))
    assert room() == (4, 0, 0, 0, 0)
    assert room(1e6) == (4, 0, 4, 0, 0)
    await start_lease(scheduler, a_request(priority=BATCH))
    for _ in range(6):
        await start_lease(scheduler, a_request())
    assert room() == (4, 0, 0, 1, 2)
    found = scheduler.batch_room(("nothing",), 0.0)
    assert (found.slots, found.free) == (0, 0)


# Which running batch requests yield: properties of the policy, and of what a waiter lacks.


SECONDS = st.floats(0, 100)
CANDIDATES = st.lists(
    st.builds(
        YieldCandidate,
        lease_id=st.integers(1, 1000),
        row=st.integers(0, 3),
        slots=st.just(1),
        priority=st.sampled_from(Priority),
        decode_seconds=st.none() | SECONDS,
        seconds_left=SECONDS,
        repetition_seconds=st.floats(0.1, 20),
        times_yielded=st.integers(0, MOST_YIELDS),
    ),
    max_size=10,
    unique_by=lambda one: one.lease_id,
)
MISSING = st.dictionaries(st.integers(0, 3), st.integers(1, 3), min_size=1)
CLASSES = st.sampled_from([Priority.URGENT, Priority.PREMIUM, Priority.NORMAL])


def running(lease_id: int = 1, **fields: float | Priority | None) -> YieldCandidate:
    """A request of the class batch that may yield."""
    values = {
        "row": 0, "slots": 1, "priority": BATCH, "decode_seconds": 20.0,
        "seconds_left": 60.0, "repetition_seconds": 1.0, "times_yielded": 0,
    } | fields  # fmt: skip
    return YieldCandidate(lease_id, **values)  # type: ignore[arg-type]


@given(CLASSES, MISSING, CANDIDATES)
def test_those_that_yield_may_and_give_one_row_just_what_it_lacks(
    priority: Priority, missing: dict[int, int], candidates: list[YieldCandidate]
) -> None:
    chosen = choose_yields(priority, missing, candidates)
    by_id = {one.lease_id: one for one in candidates}
    able = [one for one in candidates if one.row in missing and may_yield(one, priority)]
    if not chosen:
        for row, lacking in missing.items():
            assert sum(one.row == row for one in able) < lacking
        return
    assert len(set(chosen)) == len(chosen)
    assert all(by_id[one] in able for one in chosen)
    (row,) = {by_id[one].row for one in chosen}
    assert len(chosen) == missing[row]


AGAIN = {"times_yielded": 1, "decode_seconds": LEAST_DECODE_SECONDS - 0.1}


@each_case(
    ("fields", "waiting", "yields"),
    [
        # Lower classes, in decode.
        ({}, Priority.NORMAL, True),
        ({}, BATCH, False),
        ({"priority": Priority.NORMAL}, Priority.NORMAL, False),
        ({"priority": Priority.NORMAL}, Priority.URGENT, True),
        ({"decode_seconds": None}, Priority.URGENT, False),
        # Not what ends soon, nor what would take longer to repeat than to end.
        ({"seconds_left": LEAST_SECONDS_LEFT}, Priority.NORMAL, False),
        ({"seconds_left": 10.0, "repetition_seconds": 12.0}, Priority.NORMAL, False),
        ({"seconds_left": 13.0, "repetition_seconds": 12.0}, Priority.NORMAL, True),
        # One that has yielded gets time to go on, and at last runs to its end.
        (AGAIN, Priority.NORMAL, False),
        (AGAIN | {"decode_seconds": LEAST_DECODE_SECONDS}, Priority.NORMAL, True),
        (AGAIN | {"times_yielded": 0}, Priority.NORMAL, True),
        (
            {"times_yielded": MOST_YIELDS, "decode_seconds": 1e6, "seconds_left": 1e6},
            Priority.URGENT,
            False,
        ),
    ],
)
def test_which_requests_may_yield(fields: dict[str, Any], waiting: Priority, yields: bool) -> None:
    assert may_yield(running(**fields), waiting) is yields


# When the scheduler asks running requests to yield, and which of them.


class World:
    """A node and its scheduler; requests that are asked to yield do, unless they are stubborn.

    Their slots are free when `release` is called.
    """

    def __init__(self, slots: int, **settings: Any) -> None:
        self.clock, self.stubborn, self.asked = Clock(), set[str](), list[str]()
        self.rows: dict[str, LeaseRecord] = {}
        self.scheduler = a_scheduler(
            node(slots=slots), clock=self.clock, yield_slot=self.ask, **settings
        )

    def ask(self, request_id: str) -> bool:
        self.asked.append(request_id)
        return request_id not in self.stubborn

    def row(self, *, decodes: bool = True, **keys: Any) -> LeaseRequest:
        """Start a batch request that yields."""
        keys = {"prompt_tokens": 100, "exact_tokens": 100, "stream": True, **keys}
        request = a_request(priority=BATCH, yields=True, **keys)
        self.rows[request.id] = lease_at_once(self.scheduler, request)
        if decodes:
            self.decode(request)
        return request

    def decode(self, request: LeaseRequest) -> None:
        lease = self.rows[request.id]
        lease.head_received(self.clock())
        lease.content_received(self.clock())

    def release(self, request_id: str) -> None:
        self.rows[request_id].release()


async def test_a_request_that_would_wait_gets_the_slot_of_the_row_that_is_cheapest_to_repeat() -> (
    None
):
    world = World(3)
    long = world.row(exact_tokens=2000, prompt_tokens=2000)
    short = world.row()
    other = world.row(exact_tokens=500, prompt_tokens=500)
    waiting = await start_lease(world.scheduler, a_request())
    assert world.asked == [short.id]
    world.release(short.id)
    await settle()
    assert waiting.done()
    await start_lease(world.scheduler, a_request())
    assert world.asked == [short.id, other.id]
    await start_lease(world.scheduler, a_request())
    assert world.asked == [short.id, other.id, long.id]
    await start_lease(world.scheduler, a_request())
    assert len(world.asked) == 3, "nobody is left"


async def test_neither_clients_nor_leases_that_have_ended_are_asked() -> None:
    world = World(1)
    ended = known(world.scheduler.lease_now(a_request(priority=BATCH, yields=True, stream=True)))
    assert set(world.scheduler.yielding) == {ended.id}
    world.scheduler.release_unused(ended.id)
    assert world.scheduler.yielding == {}
    record = lease_at_once(world.scheduler, a_request(priority=BATCH, stream=True))
    record.head_received(world.clock())
    record.content_received(world.clock())
    await start_lease(world.scheduler, a_request())
    assert world.asked == []


async def test_a_row_that_refuses_is_not_asked_again_and_the_next_one_is() -> None:
    world = World(2)
    first = world.row()
    second = world.row(exact_tokens=300, prompt_tokens=300)
    world.stubborn.add(first.id)
    await start_lease(world.scheduler, a_request())
    assert world.asked == [first.id, second.id]
    await start_lease(world.scheduler, a_request())
    assert world.asked == [first.id, second.id]


async def test_a_row_in_prefill_is_asked_once_it_decodes() -> None:
    world = World(1)
    row = world.row(decodes=False)
    await start_lease(world.scheduler, a_request())
    assert world.asked == []
    world.decode(row)
    world.clock.passes(0.5)
    world.scheduler.check_all()
    assert world.asked == [row.id]


async def test_waiting_work_that_is_raised_goes_before_lower_classes() -> None:
    world = World(1)
    running = lease_at_once(world.scheduler, a_request())
    plain = await start_lease(world.scheduler, a_request(priority=BATCH))
    request = a_request(priority=BATCH, yields=True)
    raised = await start_lease(world.scheduler, request)
    unknown = {"row of another process"}
    assert world.scheduler.raise_class({request.id, *unknown}, Priority.NORMAL) == {request.id}
    assert world.scheduler.depths()[Priority.NORMAL] == 1
    assert world.scheduler.raise_class({request.id}, BATCH) == {request.id}
    assert world.scheduler.depths()[Priority.NORMAL] == 1, "it never falls"
    running.release()
    await settle()
    assert raised.done()
    assert not plain.done()
    assert world.scheduler.raise_class({request.id}, Priority.NORMAL) == set()


async def test_patient_work_waits_whatever_is_predicted_until_its_time_limit() -> None:
    world = World(1, queue={"max_wait": 2})
    lease_at_once(world.scheduler, a_request())
    patient = await start_lease(world.scheduler, a_request(patient=True, time_limit=60.0))
    world.clock.passes(50.0)
    world.scheduler.check_all()
    await settle()
    assert not patient.done()
    world.clock.passes(10.1)
    world.scheduler.check_all()
    await settle()
    assert patient.done()
