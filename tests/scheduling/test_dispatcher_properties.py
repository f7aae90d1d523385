"""Under any order of events the counts are right and no slot idles without a reason."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.request import Priority
from gateway.scheduling.dispatcher import DispatchRules
from gateway.scheduling.placement_state import Placement, QueuedRequest
from gateway.scheduling.selection import POLICIES
from tests.scheduling.queue_simulation import QueueSimulation

NODES = 4
indexes = st.integers(0, NODES - 1)
absurd = st.one_of(
    st.floats(0, 4000), st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e18])
)
requests = st.fixed_dictionaries(
    {
        "what": st.just("arrive"),
        "priority": st.sampled_from(Priority),
        "fairness_key": st.sampled_from("abc"),
        "slots": st.sampled_from([0, 1, 1, 1, 2, 3]),
        "prompt_tokens": absurd,
        "completion_tokens": absurd,
        "cached": st.dictionaries(indexes, st.floats(0, 5000), max_size=3),
        "pending": st.dictionaries(indexes, st.floats(0, 5000), max_size=2),
        "excluded": st.frozensets(indexes, max_size=2),
        "failed": st.frozensets(indexes, max_size=2),
        "pool_tokens": st.sampled_from([0.0, 200.0, 700.0, 3000.0, math.inf]),
    }
)
events = st.one_of(
    requests,
    requests,
    st.fixed_dictionaries({"what": st.just("finish"), "which": st.integers(0, 50)}),
    st.fixed_dictionaries({"what": st.just("finish"), "which": st.integers(0, 50)}),
    st.fixed_dictionaries({"what": st.just("withdraw"), "which": st.integers(0, 50)}),
    st.fixed_dictionaries({"what": st.just("cancel"), "which": st.integers(0, 50)}),
    st.fixed_dictionaries(
        {
            "what": st.just("slots"),
            "which": indexes,
            "capacity": st.integers(0, 3),
            "foreign": st.integers(0, 2),
        }
    ),
    st.fixed_dictionaries(
        {
            "what": st.just("pool"),
            "which": indexes,
            "tokens": st.sampled_from([0, 1000, 4000]),
            "foreign": st.sampled_from([0, 0, 500]),
        }
    ),
    st.fixed_dictionaries(
        {"what": st.just("speed"), "which": indexes, "values": st.tuples(absurd, absurd, absurd)}
    ),
)
plays = st.lists(st.tuples(st.floats(0, 20), events), max_size=60)


def play(played: list[tuple[float, dict[str, Any]]], rules: DispatchRules) -> list[tuple[str, str]]:
    """Play the events, with a check after each; returns which request was placed on which row."""
    sim = QueueSimulation((3, 2, 2, 1), rules, speeds=(600.0, 250.0, 250.0, 100.0))
    withdrawn: set[QueuedRequest] = set()
    arrived: list[QueuedRequest] = []
    order: list[tuple[str, str]] = []
    now = 0.0

    def note(placements: list[Placement]) -> None:
        for one in placements:
            assert one.queued not in withdrawn
            assert one.row.index not in one.queued.excluded
            order.append((str(arrived.index(one.queued)), one.row.name))

    for gap, event in played:
        now += gap
        match event["what"]:
            case "arrive":
                options = {key: value for key, value in event.items() if key != "what"}
                queued = sim.request(received_at=now, **options)
                arrived.append(queued)
                placement = sim.dispatcher.place_or_queue(queued, now)
                if placement is not None:
                    sim.running.append(placement)
                    note([placement])
            case "finish" if sim.running:
                note(sim.finish(sim.running[event["which"] % len(sim.running)], now))
            case "cancel" if sim.running:
                placement = sim.running.pop(event["which"] % len(sim.running))
                sim.dispatcher.cancelled(placement, now)
                note(sim.match(now))
            case "withdraw" if arrived:
                queued = arrived[event["which"] % len(arrived)]
                if sim.dispatcher.withdraw(queued):
                    withdrawn.add(queued)
                note(sim.match(now))
            case "slots":
                row = sim.rows[event["which"]]
                before = row.ours
                sim.state.set_slots(row, 3, event["capacity"], event["foreign"])
                assert row.ours == before
                note(sim.match(now))
            case "pool":
                row = sim.rows[event["which"]]
                sim.state.set_pool(row, event["tokens"], event["foreign"])
                note(sim.match(now))
            case "speed":
                sim.state.set_speed(sim.rows[event["which"]], *event["values"])
        check(sim, now)
    return order


def check(sim: QueueSimulation, now: float) -> None:
    dispatcher = sim.dispatcher
    for row in sim.rows:
        running = [one for one in sim.running if one.row is row]
        assert row.running == running
        assert row.ours == sum(one.queued.slots for one in running)
        assert row.free == max(0, row.capacity - row.ours - row.foreign)
        assert (row.index in sim.state.free_rows) == (row.free > 0)
        assert math.isfinite(row.ends_sum)
        shares = [min(one.queued.tokens_needed, row.pool) for one in running if one.queued.slots]
        assert row.pool_reserved == pytest.approx(sum(shares) if row.pool else 0.0)
        assert row.reserved_for is None or row.reserved_for.account is not None
    assert sim.state.pools == sum(row.pool > 0 for row in sim.rows)
    waiting = sim.waiting(now)
    assert len(waiting) == dispatcher.waiting == sum(dispatcher.depths().values())
    assert not {one.queued for one in sim.running} & set(waiting)
    assert len(set(waiting)) == len(waiting)
    assert all(queued.account is not None for queued in waiting)
    assert [dispatcher.count_ahead(queued) for queued in waiting] == list(range(len(waiting)))
    assert all(wait >= 0 for _, wait in dispatcher.predicted_waits(now))
    for queued in waiting:
        assert dispatcher.predicted_wait(queued, now) >= 0
        if queued.deferred_to is None and queued.slots == 1:
            for row in sim.rows:
                barred = (
                    row.index in queued.excluded
                    or row.index in queued.failed
                    or row.reserved_for is not None
                    or row.tokens_short(queued.tokens_needed) > 0.0
                )
                spare = row.batch_reserve if queued.priority is Priority.BATCH else 0
                assert barred or row.free <= spare, "a slot idles"
        if queued.deferred_to is not None:
            assert queued in queued.deferred_to.deferred
            wake = dispatcher.wake_at()
            assert wake is not None
            assert wake <= queued.deferred_until


@settings(max_examples=300, deadline=None)
@given(plays, st.sampled_from(sorted(POLICIES)), st.sampled_from([0.0, 0.5]))
def test_counts_are_right_and_no_slot_idles_without_a_reason(
    happened: list[tuple[float, dict[str, Any]]], policy: str, reserve: float
) -> None:
    play(happened, DispatchRules(policy=policy, batch_reserve=reserve))


@settings(max_examples=50, deadline=None)
@given(plays)
def test_the_same_seed_places_alike(happened: list[tuple[float, dict[str, Any]]]) -> None:
    assert play(happened, DispatchRules()) == play(happened, DispatchRules())


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.2, 5.0))
def test_every_arrival_is_served_in_the_end(seed: int, lengths: float) -> None:
    rng = random.Random(seed)
    sim = QueueSimulation((2, 2, 1), seed=seed, speeds=(600.0, 250.0, 100.0))
    arrivals = []
    for _ in range(80):
        at = rng.uniform(0, 100)
        queued = sim.request(
            received_at=at,
            priority=rng.choice(list(Priority)),
            fairness_key=rng.choice("abcdef"),
            slots=rng.choice([1, 1, 1, 2]),
            prompt_tokens=rng.expovariate(1 / 1500),
            completion_tokens=rng.expovariate(1 / 100),
            cached={rng.randrange(3): rng.uniform(0, 2000)},
            pending={rng.randrange(3): rng.uniform(0, 2000)},
        )
        arrivals.append((at, queued))
    assert len(sim.play(arrivals, lengths=lengths)) == len(arrivals)
    assert not sim.running
    assert all(row.ours == 0 for row in sim.rows)
