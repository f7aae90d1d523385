"""Under any order of events no request waits while a slot that it could use idles; no leaks."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.lease import LeaseRequest, PromptKey, Usage, UsageReport
from gateway.nodes.node import Node, NodeState
from gateway.schedule.admission import Waiter
from gateway.schedule.scheduler import LeaseRecord, Scheduler
from gateway.terms import Priority
from tests.nodes.build import Clock, learn_timings
from tests.schedule.build import a_request, a_scheduler, node, set_nodes, settle, take_lease
from tests.virtual import VirtualLoop

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
        task = asyncio.create_task(take_lease(self.scheduler, request))
        self.tasks[request.id] = (request, task)

    def finish(self, number: int) -> None:
        if not self.running:
            return
        request, record = self.running.pop(number % len(self.running))
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
    ["arrive"] * 6 + ["finish"] * 4 + ["cancel", "change", "inventory", "reload", "time_passes"]
)
script = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 60)), min_size=10, max_size=60)
RANDOM_SCRIPTS = 500


async def run(events: list[tuple[str, int]], seed: int) -> None:
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
        runner.run(run(events, seed))


# Beside GPUs.

SPILL_EVENTS = (
    ["arrive"] * 6
    + ["read", "end", "cancel", "time_passes"] * 2
    + ["refuse", "change", "cancel_granted", "grant_cancelled"]
)


@dataclass
class SpillWorld(World):
    """A CPU and two GPUs, to which normal requests may spill over."""

    def arrive(self, number: int) -> None:
        # Two long prompts: a request may wait for the GPU that reads its prompt just now.
        blocks = tuple(hash((number % 2, i)) for i in range(4))
        request = a_request(
            priority=Priority.NORMAL if number % 3 else Priority.BATCH,
            prompt_key=PromptKey(blocks, 3000.0, size=12_000),
            text_bytes=12_000,
            max_tokens=50,
            time_limit=5.0 if number % 5 == 0 else None,
            caller=CALLERS[number % 4 // 2],
        )
        begin = take_lease if self.rng.random() < 0.5 else wait_for_record
        self.tasks[request.id] = request, asyncio.create_task(begin(self.scheduler, request))

    def read(self, number: int) -> None:
        if self.running:
            self.running[number % len(self.running)][1].content_received(self.clock())

    def end(self, number: int) -> None:
        if self.running:
            _, record = self.running.pop(number % len(self.running))
            if record.reservation is not None:
                record.reservation.settle(0.0, happened=True, now=self.clock())
            record.release()

    def refuse(self, number: int) -> None:
        if self.tasks:
            request_id = list(self.tasks)[number % len(self.tasks)]
            self.scheduler.refuse(request_id, GatewayError(503, "no_node", ""))

    def cancel_granted(self, number: int) -> None:
        """Cancel a request that has just been granted a slot, and does not know it yet."""
        self.end(number)
        self.scheduler.check_all()
        self.cancel(number)

    def grant_cancelled(self, number: int) -> None:
        """Give slots out while a request that waits does not know yet that it is cancelled."""
        self.cancel(number)
        self.end(number)
        self.scheduler.check_all()


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
    """How many requests spilled over, and the codes of those that were refused."""
    clock = Clock()
    nodes = {
        name: node(name, slots=1, tier=tier, clock=clock)
        for name, tier in (("a", "cpu"), ("b", "gpu"), ("c", "gpu"))
    }
    for one in nodes.values():
        learn_timings(
            one.speed,
            {"prompt_n": 900, "prompt_ms": 9000.0, "predicted_n": 90, "predicted_ms": 9000.0},
        )
    scheduler = a_scheduler(
        *nodes.values(),
        clock=clock,
        queue={"max": 2, "max_wait": 20},
        hybrid={"spill": {"after": 0, "share": 1}},
    )
    world = SpillWorld(clock, nodes, scheduler, rng)
    for _ in range(80):
        getattr(world, rng.choice(SPILL_EVENTS))(rng.randrange(20))
        if rng.random() < 0.7:
            await world.settle()
    for _, task in world.tasks.values():
        task.cancel()
    await world.settle()
    while world.running:
        world.end(0)
    shown = scheduler.tier_policy.view(clock())["spill"]
    assert isinstance(shown, dict)
    assert shown["running"] == 0
    scheduler.close()
    return shown["spilled"], set(world.errors)


async def wait_for_record(scheduler: Scheduler, request: LeaseRequest) -> LeaseRecord:
    """As `take_lease`, of a request that is queued first, since a slot has just come free."""
    return scheduler.records[(await scheduler.wait_for_lease(request)).id]
