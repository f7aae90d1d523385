"""Which requests get a lease, wait or are refused; under any order of events none waits in vain."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.lease import NOTHING_TRIED, LeaseRequest, PromptKey, Tried, Usage, UsageReport
from gateway.nodes.node import Node, NodeState
from gateway.nodes.server_properties import ServerProperties
from gateway.nodes.speed import sample_from_timings
from gateway.schedule.admission import Waiter
from gateway.schedule.candidates import NodeCandidates, with_context
from gateway.schedule.core.requests import NodeSlots
from gateway.schedule.scheduler import MOST_PLACED_BY_TOKENS, LeaseRecord, Scheduler
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
from tests.virtual import VirtualLoop, in_virtual_time, now


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
    tasks = []
    for number in range(40):
        limit = 90.0 if number % 2 else None
        request = a_request(prompt_tokens=3000, exact_tokens=3000, time_limit=limit)
        tasks.append(await start_lease(scheduler, request))
    assert any(task.done() and task.exception() is not None for task in tasks) is refuses


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

    def ran(*blocks: int) -> PromptKey:
        prompt = PromptKey(blocks, 100.0)
        memory.request_placed(index, prompt)
        memory.request_finished(index, prompt, 100, 0, 5)
        return prompt

    def is_cached(prompt: PromptKey) -> bool:
        return index in memory.lookup(PromptKey(prompt.blocks, 100.0)).cached

    def changed(*, up: bool) -> None:
        one.probe_history.up = up
        scheduler.fleet_sync.node_changed(one)

    kept = ran(1, 2)
    changed(up=True)
    assert is_cached(kept)
    changed(up=False)
    assert not is_cached(kept)
    assert not is_cached(ran(3, 4))
    changed(up=True)
    assert is_cached(ran(5, 6))


SLOTS = {"a": 1, "b": 2, "c": 4}
STATES = [
    NodeState.READY, NodeState.READY, NodeState.DOWN, NodeState.DRAINING, NodeState.MUTE,
    NodeState.DEGRADED,
]  # fmt: skip
CALLERS = ["one", "two"]


@dataclass
class World:
    """A scheduler on a clock that stands still between events."""

    clock: Clock
    nodes: dict[str, Node]
    scheduler: Scheduler
    rng: random.Random
    tasks: dict[str, tuple[LeaseRequest, asyncio.Task[LeaseRecord]]] = field(default_factory=dict)
    running: list[tuple[LeaseRequest, LeaseRecord]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def settle(self) -> None:
        """Let tasks go as far as they can; a timer may fire in between."""
        for _ in range(5):
            await settle()
            self.collect()
            if len(self.tasks) == len(self.scheduler.waiters):
                break

    def collect(self) -> None:
        for name, (request, task) in list(self.tasks.items()):
            if not task.done():
                continue
            del self.tasks[name]
            if task.cancelled():
                continue
            error = task.exception()
            if error is None:
                self.running.append((request, task.result()))
            else:
                assert isinstance(error, GatewayError), error
                self.errors.append(error.code)

    # Events.

    def arrive(self, number: int) -> None:
        rng = self.rng
        conversation = number % 7
        prompt = None
        if number % 3:
            blocks = tuple(hash((conversation, i)) for i in range(1 + number % 5))
            prompt = PromptKey(blocks, 500.0, size=2000)
        request = a_request(
            priority=Priority(number % 4),
            slots=rng.choice([0, 1, 1, 1, 1, 2, 4]),
            prompt_key=prompt,
            text_bytes=rng.choice([10, 2000, 100_000]),
            max_tokens=rng.choice([None, 1, 300, 10**18]),
            fairness_key=f"caller {number % 5}",
            caller=CALLERS[number % 2],
            time_limit=rng.choice([None, None, -1.0, 20.0]),
        )
        self.begin(request)

    def begin(self, request: LeaseRequest) -> None:
        # Some are queued first, as when a slot has just come free.
        begin = take_lease if self.rng.random() < 0.5 else wait_for_lease
        self.tasks[request.id] = request, asyncio.create_task(begin(self.scheduler, request))

    def read(self, number: int) -> None:
        if self.running:
            self.running[number % len(self.running)][1].content_received(self.clock())

    def finish(self, number: int) -> None:
        if not self.running:
            return
        request, record = self.running.pop(number % len(self.running))
        if record.reservation is not None:
            record.reservation.settle(0.0, happened=True, now=self.clock())
        record.release()
        demand_model = self.scheduler.demand_model
        if number % 4 == 0:
            demand_model.abandoned(record.placement, refund=bool(number % 8))
        elif number % 4 == 1:
            report = UsageReport(0, Usage(), None, number, complete=False)
            demand_model.learn(record.placement, request, report)
        else:
            absurd = [0.0, float("nan"), -5.0, 1e300, 40.0, 400.0]
            reported = Usage(*(self.rng.choice(absurd) for _ in range(3)))  # type: ignore[arg-type]
            demand_model.learn(record.placement, request, UsageReport(0, reported, reported, 3))

    def cancel(self, number: int) -> None:
        if self.tasks:
            list(self.tasks.values())[number % len(self.tasks)][1].cancel()

    def refuse(self, number: int) -> None:
        if self.tasks:
            request_id = list(self.tasks)[number % len(self.tasks)]
            self.scheduler.refuse(request_id, GatewayError(503, "no_node", ""))

    def cancel_granted(self, number: int) -> None:
        """Cancel a request that has just been granted a slot, and does not know it yet."""
        self.finish(number)
        self.scheduler.check_all()
        self.cancel(number)

    def grant_cancelled(self, number: int) -> None:
        """Give slots out while a request that waits does not know yet that it is cancelled."""
        self.cancel(number)
        self.finish(number)
        self.scheduler.check_all()

    def change(self, number: int) -> None:
        """Change a node's state, or the slots that others' work takes there."""
        one = self.nodes["abc"[number % 3]]
        if number % 2:
            one.state = self.rng.choice(STATES)
        else:
            one.occupancy.foreign = self.rng.randint(0, 3)
        self.scheduler.fleet_sync.node_changed(one)
        self.scheduler.match()

    def inventory(self, number: int) -> None:
        """Remove a node, or bring it back."""
        name, kept = "abc"[number % 3], dict(self.scheduler.fleet.nodes)
        if name not in kept:
            kept[name] = self.nodes[name]
        elif len(kept) > 1:
            del kept[name]
        set_nodes(self.scheduler, *kept.values())

    def reload(self, number: int) -> None:
        self.scheduler.configure(
            Settings.model_validate(
                {
                    "queue": {"max": 6 + number % 5, "max_wait": 30 + number},
                    "classes": {
                        "batch": {"reserve_slots": (number % 3) / 4},
                        "normal": {"patience": number % 7},
                    },
                }
            )
        )

    def time_passes(self, number: int) -> None:
        self.clock.passes(number / 4)
        self.scheduler.check_all()

    # Invariants.

    def check(self) -> None:
        state, now = self.scheduler.dispatcher.placement_state, self.clock()
        for name, one in self.scheduler.fleet.nodes.items():
            # A node that came back has a new row, to which earlier leases are others' work.
            assert one.leased == sum(lease.slots for _, lease in self.running if lease.node is one)
            assert one.leased <= one.slots_total
            assert state.by_name[name].free == one.free_slots(now), name
        waiters = self.scheduler.waiters
        assert {waiter.request.id for waiter in waiters} == set(self.tasks)
        assert self.scheduler.dispatcher.waiting == len(self.tasks)
        predicted = [waiter.request.id for waiter, _ in self.scheduler.predicted_waits()]
        assert set(predicted) == set(self.tasks)
        assert [one.request_id for one in self.scheduler.queue_positions()] == predicted
        for waiter in waiters:
            assert self.may_wait(waiter, now), f"{waiter.request} could go"

    def may_wait(self, waiter: Waiter, now: float) -> bool:
        """Whether no slot idles that it could use, or it is deferred to a better one."""
        queued, state = waiter.queued, self.scheduler.dispatcher.placement_state
        if queued.deferred_to is not None:
            return True
        for name, one in self.scheduler.fleet.nodes.items():
            row = state.by_name[name]
            if not queued.slots:
                if one.capacity(now) and self.has_slotless_room(one, waiter.request):
                    return False
                continue
            spare = 0
            if queued.priority is Priority.BATCH and (row.busy or row.kept_from_batch):
                spare = row.total if row.kept_from_batch else row.batch_reserve
            wide = row.reserved_for
            is_open = wide is None or wide is queued
            if wide is not None and not row.reserved_from_all:
                is_open = is_open or wide.priority > queued.priority
            if is_open and one.free_slots(now) - queued.slots >= spare:
                return False
        return True

    def has_slotless_room(self, one: Node, request: LeaseRequest) -> bool:
        """Whether the node may run one more request without a slot, of this caller.

        It runs `queue.slotless` of them at once, and one caller gets half of these places.
        """
        most = self.scheduler.settings.queue.slotless
        callers = [
            running.caller.id
            for running, lease in self.running
            if lease.node is one and not lease.slots
        ]
        return len(callers) < most and callers.count(request.caller.id) < (most + 1) // 2


EVENTS = (
    ["arrive"] * 6 + ["finish"] * 4 + ["read", "cancel", "refuse", "cancel_granted"]
    + ["grant_cancelled", "change", "inventory", "reload", "time_passes"]
)  # fmt: skip
script = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 60)), min_size=10, max_size=60)
RANDOM_SCRIPTS = 500


async def run_script(events: list[tuple[str, int]], seed: int) -> None:
    clock = Clock()
    nodes = {name: node(name, clock=clock, slots=slots) for name, slots in SLOTS.items()}
    scheduler = a_scheduler(*nodes.values(), clock=clock, seed=seed, queue={"max": 8})
    world = World(clock, nodes, scheduler, random.Random(seed))
    for what, number in events:
        getattr(world, what)(number)
        await world.settle()
        world.check()
    # Once all nodes are ready and all leases end, every waiting request has been served.
    for one in nodes.values():
        one.state, one.occupancy.foreign = NodeState.READY, 0
    set_nodes(scheduler, *nodes.values())
    for _ in range(400):
        await world.settle()
        if not world.tasks and not world.running:
            break
        while world.running:
            world.finish(3)
        clock.passes(0.3)
        scheduler.check_all()
    assert not world.tasks
    assert [one.leased for one in nodes.values()] == [0, 0, 0]
    for row in scheduler.dispatcher.placement_state.by_name.values():
        assert (row.ours, row.running, row.deferred, row.reserved_for) == (0, [], [], None)
    assert scheduler.dispatcher.waiting == 0
    scheduler.close()


@given(script, st.integers(0, 1 << 16))
def test_nobody_waits_in_vain_and_nothing_leaks(events: list[tuple[str, int]], seed: int) -> None:
    play(events, seed)


@pytest.mark.slow
def test_nobody_waits_in_vain_in_long_random_scripts() -> None:
    """Hypothesis prefers short and uniform scripts, in which few limits are reached."""
    for seed in range(RANDOM_SCRIPTS):
        rng = random.Random(seed)
        length = rng.randint(30, 60)
        play([(rng.choice(EVENTS), rng.randint(0, 60)) for _ in range(length)], seed)


def play(events: list[tuple[str, int]], seed: int) -> None:
    # In virtual time, where the scheduler's own timers don't ring while nothing waits for them.
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run_script(events, seed))


class SpillWorld(World):
    """A CPU and two GPUs, to which normal requests may spill over."""

    def arrive(self, number: int) -> None:
        # Two long prompts: a request may wait for the GPU that reads its prompt just now.
        blocks = tuple(hash((number % 2, i)) for i in range(4))
        self.begin(
            a_request(
                priority=Priority.NORMAL if number % 3 else Priority.BATCH,
                prompt_key=PromptKey(blocks, 3000.0, size=12_000),
                text_bytes=12_000,
                max_tokens=50,
                time_limit=5.0 if number % 5 == 0 else None,
                caller=CALLERS[number % 4 // 2],
            )
        )


def test_no_way_of_a_request_keeps_its_share_of_the_spill_over() -> None:
    spilled, ends = 0, set[str]()
    for seed in range(100):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            count, errors = runner.run(spill_at_random(random.Random(seed)))
        spilled += count
        ends |= errors
    assert spilled > 100
    assert {"queue_full", "queue_timeout", "no_node"} <= ends


async def spill_at_random(rng: random.Random) -> tuple[int, set[str]]:
    """How many requests spilled over to GPUs, and the codes of those that were refused."""
    clock = Clock()
    nodes = {
        name: node(name, slots=1, tier=tier, clock=clock)
        for name, tier in (("a", "cpu"), ("b", "gpu"), ("c", "gpu"))
    }
    timings = {"prompt_n": 900, "prompt_ms": 9000.0, "predicted_n": 90, "predicted_ms": 9000.0}
    for one in nodes.values():
        learn_timings(one.speed, timings)
    hybrid = {"spill": {"after": 0, "share": 1}}
    scheduler = a_scheduler(
        *nodes.values(), clock=clock, queue={"max": 2, "max_wait": 20}, hybrid=hybrid
    )
    world = SpillWorld(clock, nodes, scheduler, rng)
    for _ in range(80):
        what = rng.choice([event for event in EVENTS if event not in {"inventory", "reload"}])
        getattr(world, what)(rng.randrange(20))
        if rng.random() < 0.7:
            await world.settle()
    for _, task in world.tasks.values():
        task.cancel()
    await world.settle()
    while world.running:
        world.finish(0)
    shown = scheduler.tier_policy.view(clock())["spill"]
    assert isinstance(shown, dict)
    assert shown["running"] == 0
    scheduler.close()
    return shown["spilled"], set(world.errors)


async def wait_for_lease(scheduler: Scheduler, request: LeaseRequest) -> LeaseRecord:
    return scheduler.records[(await scheduler.wait_for_lease(request)).id]
