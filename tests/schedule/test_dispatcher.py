"""Where requests are placed, which wait, in which order and for how long."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import astuple

from gateway.schedule.candidates import HOPE_AWAITED, HOPE_UNKNOWN
from gateway.schedule.core.dispatcher import MOST_COMPARED, MOST_DECLINES, Dispatcher, DispatchRules
from gateway.schedule.core.requests import (
    EXPLORING_REQUESTS,
    NodeSlots,
    PlacementState,
    QueuedRequest,
    TierSets,
    spread_reserve,
)
from gateway.schedule.core.selection import (
    CostColumns,
    row_cost,
    row_costs,
)
from gateway.schedule.core.wait_queue import MOST_ACCOUNTS, VirtualTokenCounters
from gateway.terms import Priority
from tests.each_case import each_case
from tests.schedule.build import a_request, a_scheduler, lease_at_once, node

_numbers = itertools.count(1)


@dataclass
class QueueSimulation:
    """Nodes and a dispatcher. Every request takes as long as predicted, unless a test says else."""

    slots: tuple[int, ...] = (2, 2)
    rules: DispatchRules = field(default_factory=DispatchRules)
    seed: int = 0
    speeds: tuple[float, ...] = ()
    """Prompt tokens/s; output tokens come at a tenth of it."""
    state: PlacementState = field(default_factory=PlacementState)
    running: list[QueuedRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        speeds = self.speeds or (100.0,) * len(self.slots)
        self.rows: list[NodeSlots] = []
        for i, (slots, speed) in enumerate(zip(self.slots, speeds, strict=True)):
            self.rows.append(self.state.add(f"node-{i}", total=slots))
            self.rows[i].set_speed(speed, 10.0 / speed, 0.0)
        self.candidates = self.state.candidate_set(self.rows)
        self.groups: tuple[TierSets, ...] = ((self.candidates,),)
        self.dispatcher = Dispatcher(self.state, self.rules, random.Random(self.seed))

    def request(self, **options: Any) -> QueuedRequest:
        """A request; by default of class normal, for all nodes."""
        values: dict[str, Any] = {
            "id": str(next(_numbers)),
            "groups": self.groups,
            "priority": Priority.NORMAL,
            "fairness_key": "somebody",
            "received_at": 0.0,
            "prompt_tokens": 100.0,
            "completion_tokens": 10.0,
        }
        return QueuedRequest(**values | options)

    def arrive(
        self, now: float = 0.0, **options: Any
    ) -> tuple[QueuedRequest, QueuedRequest | None]:
        """A request arrives: it is placed, or queued."""
        queued = self.request(**{"received_at": now} | options)
        placement = self.dispatcher.place_or_queue(queued, now)
        if placement is not None:
            self.running.append(placement)
        return queued, placement

    def placed(self, now: float = 0.0, **options: Any) -> QueuedRequest:
        """A request arrives that must be placed at once."""
        _, placement = self.arrive(now, **options)
        assert placement is not None
        return placement

    def fill(self, now: float = 0.0, **options: Any) -> list[QueuedRequest]:
        """Take every free slot."""
        placements = []
        while self.state.free_rows:
            placements.append(self.placed(now, **options))
        return placements

    def finish(self, placement: QueuedRequest, now: float) -> list[QueuedRequest]:
        """End a placement with the tokens that were expected, and give out what is free."""
        self.running.remove(placement)
        read = placement.prompt_tokens - placement.cached.get(placement.row.index, 0.0)
        self.dispatcher.finished(placement, now, read, placement.completion_tokens)
        return self.match(now)

    def match(self, now: float) -> list[QueuedRequest]:
        """Give free slots to waiting requests."""
        placements = self.dispatcher.match(now)
        self.running += placements
        return placements

    def waiting(self, now: float = 0.0) -> list[QueuedRequest]:
        """Every request that waits."""
        return [queued for queued, _ in self.dispatcher.predicted_waits(now)]


def test_a_slot_freed_while_nobody_waited_delays_no_arrival() -> None:
    sim = QueueSimulation((1, 1))
    other = ((sim.state.candidate_set([sim.state.add("other", total=1)]),),)
    sim.arrive(groups=other)
    for placement in sim.fill():
        placement.row.end(placement, 1.0)
    sim.arrive(1.0, groups=other)
    assert sim.arrive(1.0)[1] is not None


def test_of_one_caller_the_request_that_fits_the_free_node_goes() -> None:
    sim = QueueSimulation((1,))
    (running,) = sim.fill()
    sim.arrive(prompt_tokens=5000.0)
    warm, _ = sim.arrive(prompt_tokens=5000.0, cached={0: 4900.0})
    assert sim.finish(running, 1.0)[0] is warm


@pytest.mark.parametrize("paused", [False, True])
def test_a_later_model_name_counts_only_when_no_node_of_the_first_is_alive_or_takes_work(
    *, paused: bool
) -> None:
    sim = QueueSimulation((1, 1))
    first, second = (sim.state.candidate_set([row]) for row in sim.rows)
    groups = ((first,), (second,))
    placement = sim.placed(groups=groups)
    assert placement.group == 0
    waits, none = sim.arrive(groups=groups)
    assert none is None
    sim.rows[0].set_slots(1, 0, 0, alive=paused, paused=paused)
    (given,) = sim.match(1.0)
    assert (given, given.group, given.row) == (waits, 1, sim.rows[1])


def test_a_node_that_failed_it_is_avoided_while_another_is_alive() -> None:
    sim = QueueSimulation((1, 1))
    other = sim.rows[1]
    placement = sim.placed(failed={0})
    assert placement.row is other
    waits, none = sim.arrive(failed={0})
    assert none is None
    other.set_slots(1, 0, 0, alive=False)
    assert sim.match(1.0) == [waits]


def test_requests_without_a_node_hold_up_no_other() -> None:
    sim = QueueSimulation((1, 1))
    running = sim.fill()
    for _ in range(50):
        sim.arrive(excluded={0, 1})
    able, _ = sim.arrive()
    assert sim.finish(running[0], 1.0)[0] is able


def test_slotless_requests_are_limited_for_each_node_and_caller() -> None:
    sim = QueueSimulation((1, 1), DispatchRules(slotless_limit=3))
    owners = ["a"] * 9 + ["b"] * 9
    placed = [sim.arrive(slots=0, slotless_caller=owner, fairness_key=owner)[1] for owner in owners]
    assert [number for number, one in enumerate(placed) if one is not None] == [0, 1, 2, 3, 9, 10]
    assert [row.slotless_running for row in sim.rows] == [3, 3]
    assert sim.dispatcher.waiting == 12
    assert sim.dispatcher.depths()[Priority.NORMAL] == 12
    served = [one.slotless_caller for _ in range(8) for one in sim.finish(sim.running[0], 1.0)]
    assert min(Counter(served).values()) >= 3, "in turn"
    while sim.running:
        sim.finish(sim.running[0], 2.0)
    assert sim.dispatcher.waiting == 0
    assert [(row.slotless_running, row.slotless_by_caller) for row in sim.rows] == [(0, {})] * 2


def test_slotless_and_other_requests_do_not_wait_for_each_other() -> None:
    sim = QueueSimulation((1,), DispatchRules(slotless_limit=1))
    full, none = sim.fill()[0], sim.arrive(slots=0)[1]
    assert none is not None
    narrow, _ = sim.arrive()
    slotless, _ = sim.arrive(slots=0)
    wait = sim.dispatcher.predicted_wait(sim.request(), 0.0)
    for _ in range(50):
        sim.arrive(slots=0, priority=Priority.URGENT)
    assert sim.dispatcher.predicted_wait(sim.request(), 0.0) == wait
    assert sim.finish(full, 1.0) == [narrow]
    assert [one.slots for one in sim.finish(none, 1.0)] == [0]
    assert [sim.dispatcher.withdraw(slotless) for _ in range(2)] == [True, False]
    assert {wait for queued, wait in sim.dispatcher.predicted_waits(1.0) if not queued.slots} == {
        math.inf
    }


def test_a_node_reserved_for_a_wide_request_is_open_to_higher_classes() -> None:
    sim = QueueSimulation((2,))
    running = sim.fill()
    sim.arrive(1.0, slots=2)
    assert sim.finish(running[0], 2.0) == []
    assert sim.arrive(2.0)[1] is None
    assert sim.arrive(2.0, priority=Priority.URGENT)[1] is not None


def test_a_warm_request_is_deferred_if_it_ends_sooner_on_its_node() -> None:
    sim = QueueSimulation((1, 1))
    first = sim.placed(excluded={1}, prompt_tokens=100.0, completion_tokens=10.0)
    warm, none = sim.arrive(prompt_tokens=5000.0, cached={0: 4900.0})
    assert none is None
    assert warm.deferred_to is sim.rows[0]
    cold, placement = sim.arrive(prompt_tokens=100.0)
    assert placement is not None, "the free slot is for others meanwhile"
    assert placement.row is sim.rows[1]
    assert cold.deferred_to is None
    assert sim.finish(first, 2.0)[0] is warm


def test_a_deferral_ends_in_time() -> None:
    sim = QueueSimulation((1, 1))
    sim.arrive(excluded={1}, prompt_tokens=100.0, completion_tokens=10.0)
    warm, _ = sim.arrive(prompt_tokens=5000.0, cached={0: 4900.0})
    wake = sim.dispatcher.wake_at
    assert sim.match(wake - 0.01) == []
    (placement,) = sim.match(wake)
    assert (placement, placement.row) == (warm, sim.rows[1])


def test_a_slot_that_many_declined_is_given_out() -> None:
    sim = QueueSimulation((1, 20))
    last = next(one for one in sim.fill() if one.row is sim.rows[1])
    for _ in range(3 * MOST_DECLINES):
        sim.arrive(prompt_tokens=5000.0, cached={0: 4900.0}, completion_tokens=1.0)
    assert len(sim.finish(last, 0.5)) == 1


@pytest.mark.parametrize("waiting", [100, 400])
def test_comparisons_for_one_placement_are_bounded_however_many_wait(waiting: int) -> None:
    rng, sim = random.Random(0), QueueSimulation((2,) * 100)

    def arrive(now: float) -> None:
        """A caller's request, whose system prompt some nodes have cached, and one all of it."""
        cached = dict.fromkeys(rng.sample(range(100), 20), 1500.0)
        cached[rng.randrange(100)] = conversation = 1500.0 + rng.expovariate(1 / 800)
        tokens = {"prompt_tokens": conversation + 100, "completion_tokens": rng.uniform(1, 400)}
        sim.arrive(now, fairness_key=f"{rng.randrange(50)}", cached=cached, **tokens)

    for row in sim.rows:
        speed = 600.0 if row.index % 3 else 250.0
        row.set_speed(speed, 15 / speed, 0.1 / 40)
    sim.fill()
    while sim.dispatcher.waiting < waiting:
        arrive(0.0)
    before = sim.dispatcher._matcher.evaluations
    for _ in range(100):
        first = min(sim.running, key=lambda one: one.ends)
        sim.finish(first, first.ends)
        arrive(first.ends)
    assert sim.dispatcher.waiting >= waiting - 1
    evaluations = sim.dispatcher._matcher.evaluations - before
    assert 0 < evaluations <= 100 * (2 * MOST_COMPARED + MOST_DECLINES)


def test_many_answers_of_a_crowded_row_that_end_at_once_take_little_work() -> None:
    sim = QueueSimulation((1000,))
    [row] = sim.rows
    row.set_speed(5000.0, 0.03, 0.0001)
    running = sim.fill(prompt_tokens=10.0, completion_tokens=2000.0)
    last, moved = running[-1], 0
    for one in running:
        row.prefill_done(one, 10.0)
    for one in running[:900]:
        before = last.ends
        sim.finish(one, 12.0)
        moved += last.ends != before
    assert moved < 120, "the ends of all were moved now and then alone"
    assert row.ends_sum == pytest.approx(sum(one.ends for one in row.running))
    for one in running[900:]:
        sim.finish(one, 13.0)
    assert (row.ends_sum, row.prefill_until, row.decoding) == (0.0, 0.0, 0)


def test_a_waiting_requests_cache_is_looked_up_again_when_slots_have_come_free() -> None:
    sim = QueueSimulation((1, 1))
    first, second = sim.fill()
    queued, _ = sim.arrive(prompt_tokens=5000.0)
    other, _ = sim.arrive(prompt_tokens=4000.0)
    looked = []

    def refresh(one: object) -> None:
        looked.append(one)
        if one is queued:
            queued.cached = {second.row.index: 4990.0}

    sim.dispatcher.set_cache_refresh(refresh)
    assert sim.finish(second, 1.0)[0] is queued
    assert set(looked) == {queued, other}
    sim.finish(first, 2.0)


def test_a_cancelled_placement_costs_its_caller_nothing() -> None:
    sim = QueueSimulation((1,))
    placement = sim.placed()
    account = placement.payer
    assert account is not None
    assert account.counter > 0
    for _ in range(2):
        sim.dispatcher.cancelled(placement, 1.0)
    assert account.counter == 0
    assert (sim.rows[0].ours, account.running) == (0, 0)
    placement.row.prefill_done(placement, 2.0)
    assert (sim.rows[0].ends_sum, sim.rows[0].prefill_until) == (0.0, 0.0)


def test_positions_and_predicted_waits_follow_the_callers_turns() -> None:
    sim = QueueSimulation((1,))
    sim.fill()
    requests = [sim.arrive(fairness_key="greedy")[0] for _ in range(5)]
    modest, _ = sim.arrive(fairness_key="modest")
    urgent, _ = sim.arrive(priority=Priority.URGENT)
    places = list(sim.dispatcher.predicted_waits(0.0))
    order = [queued for queued, _ in places]
    assert order[0] is urgent
    assert order.index(modest) <= 2
    assert [queued for queued in order if queued.fairness_key == "greedy"] == requests
    assert [sim.dispatcher.count_ahead(queued) for queued in order] == list(range(7))
    waits = [sim.dispatcher.predicted_wait(queued, 0.0) for queued in order]
    assert waits == sorted(waits) == [wait for _, wait in places]


def test_the_predicted_wait_of_batch_includes_the_reserve() -> None:
    sim = QueueSimulation((4,), DispatchRules(batch_reserve=0.5))
    for row in sim.rows:
        row.set_speed(1000.0, 0.1, 0.0)
    for tokens in (100.0, 200.0, 300.0, 400.0):
        sim.arrive(prompt_tokens=1.0, completion_tokens=tokens, priority=Priority.URGENT)
    urgent = sim.dispatcher.predicted_wait(sim.request(priority=Priority.URGENT), 0.0)
    batch = sim.dispatcher.predicted_wait(sim.request(priority=Priority.BATCH), 0.0)
    assert urgent == pytest.approx(10.0, rel=0.05)
    assert batch == pytest.approx(30.0, rel=0.05)
    sim.dispatcher.set_rules(DispatchRules())
    batch = sim.dispatcher.predicted_wait(sim.request(priority=Priority.BATCH), 0.0)
    assert batch == pytest.approx(urgent)


def test_the_predicted_wait_is_infinite_while_every_node_is_down() -> None:
    sim = QueueSimulation((1,))
    sim.fill()
    queued, _ = sim.arrive()
    sim.rows[0].set_slots(1, 0, 0, alive=False)
    assert sim.dispatcher.predicted_wait(queued, 0.0) == math.inf


@pytest.mark.parametrize("flood", [Priority.URGENT, Priority.NORMAL])
def test_the_lowest_class_waits_no_longer_than_the_bound(flood: Priority) -> None:
    patience = dict.fromkeys(Priority, 30.0)
    sim = QueueSimulation((2, 2), DispatchRules(overdue_after=patience))
    service, rate, horizon = 2.0, 4 / 2.0, 400.0
    others = [
        sim.request(priority=flood, fairness_key=f"{i % 7}", received_at=i / (1.5 * rate))
        for i in range(int(1.5 * rate * horizon))
    ]
    batch = [
        sim.request(priority=Priority.BATCH, fairness_key="patient", received_at=float(i))
        for i in range(5)
    ]
    for queued in sorted([*others, *batch], key=lambda one: one.received_at):
        while sim.running:
            first = min(sim.running, key=lambda one: one.ends)
            if first.ends > queued.received_at:
                break
            sim.finish(first, first.ends)
        if sim.dispatcher.place_or_queue(queued, queued.received_at) is not None:
            sim.running.append(queued)
    for place, queued in enumerate(batch):
        # Those above are overdue as well after 30 s, and older ones go first.
        ahead = place + sum(
            other.arrival_key < queued.arrival_key and other.placed_at > queued.received_at + 30
            for other in others
        )
        assert queued.account is None, "it waits no longer"
        wait = queued.placed_at - queued.received_at
        assert 0 <= wait <= 30.0 + (ahead + 1) / (0.1 * rate) + service
    assert max(one.placed_at - one.received_at for one in batch) > 10.0, "all slots were taken"


def test_callers_of_one_class_share_fairly_however_long_one_of_them_has_waited() -> None:
    sim = QueueSimulation((1,), DispatchRules(overdue_after=dict.fromkeys(Priority, 30.0)))
    (running,) = sim.fill()
    for _ in range(200):
        sim.arrive(fairness_key="much", completion_tokens=20.0)
    for _ in range(40):
        sim.arrive(fairness_key="little", completion_tokens=20.0)
    callers = []
    for i in range(60):
        (running,) = sim.finish(running, 100.0 + i)
        callers.append(running.fairness_key)
    assert abs(callers.count("much") - callers.count("little")) <= 4


def test_requests_go_by_class_and_then_by_age() -> None:
    sim = QueueSimulation((1,))
    (running,) = sim.fill()
    late = sim.arrive(2.0)[0]
    early = sim.arrive(2.0, received_at=1.0)[0]
    urgent = sim.arrive(3.0, priority=Priority.URGENT)[0]
    assert sim.dispatcher.depths() == {
        Priority.URGENT: 1, Priority.PREMIUM: 0, Priority.NORMAL: 2, Priority.BATCH: 0,
    }  # fmt: skip
    assert sim.waiting() == [urgent, early, late]
    order = []
    for now in (4.0, 5.0, 6.0):
        (running,) = sim.finish(running, now)
        order.append(running)
    assert order == [urgent, early, late]


def test_the_charge_is_replaced_by_the_real_usage() -> None:
    sim = QueueSimulation((1,))
    lucky = sim.placed(fairness_key="lucky", prompt_tokens=1e6, completion_tokens=1e5)
    sim.arrive(fairness_key="lucky")
    other, _ = sim.arrive(fairness_key="other")
    sim.running.remove(lucky)
    sim.dispatcher.finished(lucky, 1.0, 10, 1)
    first = sim.match(1.0)[0]
    assert first.fairness_key == "lucky"
    sim.dispatcher.cancelled(first, 1.0)
    assert sim.match(1.0)[0] is other


def test_a_caller_that_was_idle_has_no_credit_and_one_that_was_served_more_keeps_its_counter() -> (
    None
):
    counters = VirtualTokenCounters()
    busy = counters.account("busy")
    busy.counter = 1000.0
    counters.started(busy, 50.0)
    assert counters.account("new").counter == 1000.0
    counters.account("new").counter = 5000.0
    assert counters.account("new").counter == 5000.0


def test_idle_accounts_are_dropped_but_no_running_ones() -> None:
    counters = VirtualTokenCounters()
    kept = counters.account("kept")
    counters.started(kept, 5.0)
    for i in range(3 * MOST_ACCOUNTS):
        counters.account(f"caller {i}")
    assert len(counters.accounts) <= MOST_ACCOUNTS
    assert counters.accounts["kept"] is kept


# The reserve of class `batch` is whole nodes, and `batch` keeps off them.


BATCH = Priority.BATCH


def batch_on(sim: QueueSimulation, **options: Any) -> list[str]:
    """The nodes of as many batch requests as find room."""
    found = []
    while (placement := sim.arrive(priority=BATCH, **options)[1]) is not None:
        found.append(placement.row.name)
    return sorted(found)


@each_case(
    ("share", "totals", "reserve"),
    [
        (0.25, [2] * 8, [2, 2, 0, 0, 0, 0, 0, 0]), (0.25, [4, 4, 4, 4, 4], [4, 1, 0, 0, 0]),
        (0.25, [4, 4], [1, 1]), (0.5, [4], [2]), (0.5, [8, 2, 2], [2, 2, 2]),
        (0.25, [1, 1, 1, 1], [1, 0, 0, 0]), (0.29, [1] * 100, [1] * 29 + [0] * 71),
        (1.0, [4, 4], [4, 3]), (1.0, [1], [0]), (0.5, [0, 4], [0, 2]), (0.0, [4], [0]),
        (0.5, [], []),
    ],
)  # fmt: skip
def test_the_reserve_is_whole_nodes_where_they_fit(
    share: float, totals: list[int], reserve: list[int]
) -> None:
    assert spread_reserve(share, totals) == reserve


@pytest.mark.parametrize("nodes", [4, 80])
def test_others_go_to_the_reserved_nodes_as_nobody_holds_them_up_there(nodes: int) -> None:
    sim = QueueSimulation((3,) * nodes, DispatchRules(batch_reserve=0.5))
    for _ in range(nodes):
        sim.arrive(priority=BATCH)
    for number in range(nodes // 2):
        placement = sim.placed()
        assert placement.row.kept_from_batch
        assert len(placement.row.running) == 1, number


def test_a_request_that_can_go_nowhere_else_takes_an_idle_reserved_node() -> None:
    sim = QueueSimulation((2, 2), DispatchRules(batch_reserve=0.5))
    assert [row.kept_from_batch for row in sim.rows] == [True, False]
    placement = sim.placed(priority=BATCH, excluded={1})
    assert placement.row is sim.rows[0]
    waits, none = sim.arrive(priority=BATCH, excluded={1})
    assert none is None
    assert sim.finish(placement, 1.0) == [waits]


def test_a_wide_request_takes_a_reserved_node_only_where_no_other_is_wide_enough() -> None:
    wide = QueueSimulation((4, 2, 2, 2), DispatchRules(batch_reserve=0.4))
    assert [row.batch_reserve for row in wide.rows] == [4, 0, 0, 0]
    assert batch_on(wide, slots=3) == ["node-0"]
    narrow = QueueSimulation((4, 4, 4), DispatchRules(batch_reserve=0.4))
    assert batch_on(narrow, slots=3) == ["node-1", "node-2"]


async def test_each_pool_has_a_reserve_of_its_own() -> None:
    rules = {"batch": {"reserve_slots": 0.5}}
    sides = {"a": "left", "b": "left", "c": "right", "d": "right"}
    nodes = [node(name, labels={"side": side}) for name, side in sides.items()]
    scheduler = a_scheduler(*nodes, classes=rules)
    for side, name in (("left", "b"), ("right", "d")):
        labels = (("side", side),)
        request = a_request(priority=BATCH, node_labels=labels)
        lease = lease_at_once(scheduler, request)
        assert lease.node.name == name
        assert scheduler.batch_room(("demo",), 0.0, node_labels=labels).slots == 2


WARM = {"prompt_tokens": 1600.0, "completion_tokens": 40.0}
"""A chat whose system prompt of 1,500 tokens is cached on the first node."""


def unknown(sim: QueueSimulation, *, samples: int = 0, hope: float = HOPE_UNKNOWN) -> None:
    """Let nothing but this be known of every node but the first."""
    for row in sim.rows[1:]:
        row.set_learnt(samples, hope, measured=False)


def explored(sim: QueueSimulation, times: int = 20, **keys: Any) -> Counter[str]:
    """How often the other nodes get one of so many requests that come one by one."""
    names: Counter[str] = Counter()
    for _ in range(times):
        placement = sim.placed(cached={0: 1500.0}, **{**WARM, **keys})
        names[placement.row.name] += 1
        sim.finish(placement, 0.0)
    del names["node-0"]
    return names


def test_nodes_of_unknown_speed_get_a_few_requests_though_the_prompt_is_cached_elsewhere() -> None:
    sim = QueueSimulation((2,) * 4)
    assert not explored(sim)
    unknown(sim)
    assert explored(sim) == {f"node-{i}": EXPLORING_REQUESTS for i in (1, 2, 3)}
    assert not sim.state.exploring
    # Another server, of unknown speed.
    sim.rows[1].set_learnt(EXPLORING_REQUESTS, 1.0, measured=True)
    sim.rows[1].set_learnt(0, HOPE_UNKNOWN, measured=False)
    assert explored(sim) == {"node-1": EXPLORING_REQUESTS}


@each_case(
    ("keys", "hope", "foreign", "count"),
    [
        # Requests that would suffer explore less, and the dearest never.
        ({"priority": Priority.PREMIUM}, HOPE_UNKNOWN, 0, EXPLORING_REQUESTS - 1),
        ({"priority": Priority.URGENT}, HOPE_UNKNOWN, 0, EXPLORING_REQUESTS - 1),
        ({"deadline": 60.0}, HOPE_UNKNOWN, 0, EXPLORING_REQUESTS - 1),
        ({"prompt_tokens": 3000.0}, HOPE_UNKNOWN, 0, EXPLORING_REQUESTS - 1),
        ({"priority": Priority.PREMIUM, "prompt_tokens": 4000.0}, HOPE_UNKNOWN, 0, 0),
        ({"prompt_tokens": 9000.0}, HOPE_UNKNOWN, 0, 0),
        # Nor does one that a node has failed; nor to nodes in use, or about to be calibrated.
        ({"failed": [2]}, HOPE_UNKNOWN, 0, 0),
        ({}, HOPE_UNKNOWN, 1, 0),
        ({}, HOPE_AWAITED, 0, 0),
    ],
)
def test_how_many_requests_explore_a_node_of_unknown_speed(
    keys: dict[str, Any], hope: float, foreign: int, count: int
) -> None:
    sim = QueueSimulation((2, 2, 0))
    unknown(sim, hope=hope)
    sim.rows[1].set_slots(2, 2, foreign)
    assert explored(sim, **keys).total() == count


def test_the_figures_of_a_row_are_made_anew_after_each_change() -> None:
    sim = QueueSimulation((4,))
    [row] = sim.rows
    row.set_pool(8000, 0)
    placement = sim.placed()

    def figures() -> tuple[object, ...]:
        found = row.figures or row.take_figures()
        return found.total, found.pool, *astuple(found.speed), *astuple(found.work)

    for change in (
        lambda: row.set_slots(5, 5, 0),
        lambda: row.set_slots(4, 4, 1),
        lambda: row.set_speed(200.0, 0.2, 0.02),
        lambda: row.set_learnt(1, 1.0, measured=not row.measured),
        lambda: row.set_penalty(5.0),
        lambda: row.set_penalty(0.0, wake=5.0),
        lambda: row.set_pool(9000, 0),
        lambda: row.set_pool(8000, 70),
        sim.placed,
        lambda: row.prefill_done(placement, 0.5),
        lambda: sim.finish(placement, 0.5),
    ):
        before = figures()
        change()
        assert figures() != before


@each_case(
    ("completion", "cached", "cost"),
    [(30, {}, 2.0 + 3.0), (10, {0: 150.0}, 0.5 + 1.0), (10, {0: 200.0}, 0.01 + 1.0)],
)
def test_on_an_idle_node_the_cost_is_decoding_and_what_of_the_prompt_is_not_cached(
    completion: int, cached: dict[int, float], cost: float
) -> None:
    """Of a prompt that is cached as a whole one token is read."""
    sim = QueueSimulation((2,))
    sim.rows[0].set_speed(100.0, 0.1, 0.05)
    queued = sim.request(prompt_tokens=200, completion_tokens=completion, cached=cached)
    assert row_cost(sim.rows[0], queued, 0.0) == pytest.approx(cost)


def test_a_neighbour_adds_its_own_delay_and_the_one_it_causes() -> None:
    sim = QueueSimulation((2,))
    row = sim.rows[0]
    row.set_speed(100.0, 0.1, 0.05)
    first = sim.placed(prompt_tokens=100, completion_tokens=40)
    assert (first.prefill_ends, first.ends) == pytest.approx((1.0, 5.0))
    queued = sim.request(prompt_tokens=200, completion_tokens=10)
    delay, prefill, decoding = 1.0, 2.0, 10 * 0.15
    stall, slowdown = 2.0, 5.0 * 0.05 / 0.1
    assert row_cost(row, queued, 0.0) == pytest.approx(
        delay + prefill + decoding + stall + slowdown
    )


@each_case("seed", range(5))
def test_numpy_and_the_loop_choose_rows_of_the_same_cost(seed: int) -> None:
    rng = random.Random(seed)
    sim = QueueSimulation((2,) * 90)
    for row in sim.rows:
        speed = rng.uniform(50, 900)
        row.set_speed(speed, 10 / speed, rng.choice([0.0, 1 / speed]))
        row.set_penalty(rng.choice([0.0, 0.0, rng.random()]))
    columns = CostColumns(sim.state)
    for i in range(120):
        now = 0.1 * i
        cached = {rng.randrange(90): rng.uniform(0, 900) for _ in range(rng.choice([0, 3, 40]))}
        queued = sim.request(prompt_tokens=rng.uniform(10, 900), cached=cached, penalties={5: 1.0})
        room = [row for row in sim.candidates.rows if row.free >= 1]
        chosen = columns.least_finish(sim.candidates, queued, now, rng)
        assert row_cost(chosen, queued, now) == pytest.approx(min(row_costs(room, queued, now)))
        placement = sim.dispatcher.place(queued, now)
        if placement is not None:
            sim.running.append(placement)
        if rng.random() < 0.4 and sim.running:
            sim.finish(rng.choice(sim.running), now)
