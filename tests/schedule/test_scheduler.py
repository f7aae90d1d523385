"""Which requests get a lease, which wait, and which are refused."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
import structlog

from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.lease import NOTHING_TRIED, LeaseRequest, PromptKey, Tried
from gateway.nodes.node import Node, NodeState
from gateway.nodes.server_properties import ServerProperties
from gateway.nodes.speed import sample_from_timings
from gateway.schedule.candidates import NodeCandidates, with_context
from gateway.schedule.core.requests import NodeSlots
from gateway.schedule.scheduler import MOST_PLACED_BY_TOKENS, Scheduler
from gateway.terms import Priority
from tests.each_case import each_case
from tests.known import known
from tests.lease_requests import learn
from tests.nodes.build import Clock, learn_timings, take
from tests.schedule.build import (
    CALLER,
    a_request,
    a_scheduler,
    failed_on,
    lease_at_once,
    node,
    refused_by,
    set_nodes,
    settle,
    start_lease,
    take_lease,
)
from tests.virtual import in_virtual_time, now


def refusal(task: asyncio.Task[Any]) -> GatewayError:
    assert task.done()
    error = task.exception()
    assert isinstance(error, GatewayError)
    return error


async def test_a_retry_keeps_the_place_of_its_arrival_and_no_arrival_passes_a_waiting_request() -> (
    None
):
    scheduler = a_scheduler(node(slots=1))
    early = a_request()
    running = await start_lease(scheduler, a_request())
    late = await start_lease(scheduler, a_request())
    retry = await start_lease(scheduler, early, failed_on(), 1.0)
    running.result().release()
    # The slot is free but not yet given out.
    newcomer = asyncio.create_task(take_lease(scheduler, a_request()))
    await settle()
    assert [task.done() for task in (retry, late, newcomer)] == [True, False, False]


async def test_a_wide_request_is_not_starved_by_narrow_ones() -> None:
    one = node(slots=2)
    scheduler = a_scheduler(one)
    running = [await start_lease(scheduler, a_request()) for _ in range(2)]
    wide = await start_lease(scheduler, a_request(slots=2))
    narrow = [await start_lease(scheduler, a_request()) for _ in range(4)]
    running[0].result().release()
    await settle()
    assert not wide.done()
    assert not any(task.done() for task in narrow), "its reserved slot was taken"
    late = await start_lease(scheduler, a_request())
    assert not late.done()
    running[1].result().release()
    await settle()
    assert wide.done()
    wide.result().release()
    await settle()
    assert [task.done() for task in narrow] == [True, True, False, False]


def unprobed() -> Node:
    silent = node("b", models=(), state=NodeState.STARTING)
    silent.probe_history.probed = silent.probe_history.up = False
    return silent


@each_case(
    ("nodes", "request_", "status", "code"),
    [
        ([node()], a_request("nothing"), 404, "model_not_found"),
        ([node(), unprobed()], a_request("nothing"), 503, "no_node"),
        ([node(endpoints=["chat"])], a_request(endpoint="embeddings"), 501, "not_supported"),
        ([node(slots=2), node("b", slots=3)], a_request(slots=4), 400, "invalid_request"),
        ([node(endpoints=["chat"])], a_request(needs_vision=True), 400, "invalid_request"),
    ],
)
async def test_what_no_node_serves_is_refused_with_a_reason_and_advice_to_wait_if_one_may_yet(
    nodes: list[Node], request_: LeaseRequest, status: int, code: str
) -> None:
    error = refusal(await start_lease(a_scheduler(*nodes), request_))
    assert (error.status, error.code) == (status, code)
    assert bool(error.retry_after) is (status == 503)
    assert error.retryable is (status != 501)


async def test_a_list_of_models_means_the_first_that_can_serve() -> None:
    first, second = node("a", slots=1, models=("x",)), node("b", slots=1, models=("y",))
    scheduler = a_scheduler(first, second)
    lease = await take_lease(scheduler, a_request("helper", "gone", "x", "y"))
    assert lease.node is first
    # A request waits for a busy node, but not for one that is down.
    waiting = await start_lease(scheduler, a_request("helper", "x", "y"))
    assert not waiting.done()
    first.state = NodeState.DOWN
    scheduler.capacity_changed()
    await settle()
    assert waiting.result().node is second


@in_virtual_time
async def test_a_wait_ends_in_time() -> None:
    scheduler = a_scheduler(
        node(slots=1), clock=now, queue={"max_wait": 0.15}, classes={"batch": {"max_wait": 0.05}}
    )
    await take_lease(scheduler, a_request())
    began = now()
    normal = await start_lease(scheduler, a_request())
    batch = await start_lease(scheduler, a_request(priority=Priority.BATCH))
    with pytest.raises(GatewayError) as raised:
        await batch
    assert now() - began == pytest.approx(0.05)
    assert not normal.done()
    assert (raised.value.status, raised.value.code) == (503, "queue_timeout")
    assert raised.value.retry_after
    assert not raised.value.retryable
    with pytest.raises(GatewayError):
        await normal
    assert now() - began == pytest.approx(0.15)
    assert scheduler.queue_positions() == []


async def test_a_time_limit_counts_from_the_receipt_by_whatever_clock() -> None:
    clock = Clock()
    scheduler = a_scheduler(node(clock=clock, slots=1))
    await take_lease(scheduler, a_request())
    old = await start_lease(scheduler, a_request(time_limit=5.0), age=4.0)
    young = await start_lease(scheduler, a_request(time_limit=5.0), age=1.0)
    waiters = [waiter for waiter, _ in scheduler.predicted_waits()]
    assert [waiter.queued.received_at for waiter in waiters] == [clock() - 4.0, clock() - 1.0]
    clock.passes(1.5)
    scheduler.check_all()
    await settle()
    assert refusal(old).code == "queue_timeout"
    assert not young.done()


async def test_a_mute_node_is_worth_the_ordinary_wait() -> None:
    one = node(state=NodeState.MUTE)
    clock = Clock()
    scheduler = a_scheduler(one, clock=clock, retries={"wait_for_node": 1.0})
    task = await start_lease(scheduler, a_request())
    clock.passes(100.0)
    scheduler.check_all()
    await settle()
    assert not task.done()
    one.state = NodeState.DOWN
    scheduler.check_all()
    clock.passes(1.0)
    scheduler.check_all()
    await settle()
    assert refusal(task).code == "no_node"


async def test_when_the_last_node_is_removed_waiting_requests_are_refused() -> None:
    scheduler = a_scheduler(node("a", slots=1), node("b", models=("other",)))
    await take_lease(scheduler, a_request())
    task = await start_lease(scheduler, a_request())
    set_nodes(scheduler, scheduler.fleet.nodes["b"])
    scheduler.check_all()
    await settle()
    assert refusal(task).code == "model_not_found"


async def test_a_request_that_leaves_the_queue_leaves_nothing_behind() -> None:
    one = node(slots=1)
    scheduler = a_scheduler(one)
    running = await start_lease(scheduler, a_request())
    waiting = [await start_lease(scheduler, a_request()) for _ in range(3)]
    waiting[1].cancel()
    await settle()
    assert len(scheduler.queue_positions()) == 2
    # Granted and cancelled at the same time: the slot must not be lost.
    running.result().release()
    scheduler.match()
    assert one.leased == 1
    waiting[0].cancel()
    await settle()
    assert waiting[0].cancelled()
    assert waiting[2].done()
    assert (one.leased, len(scheduler.records)) == (1, 2)
    waiting[2].result().release()
    assert (one.leased, scheduler.queue_positions()) == (0, [])


async def test_a_client_that_leaves_while_the_nodes_change_gets_no_lease() -> None:
    one, new = node("a", slots=1), node("b", slots=1)
    scheduler = a_scheduler(one)
    await take_lease(scheduler, a_request())
    waiting = await start_lease(scheduler, a_request())
    new.clock = one.clock
    scheduler.fleet.nodes["b"] = new
    scheduler.fleet.model_index.set_nodes([one, new])
    scheduler.fleet_sync.sync()
    waiting.cancel()
    scheduler.match()
    await settle()
    assert waiting.cancelled()
    assert new.leased == 0
    assert len(scheduler.records) == 1
    assert not scheduler.queue_positions()


# Any order of events.


async def test_a_prompt_that_cannot_be_read_in_time_is_refused_though_a_slot_is_free() -> None:
    only = node(slots=1)
    clock = Clock()
    scheduler = a_scheduler(only, clock=clock)
    late = a_request(prompt_tokens=3000, exact_tokens=3000, max_tokens=10, time_limit=0.5)
    unmeasured = known(scheduler.lease_now(late))
    scheduler.release_unused(unmeasured.id)
    learn_timings(
        only.speed, {"prompt_n": 3000, "prompt_ms": 30_000.0, "predicted_n": 9, "predicted_ms": 9}
    )
    scheduler.fleet.refresh_state(only)
    scheduler.capacity_changed()
    with pytest.raises(GatewayError) as refused:
        scheduler.lease_now(late)
    assert (refused.value.status, refused.value.code) == (503, "queue_timeout")
    assert refused.value.retry_after is not None
    patient = a_request(prompt_tokens=3000, exact_tokens=3000, max_tokens=10, time_limit=60.0)
    assert scheduler.lease_now(patient) is not None


READ = {"prompt_n": 3000, "prompt_ms": 30_000.0}
WROTE = {"predicted_n": 300, "predicted_ms": 30_000.0}


async def start_burst(scheduler: Scheduler, count: int) -> list[asyncio.Task[Any]]:
    tasks = []
    for number in range(count):
        limit = 90.0 if number % 2 else None
        request = a_request(prompt_tokens=3000, exact_tokens=3000, time_limit=limit)
        tasks.append(asyncio.create_task(take_lease(scheduler, request)))
    await settle()
    return tasks


@each_case(
    ("answers", "refuses"),
    [
        ([], False),
        ([READ | WROTE], False),
        ([READ, READ, READ], False),
        ([WROTE, WROTE, WROTE], False),
        ([READ | WROTE, READ | WROTE], True),
        # Another server is measured anew.
        ([READ | WROTE, READ | WROTE, None, READ | WROTE], False),
    ],
)
async def test_a_burst_is_refused_by_prediction_only_with_measured_speeds(
    answers: list[dict[str, float] | None], refuses: bool
) -> None:
    clock = Clock()
    one = node(slots=2)
    scheduler = a_scheduler(one, clock=clock, queue={"max": 50, "max_wait": 120})
    for timings in answers:
        if timings is None:
            one.speed.forget()
        else:
            scheduler.fleet.learn_speed(one, sample_from_timings(timings))
    scheduler.capacity_changed()
    tasks = await start_burst(scheduler, 40)
    assert any(task.done() and task.exception() is not None for task in tasks) is refuses
    # The number of waiting requests is bounded all the same.
    tasks += await start_burst(scheduler, 40)
    full = [task for task in tasks if task.done() and task.exception() is not None]
    assert full
    if not refuses:
        assert {refusal(task).code for task in full} == {"queue_full"}
        assert scheduler.dispatcher.waiting == 44, "one caller gets all places but a reserve"


async def test_a_request_that_has_come_to_need_most_of_a_pool_is_not_passed_over() -> None:
    scheduler = a_scheduler(node(slots=4, kv="shared", context=1000))

    def learn_answers(tokens: int) -> None:
        for _ in range(40):
            learn(scheduler.demand_model.token_estimates, "demo", CALLER, 0, 150, tokens, None, 150)

    def small() -> LeaseRequest:
        return a_request(exact_tokens=200, max_tokens=40)

    learn_answers(20)
    leases = [await take_lease(scheduler, small()) for _ in range(4)]
    grows = await start_lease(scheduler, a_request(exact_tokens=150, max_tokens=800))
    [waiter] = scheduler.waiters
    assert not waiter.queued.is_wide
    learn_answers(400)
    scheduler.check_all()
    for _ in range(8):
        await start_lease(scheduler, small())
    for lease in leases:
        lease.release()
        await settle()
    assert grows.done()


async def test_one_turn_of_the_loop_matches_a_few_requests_by_tokens_and_the_next_others() -> None:
    scheduler = a_scheduler(node(slots=32, kv="shared", context=3200))
    small: dict[str, Any] = {"exact_tokens": 60, "max_tokens": 20}
    leases = [await take_lease(scheduler, a_request(**small)) for _ in range(32)]
    tasks = [await start_lease(scheduler, a_request(**small)) for _ in range(32)]
    for lease in leases:
        lease.release()
    scheduler.match()
    assert scheduler.dispatcher.waiting == 32 - MOST_PLACED_BY_TOKENS
    await settle()
    assert all(task.done() for task in tasks)


# Leases and their records.


def test_a_request_on_a_node_that_has_left_is_settled_with_its_caller() -> None:
    scheduler = a_scheduler(node())
    record = lease_at_once(scheduler, a_request())
    set_nodes(scheduler)
    payer = known(record.placement.payer)
    record.release()
    scheduler.demand_model.abandoned(record.placement, refund=True)
    assert (payer.running, payer.counter) == (0, 0.0)


def test_the_expected_prefill_is_that_of_a_node_whose_speed_is_known() -> None:
    only = node()
    scheduler = a_scheduler(only)
    request = a_request(exact_tokens=500, prompt_tokens=500)
    first = known(scheduler.lease_now(request))
    assert (first.reading.seconds, first.reading.grace) == (None, 4 * 500 / 25.0)
    learn_timings(only.speed, READ | WROTE)
    scheduler.release_unused(first.id)
    scheduler.fleet.refresh_state(only)
    second = known(scheduler.lease_now(request))
    assert 4.0 < known(second.reading.seconds) < 6.0
    assert 16.0 < second.reading.grace < 24.0


def test_only_a_llama_cpp_server_is_asked_for_a_stream_to_assemble() -> None:
    for kind, streams in (("llama.cpp", True), ("openai", False)):
        one = node(kind=kind)
        one.properties = ServerProperties(models=("demo",))
        granted = known(a_scheduler(one).lease_now(a_request(may_assemble=True)))
        assert granted.stream is streams


def test_another_word_of_policy_means_least_finish_and_warns() -> None:
    with structlog.testing.capture_logs() as logs:
        scheduler = a_scheduler(node(), policy="round_robin")
        assert scheduler.dispatcher.rules.policy == "least_finish"
        scheduler.configure(Settings(policy="prefix_hash"))
        scheduler.configure(Settings())
    assert scheduler.dispatcher.rules.policy == "least_finish"
    assert [(one["setting"], one["value"]) for one in logs] == [
        ("policy", "round_robin"),
        ("policy", "prefix_hash"),
    ]


def find_candidates(
    request: LeaseRequest, *nodes: Node, tried: Tried = NOTHING_TRIED
) -> NodeCandidates:
    scheduler = a_scheduler(*nodes)
    return scheduler.fleet_sync.find(request, tried)


def test_a_node_with_too_small_a_context_is_excluded_while_another_fits() -> None:
    small, large, silent = node("a", context=512), node("b", context=4096), node("c")
    request = a_request(prompt_tokens=1000)
    assert with_context([small, large, silent], 1000) == [large, silent]
    assert with_context([small, node("d", context=700)], 1000)[0].name == "d"
    assert with_context([small, large], 4096) == [large]
    (group,) = find_candidates(request, small, large, silent).groups
    assert [row.name for row in group[0].rows] == ["a", "b", "c"]
    assert find_candidates(request, small, large, silent).excluded == {0}


def test_after_a_failure_the_node_is_avoided_and_its_hosts_others_penalised() -> None:
    one, same, other = node("a", host="x"), node("b", host="x"), node("c", host="y")
    found = find_candidates(a_request(), one, same, other, tried=failed_on("a"))
    assert found.failed == {0}
    assert set(found.penalties) == {1}
    assert found.excluded == frozenset()


def test_only_a_node_of_the_same_kind_resumes_a_stream() -> None:
    same, updated, other = node("a"), node("b"), node("c")
    for one, build, file in ((same, "b1", "x"), (updated, "b2", "x"), (other, "b1", "y")):
        one.properties.build, one.properties.file = build, file
    request = a_request(resume_key=same.properties.resume_key())
    assert find_candidates(request, same, updated, other).excluded == {1, 2}
    with pytest.raises(GatewayError) as refused:
        find_candidates(request, same, updated, other, tried=refused_by("a"))
    assert refused.value.code == "node_failed"
    assert find_candidates(a_request(), same, updated, other).excluded == ()


# The rows show the nodes as they are, whatever happens to them.


def row_of(scheduler: Scheduler, name: str = "a") -> NodeSlots:
    return scheduler.dispatcher.placement_state.by_name[name]


def half_open(one: Node) -> Node:
    """Let the time of its ejection pass."""
    for _ in range(one.settings.health.failures):
        one.circuit.record_failure(one.clock())
    one.state, one.circuit.open_until = NodeState.EJECTED, one.clock() - 1.0
    return one


@pytest.mark.parametrize("nodes", [3, 100])
async def test_the_first_request_after_an_ejection_is_the_trial_though_others_are_idle(
    nodes: int,
) -> None:
    one = half_open(node(slots=3))
    scheduler = a_scheduler(one, *(node(f"b{n}") for n in range(nodes)))
    trial = await take_lease(scheduler, a_request())
    assert (trial.node, trial.trial) == (one, True)
    assert row_of(scheduler).penalty > 0
    other = await take_lease(scheduler, a_request())
    assert other.node is not one
    scheduler.fleet.request_succeeded(one, one.clock(), trial.taken_at)
    trial.release()
    assert (one.state, row_of(scheduler).penalty) == (NodeState.READY, 0)


async def test_a_request_is_no_trial_where_it_would_end_much_later() -> None:
    slow, fast = half_open(node()), node("b")
    scheduler = a_scheduler(slow, fast)
    for one, ms in ((slow, 1000.0), (fast, 10.0)):
        timings = {"prompt_n": 100, "prompt_ms": 100, "predicted_n": 100, "predicted_ms": 100 * ms}
        for _ in range(20):
            scheduler.fleet.learn_speed(one, sample_from_timings(timings))
        scheduler.fleet_sync.node_changed(one)
    lease = await take_lease(scheduler, a_request(max_tokens=20))
    assert lease.node is fast
    short = await take_lease(scheduler, a_request(max_tokens=2))
    assert (short.node, short.trial) == (slow, True)


# Nodes that are added and removed.


def test_a_placement_that_the_node_cannot_take_is_not_granted() -> None:
    one = node(slots=1)
    scheduler = a_scheduler(one)
    take(one)  # the placement state does not know of it
    assert row_of(scheduler).free == 1
    assert scheduler.lease_now(a_request()) is None
    assert (row_of(scheduler).free, one.leased) == (0, 1)


def test_the_cached_prompts_go_with_the_server() -> None:
    one = node()
    one.indexed_models = one.public_models
    scheduler = a_scheduler(one)
    index, memory = row_of(scheduler).index, scheduler.prompt_cache
    numbers = itertools.count()

    def remembers() -> bool:
        prompt = PromptKey((next(numbers), next(numbers)), 100.0)
        memory.request_placed(index, prompt)
        memory.request_finished(index, prompt, 100, 0, 5)
        return index in memory.lookup(PromptKey(prompt.blocks, 100.0)).cached

    assert remembers()
    kept = PromptKey((100, 101), 50.0)
    memory.request_placed(index, kept)
    memory.request_finished(index, kept, 50, 0, 5)
    scheduler.fleet_sync.node_changed(one)
    assert memory.lookup(PromptKey(kept.blocks, 50.0)).cached
    one.probe_history.up = False
    scheduler.fleet_sync.node_changed(one)
    assert not memory.lookup(PromptKey(kept.blocks, 50.0)).cached
    assert not remembers()
    one.probe_history.up = True
    scheduler.fleet_sync.node_changed(one)
    assert remembers()
