"""What a lease's reports teach: the fleet, the estimates and the log of decisions."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.lease import (
    NOTHING_CHARGED,
    NOTHING_TRIED,
    AttemptCharge,
    AttemptReport,
    ExpectedReading,
    Fault,
    GrantedLease,
    LeaseRequest,
    NodeError,
    PromptKey,
    Tried,
    Usage,
    UsageReport,
)
from gateway.nodes.node import Node, NodeState
from gateway.schedule.core.demand_model import DEFAULT_ANSWER_TOKENS, MOST_TOKENS, TokenEstimates
from gateway.schedule.decision_log import (
    MOST_COLLECTED,
    MOST_FOLLOWED,
    Decision,
    DecisionLog,
    Grant,
)
from gateway.schedule.lease_service import LocalLeaseService
from gateway.schedule.scheduler import LeaseRecord, Scheduler
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.known import known
from tests.lease_requests import expected, learn
from tests.nodes.build import Clock, a_spec
from tests.schedule.build import a_request, a_scheduler, failed_on, lease_at_once, node, settle
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import BareGateway, bare_gateway

USAGE = Usage(100, 20, 50)


class World:
    """A lease service over nodes on a clock that stands still."""

    def __init__(self, *nodes: Node) -> None:
        self.clock = Clock(100.0)
        self.nodes = {one.name: one for one in nodes}
        self.scheduler = a_scheduler(*nodes, clock=self.clock)
        self.leases = LocalLeaseService(
            self.scheduler, self.scheduler.fleet, most_failed_requests=3
        )

    def grant(self, request: LeaseRequest, tried: Tried = NOTHING_TRIED) -> GrantedLease:
        return known(self.leases.lease_now(request, tried, 0.0))

    def end(
        self,
        lease: GrantedLease,
        outcome: str = "ok",
        status: int = 200,
        *,
        began: bool = False,
        fault: Fault = Fault.NOBODY,
        error: NodeError | None = None,
    ) -> None:
        self.leases.ended(AttemptReport(lease.id, outcome, status, True, True, began, fault, error))

    def fail(self, request: LeaseRequest, tried: Tried = NOTHING_TRIED, *, began: bool) -> str:
        """An attempt at it is reset; returns the node's name."""
        lease = self.grant(request, tried)
        self.end(lease, "reset", 0, began=began, fault=Fault.NODE_OR_REQUEST)
        return lease.node.name

    def failures(self) -> dict[str, int]:
        """The failures for which nodes were blamed."""
        return {name: one.circuit.failures for name, one in self.nodes.items()}


def adopt(world: World, node: str, lease_id: int = 7 << 40, **keys: Any) -> LeaseRecord | None:
    """A lease that another scheduler granted 30 seconds ago."""
    request, reading, one = (
        a_request(stream=True),
        ExpectedReading(100, 1.0, 20.0),
        world.nodes[node],
    )
    lease = GrantedLease(lease_id, one.info, "demo", "demo", True, reading, **keys)
    return world.scheduler.adopt(lease, one, request, 30.0)


def test_a_lease_that_another_scheduler_granted_goes_on_as_one_of_our_own() -> None:
    world = World(node("a", slots=2, cost_per_hour=3600.0))
    lease = known(adopt(world, "a"))
    one = world.nodes["a"]
    assert (one.leased, one.free_slots(100.0), lease.taken_at) == (1, 1, 70.0)
    row = known(world.scheduler.fleet_sync.row(one))
    assert (row.ours, row.foreign, row.free) == (1, 0, 1)
    world.leases.reading_began(7 << 40)
    world.leases.content_began(7 << 40)
    world.clock.passes(10.0)
    world.leases.ended(AttemptReport(7 << 40, "ok", 200, True, True, True))
    assert (one.leased, row.ours) == (0, 0)
    charge = world.leases.settle(UsageReport(7 << 40, USAGE, USAGE, 50), lease.request)
    assert charge.slot_seconds == 40.0
    assert charge.cost > 0.0
    assert world.scheduler.records == {}
    assert not one.speed.samples, "its beginning was not seen"
    assert world.scheduler.accuracy.is_empty


def test_more_leases_than_slots_are_adopted_and_nothing_granted_before_they_have_ended() -> None:
    world = World(node("a", slots=1))
    held = [adopt(world, "a", number) for number in (101, 102)]
    assert all(held)
    assert world.nodes["a"].leased == 2
    assert world.leases.lease_now(a_request(), NOTHING_TRIED, 0.0) is None
    for number in (101, 102):
        assert world.leases.lease_now(a_request(), NOTHING_TRIED, 0.0) is None
        world.scheduler.release_unused(number)
    assert world.leases.lease_now(a_request(), NOTHING_TRIED, 0.0) is not None


async def test_nothing_is_granted_while_the_scheduler_may_not_grant() -> None:
    world, may_grant = World(node("a", slots=2)), False
    scheduler = world.scheduler
    scheduler.grant_while(lambda: may_grant, 5 << 33)
    request = a_request()
    assert scheduler.lease_now(request) is None
    waiting = asyncio.create_task(scheduler.wait_for_lease(request))
    await settle()
    scheduler.check_all()
    assert not waiting.done()
    assert [one.request_id for one in scheduler.queue_positions()] == [request.id]
    may_grant = True
    scheduler.check_all()
    granted = await waiting
    assert granted.id == 5 << 33
    assert scheduler.lease_now(a_request()) is not None


def test_a_lease_ends_once() -> None:
    world = World(node("a"))
    lease = world.grant(a_request())
    world.end(lease, "reset", 0)
    with pytest.raises(KeyError):
        world.end(lease, "reset", 0)
    lease = world.grant(a_request())
    world.end(lease, began=True)
    world.leases.settle(UsageReport(lease.id, USAGE, None, 3), a_request())
    with pytest.raises(KeyError):
        world.leases.settle(UsageReport(lease.id, USAGE, None, 3), a_request())


@each_case(
    ("outcome", "status", "error", "learnt"),
    [
        ("busy", 503, NodeError(is_loading=True), lambda one: one.state is NodeState.LOADING),
        ("busy", 502, None, lambda one: one.circuit.suspect_callers == {"c"}),
        ("busy", 408, None, lambda one: not one.circuit.suspect_callers),
        (
            "refused",
            501,
            NodeError(lacks_endpoint=True, hint="--rerank"),
            lambda one: one.refusal_hints == {"chat": "--rerank"},
        ),
        (
            "refused",
            401,
            NodeError(key_rejected_at="/v1/chat/completions"),
            lambda one: one.state is NodeState.DOWN and "401" in one.reason,
        ),
        ("server_error", 500, None, lambda one: not one.circuit.suspect_callers),
    ],
)
def test_an_error_response_says_something_of_its_node(
    outcome: str, status: int, error: NodeError | None, learnt: Callable[[Node], bool]
) -> None:
    one = node("a")
    world = World(one)
    world.end(world.grant(a_request()), outcome, status, error=error)
    assert learnt(one)
    assert one.circuit.failures == 0


@pytest.mark.parametrize("status", [429, 503])
def test_an_endpoint_that_refuses_work_is_left_alone_for_a_while(status: int) -> None:
    one = node("a", kind="openai")
    world = World(one)
    world.end(world.grant(a_request()), "busy", status, error=NodeError(retry_after=5.0))
    assert one.paused(world.clock())
    assert not one.paused(world.clock.passes(6.0))


def test_nodes_are_blamed_for_a_request_that_another_answers() -> None:
    world = World(node("a"), node("b"), node("c"))
    request = a_request()
    first = world.fail(request, began=False)
    second = world.fail(request, failed_on(first), began=True)
    assert set(world.failures().values()) == {0}
    lease = world.grant(request, failed_on(first, second))
    world.leases.answered(lease.id)
    assert world.failures() == {first: 1, second: 0, lease.node.name: 0}
    world.end(lease, began=True)
    assert world.failures() == {first: 1, second: 1, lease.node.name: 0}


def test_the_oldest_failures_are_forgotten() -> None:
    world = World(node("a", slots=4), node("b", slots=4))
    requests = [a_request() for _ in range(4)]
    failed = [world.fail(request, began=False) for request in requests]
    for request, name in zip(requests, failed, strict=True):
        lease = world.grant(request, failed_on(name))
        world.leases.answered(lease.id)
    assert sum(world.failures().values()) == 3


def test_usage_is_settled_at_the_nodes_price() -> None:
    prices = {"prompt": 1e6, "completion": 2e6}
    world = World(node("a", slots=2, cost_per_hour=3600.0, models=("rented",)),
                  node("b", models=("bought",), cost_per_million_tokens=prices))  # fmt: skip
    charges = []
    for model in ("rented", "bought"):
        request = a_request(model)
        lease = world.grant(request)
        world.clock.passes(4.0)
        world.end(lease, began=True)
        world.clock.passes(60.0)
        charges.append(world.leases.settle(UsageReport(lease.id, USAGE, USAGE, 50), request))
    assert [charge.cost for charge in charges] == [2.0, 200.0]
    counting = a_request("bought", slots=0)
    lease = world.grant(counting)
    world.end(lease, began=True)
    assert world.leases.settle(UsageReport(lease.id, USAGE, USAGE, 0), counting).cost == 0.0
    assert [charge.slot_seconds for charge in charges] == [4.0, 4.0]


@pytest.mark.parametrize(
    ("wanted", "shows", "timings", "expected"),
    [
        ({"stream": True}, True, None, (4.0, 6.0)),
        ({"stream": True}, False, None, (10.0, 0.0)),
        ({"generates": False}, False, None, (10.0, 0.0)),
        ({}, False, {"prompt_ms": 2500.0}, (2.5, 7.5)),
        ({}, False, {"prompt_ms": 1e9}, (None, None)),
        ({}, False, {"prompt_ms": "long"}, (None, None)),
        ({}, False, None, (None, None)),
        ({"slots": 0}, False, None, (None, None)),
    ],
)
def test_a_charge_tells_how_long_the_node_read_and_wrote(
    wanted: dict[str, Any],
    shows: bool,
    timings: dict[str, Any] | None,
    expected: tuple[float | None, float | None],
) -> None:
    world, request = World(node("a", slots=1)), a_request(**wanted)
    lease = world.grant(request)
    world.clock.passes(4.0)
    if shows:
        world.leases.content_began(lease.id)
    world.clock.passes(6.0)
    world.end(lease, began=True)
    usage = Usage(100, 20, 50, timings)
    charge = world.leases.settle(UsageReport(lease.id, usage, usage, 50), request)
    assert (charge.prefill_seconds, charge.decode_seconds) == expected


def left(world: World, request: LeaseRequest, seconds: float, **keys: Any) -> AttemptCharge:
    """What an attempt took that its client left after so many seconds."""
    lease = world.grant(request)
    world.clock.passes(seconds)
    return world.leases.ended(
        AttemptReport(lease.id, "client_closed", 200, True, False, False, **keys)
    )


def a_measured_world() -> World:
    """One node that reads about 200 tokens/s and writes about 10."""
    world = World(node("a", slots=1))
    timings = {"prompt_n": 200, "prompt_ms": 1000.0, "predicted_n": 10, "predicted_ms": 1000.0}
    usage = Usage(200, 0, 10, timings)
    for _ in range(30):
        request = a_request(prompt_tokens=200, text_bytes=800.0)
        lease = world.grant(request)
        world.clock.passes(2.0)
        world.end(lease, began=True)
        world.leases.settle(UsageReport(lease.id, usage, usage, 10), request)
    return world


def test_without_that_the_time_and_the_nodes_speed_tell_at_most_the_whole_prompt() -> None:
    keys: dict[str, Any] = {"prompt_tokens": 4000, "text_bytes": 16_000.0, "stream": True}
    half = left(a_measured_world(), a_request(**keys), 10.0)
    whole = left(a_measured_world(), a_request(**keys), 1e6)
    assert half.prompt_tokens == pytest.approx(2000, rel=0.2)
    assert whole.prompt_tokens == pytest.approx(4000, rel=0.1)
    assert half.completion_tokens == whole.completion_tokens == 0


def test_an_attempt_that_was_never_sent_or_was_refused_takes_nothing() -> None:
    world = World(node("a"))
    for status, sent in ((0, False), (400, True)):
        lease = world.grant(a_request(prompt_tokens=100))
        world.clock.passes(1.0)
        report = AttemptReport(lease.id, "client_closed", status, sent, True, False)
        assert world.leases.ended(report) == NOTHING_CHARGED


async def test_where_else_a_request_could_go() -> None:
    gpu, cpu = node("a", tier="gpu", host="one", slots=3), node("b", host="two", slots=4)
    third = node("c", host="two", slots=1, state=NodeState.DOWN)
    leases = World(gpu, cpu, third).leases
    assert await leases.ask_nodes("has_cpu_node", a_request(), NOTHING_TRIED)
    assert not await leases.ask_nodes("has_cpu_node", a_request(), failed_on("b"))
    assert not await leases.ask_nodes(
        "has_cpu_node", a_request(node_labels=(("side", "left"),)), NOTHING_TRIED
    )
    assert await leases.ask_nodes("has_other_node", a_request(), failed_on("a"))
    assert not await leases.ask_nodes("has_other_node", a_request(), failed_on("a", "b"))
    assert leases.most_slots_of_a_host() == 5
    assert not await leases.ask_nodes("unsupported_error", a_request(), NOTHING_TRIED)


def prompt_request(*blocks: int) -> LeaseRequest:
    prompt = PromptKey(blocks, 1000.0, size=4000)
    return a_request(prompt_key=prompt, text_bytes=4000, max_tokens=100)


def test_lengths_are_learnt_from_reported_tokens() -> None:
    scheduler = a_scheduler(node("a"), node("b"))
    request, used = a_request(text_bytes=1000, max_tokens=4000), Usage(500, 0, 20)
    for _ in range(30):
        record = lease_at_once(scheduler, request)
        record.release()
        scheduler.demand_model.learn(record.placement, request, UsageReport(0, used, used, 30))
    expected = lease_at_once(scheduler, request).placement
    assert expected.prompt_tokens == pytest.approx(500.0, rel=0.1)
    assert expected.completion_tokens == pytest.approx(20.0, rel=0.5)


async def test_ended_answers_are_learnt_before_their_slots_are_given_out() -> None:
    moments, used = itertools.count(), Usage(1000, 0, 5)
    scheduler = a_scheduler(node(slots=1), clock=lambda: float(next(moments)))
    demand_model, first = scheduler.demand_model, prompt_request(1, 2, 3)
    record = lease_at_once(scheduler, first)
    scheduler.learn_pending = lambda: demand_model.learn(
        record.placement, first, UsageReport(0, used, used, 5)
    )
    waiting = asyncio.create_task(scheduler.wait_for_lease(prompt_request(1, 2, 3, 4)))
    await asyncio.sleep(0)
    record.release()
    demand_model.answer_ended(first)
    async with asyncio.timeout(30.0):
        granted = await waiting
    assert sum(scheduler.records[granted.id].placement.cached.values()) > 900


# Token estimates, and how answers correct them.


HUGE = 32_768


def prompt_of(estimates: TokenEstimates, text: float, model: str = "m", caller: str = "a") -> float:
    return expected(estimates, model, caller, text, 0)[0]


def answer_of(
    estimates: TokenEstimates, max_tokens: float | None = HUGE, model: str = "m", caller: str = "a"
) -> float:
    return expected(estimates, model, caller, 100, max_tokens)[1]


def learn_answers(
    estimates: TokenEstimates,
    *lengths: float,
    max_tokens: float | None = HUGE,
    caller: str = "a",
    complete: bool = True,
) -> None:
    for length in lengths:
        learn(estimates, "m", caller, 400, 100, length, max_tokens, complete=complete)


def test_the_bytes_of_a_models_tokens_are_learnt_from_four_at_first() -> None:
    estimates = TokenEstimates()
    assert prompt_of(estimates, 4000) == pytest.approx(1000)
    for size in (3000, 300, 30_000, 900):
        learn(estimates, "m", "a", size, size / 3, 50, None)
    assert prompt_of(estimates, 6000) == pytest.approx(2000, rel=0.05)
    assert prompt_of(estimates, 6000, caller="b") == pytest.approx(2000, rel=0.05)
    assert prompt_of(estimates, 6000, model="n") == pytest.approx(1500)


def test_a_callers_own_ratio_replaces_the_models() -> None:
    """One caller writes Chinese (two bytes a token), ten others English."""
    estimates = TokenEstimates()
    for turn in range(200):
        learn(estimates, "m", f"english {turn % 10}", 2000, 500, 50, None)
        if turn % 10 == 0:
            learn(estimates, "m", "chinese", 2000, 1000, 50, None)
    assert prompt_of(estimates, 3000, caller="chinese") == pytest.approx(1500, rel=0.06)
    assert prompt_of(estimates, 3000, caller="english 3") == pytest.approx(750, rel=0.06)
    assert prompt_of(estimates, 3000, caller="new") == pytest.approx(800, rel=0.1)


def test_the_tokens_of_images_are_learnt_apart_from_text() -> None:
    """A model that makes 256 tokens of any image, each guessed as 1,000."""
    estimates = TokenEstimates()
    for count in (1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3):
        learn(estimates, "m", "a", 2000, 500 + 256 * count, 50, None, media=1000 * count)
    assert expected(estimates, "m", "b", 400, 0, 0, 2000)[0] == pytest.approx(612, rel=0.15)
    assert prompt_of(estimates, 4000) == pytest.approx(1000)


@each_case(
    ("max_tokens", "expected"),
    [
        *((one, DEFAULT_ANSWER_TOKENS) for one in (None, 10**18, 1e300, math.inf, math.nan)),
        (HUGE, pytest.approx(DEFAULT_ANSWER_TOKENS, rel=0.01)),
        (16, pytest.approx(16, rel=0.01)),
        (0, 0),
        (-1, 0),
    ],
)
def test_an_unknown_answer_has_the_default_length_within_a_limit_that_is_not_absurd(
    max_tokens: float | None, expected: object
) -> None:
    assert answer_of(TokenEstimates(), max_tokens) == expected


def test_answers_that_always_reach_their_limit_are_expected_at_the_limit() -> None:
    estimates = TokenEstimates()
    for _ in range(10):
        for length in (20, 80, 200):
            learn_answers(estimates, length, max_tokens=length)
    for limit in (20, 80, 200):
        assert answer_of(estimates, limit) == pytest.approx(limit, rel=0.05)


def test_answers_cut_short_teach_no_short_lengths() -> None:
    estimates = TokenEstimates()
    learn_answers(estimates, *20 * [300])
    before = answer_of(estimates)
    learn_answers(estimates, *20 * [3], complete=False)
    assert answer_of(estimates) >= before * 0.95


@each_case(
    ("lengths", "expected", "within"),
    [([40] * 100 + [400] * 100, 400, 0.15), ([50] * 60 + [30_000], 50, 0.3)],
)
def test_a_change_of_lengths_is_followed_but_no_runaway_answer(
    lengths: list[float], expected: float, within: float
) -> None:
    estimates = TokenEstimates()
    learn_answers(estimates, *lengths)
    assert answer_of(estimates) == pytest.approx(expected, rel=within)


def test_memory_is_bounded_and_active_callers_stay() -> None:
    estimates = TokenEstimates(most_models=10, most_callers=100)
    for number in range(1000):
        learn_answers(estimates, 50)
        learn(estimates, f"m{number}", f"c{number}", 1000, 500, 9, None)

    def known(model: str, caller: str) -> bool:
        found = expected(estimates, model, caller, 1000, None)
        return found != expected(estimates, "never seen", "never seen", 1000, None)

    # "m" is the tenth model, and its caller one of the hundred.
    assert [number for number in range(1000) if known(f"m{number}", "")] == [*range(991, 1000)]
    callers = [number for number in range(991) if known(f"m{number}", f"c{number}")]
    assert callers == [*range(901, 991)]
    assert answer_of(estimates) == pytest.approx(50, rel=0.1)


numbers: Any = st.floats() | st.integers(-(10**30), 10**30)


@given(st.lists(st.tuples(numbers, numbers, numbers, st.none() | numbers, numbers, numbers)))
def test_estimates_are_sane_whatever_is_reported(told: list[tuple[Any, ...]]) -> None:
    estimates = TokenEstimates()
    for text, prompt, completion, limit, ids, media in told:
        learn(estimates, "m", "a", text, prompt, completion, limit, ids, media)
        for size in (*expected(estimates, "m", "a", text, limit, ids, media), answer_of(estimates)):
            assert 0 <= size <= MOST_TOKENS
        assert 0 < prompt_of(estimates, 1000) < 10_000
        assert 0 <= answer_of(estimates, 100) <= 100


@pytest.mark.parametrize(("times", "stays"), [(1.4, True), (1.6, False)])
def test_a_session_stays_at_its_node_unless_another_is_much_faster(
    times: float, stays: bool
) -> None:
    scheduler = a_scheduler(node("a"), node("b"))

    def served_by(number: int) -> str:
        """The node of a request of the session, whose prompt no node has cached."""
        prompt = PromptKey((number,), 100.0, size=400)
        lease = lease_at_once(scheduler, a_request(prompt_key=prompt, text_bytes=400, session="s"))
        lease.release()
        return lease.node.name

    last_node = served_by(1)
    assert [served_by(number) for number in range(2, 12)] == [last_node] * 10
    for row in scheduler.dispatcher.placement_state.by_name.values():
        factor = 1.0 if row.name == last_node else times
        row.set_speed(100.0 * factor, 0.1 / factor, 0.0)
    assert (served_by(12) == last_node) is stays


def lease(
    scheduler: Scheduler, request: LeaseRequest, tried: Tried = NOTHING_TRIED
) -> GrantedLease:
    return known(scheduler.lease_now(request, tried))


def decisions(log: DecisionLog, request: LeaseRequest) -> list[Decision]:
    return log.find([request.id])[request.id].decisions


def only_grant(scheduler: Scheduler, request: LeaseRequest) -> Grant:
    (grant,) = decisions(scheduler.decision_log, request)
    assert isinstance(grant, Grant)
    return grant


def test_the_log_is_bounded_and_says_how_far_it_reaches_back() -> None:
    clock = Clock()
    scheduler = a_scheduler(node(slots=64), clock=clock)
    log = scheduler.decision_log
    started = clock()
    assert log.reaches_back_to() == started
    log.grants = deque(maxlen=3)
    requests = [a_request() for _ in range(5)]
    for request in requests:
        clock.passes(1.0)
        lease(scheduler, request)
    assert decisions(log, requests[1]) == []
    assert decisions(log, requests[4]) != []
    assert log.reaches_back_to() == pytest.approx(started + 3.0)


def test_nothing_of_a_prompt_is_kept_alive() -> None:
    scheduler = a_scheduler(node("a"), node("b"))
    blocks = tuple(range(1 << 60, (1 << 60) + 1000))
    request = a_request(prompt_key=PromptKey(blocks, 4000.0), text_bytes=16_000)
    lease(scheduler, request)
    kept = msgspec.json.encode(msgspec.to_builtins(only_grant(scheduler, request)))
    assert str(blocks[0]).encode() not in kept
    assert len(kept) < 2000


def test_what_is_followed_is_bounded_in_number_and_length() -> None:
    scheduler = a_scheduler(node("a", slots=1000))
    log, request = scheduler.decision_log, a_request()
    log.follow("first")
    log.follow(request.id)
    for _ in range(MOST_COLLECTED + 5):
        lease(scheduler, request)
    for number in range(MOST_FOLLOWED - 1):
        log.follow(f"other_{number}")
    assert len(log.followed) == MOST_FOLLOWED
    assert log.take("first") is None
    collected = known(log.take(request.id))
    assert len(collected) == MOST_COLLECTED
    log.follow_none()
    assert log.followed == {}


@in_virtual_time
async def test_the_page_has_the_times_to_the_first_token_and_the_end_by_those_expected() -> None:
    async with (
        EmulatedNode(slots=1, prefill_tps=100, decode_tps=20) as node,
        bare_gateway(a_spec("a", node.url)) as gateway,
    ):
        for number in range(4):
            await gateway.chat(f"{number} " + "hello " * 100, max_tokens=10)
        before = await figures(gateway)
        await gateway.chat("5 " + "hello " * 100, max_tokens=10)
        after = await figures(gateway)
        id_ = gateway.ended[-1].request_id
        (remembered,) = gateway.scheduler.decision_log.find([id_]).values()
        (grant,) = [one for one in remembered.decisions if isinstance(one, Grant)]
    family = "llama_gateway_prediction_ratio"
    for of in ("first_token", "completion"):
        assert after[f"{family}_count", of] == before[f"{family}_count", of] + 1
    ratio = after[f"{family}_sum", "first_token"] - before[f"{family}_sum", "first_token"]
    assert grant.first_content_at is not None
    assert ratio == pytest.approx((grant.first_content_at - grant.at) / grant.expected_ttft)
    assert 0.5 < ratio < 2.0, "the node's speed is known by now"


async def figures(gateway: BareGateway) -> dict[tuple[str, str], float]:
    """The values of /metrics that tell of predictions, by name and `of`."""
    gateway.bus.flush()
    page = (await gateway.admin.get("/metrics")).text
    return {
        (sample.name, sample.labels["of"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "of" in sample.labels and not sample.name.endswith("_bucket")
    }
