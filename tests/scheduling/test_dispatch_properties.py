"""Whatever happens, in whatever order: the counts are right and no slot idles without a reason."""

from __future__ import annotations

import math
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.request import Priority
from gateway.scheduling.ask import Ask
from gateway.scheduling.dispatch import Placement
from gateway.scheduling.matching import LineRules
from gateway.scheduling.policies import POLICIES
from tests.scheduling.rows import Desk

NODES = 4
indexes = st.integers(0, NODES - 1)
absurd = st.one_of(
    st.floats(0, 4000), st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e18])
)
asks = st.fixed_dictionaries(
    {
        "what": st.just("arrive"),
        "priority": st.sampled_from(Priority),
        "caller": st.sampled_from("abc"),
        "slots": st.sampled_from([0, 1, 1, 1, 2, 3]),
        "prompt": absurd,
        "completion": absurd,
        "cached": st.dictionaries(indexes, st.floats(0, 5000), max_size=3),
        "coming": st.dictionaries(indexes, st.floats(0, 5000), max_size=2),
        "closed": st.frozensets(indexes, max_size=2),
        "failed": st.frozensets(indexes, max_size=2),
    }
)
events = st.one_of(
    asks,
    asks,
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
            "what": st.just("speed"),
            "which": indexes,
            "values": st.tuples(absurd, absurd, absurd),
        }
    ),
)
plays = st.lists(st.tuples(st.floats(0, 20), events), max_size=60)


def play(happened: list[tuple[float, dict[str, Any]]], rules: LineRules) -> list[tuple[str, str]]:
    """Plays the events, looking at everything after each of them; who was placed where."""
    desk = Desk((3, 2, 2, 1), rules, speeds=(600.0, 250.0, 250.0, 100.0))
    withdrawn: set[Ask] = set()
    arrived: list[Ask] = []
    order: list[tuple[str, str]] = []
    now = 0.0

    def note(placements: list[Placement]) -> None:
        for one in placements:
            assert one.ask not in withdrawn
            assert one.row.index not in one.ask.closed
            order.append((str(arrived.index(one.ask)), one.row.name))

    for gap, event in happened:
        now += gap
        match event["what"]:
            case "arrive":
                options = {key: value for key, value in event.items() if key != "what"}
                ask = desk.ask(entered=now, **options)
                arrived.append(ask)
                placement = desk.dispatcher.arrive(ask, now)
                if placement is not None:
                    desk.running.append(placement)
                    note([placement])
            case "finish" if desk.running:
                note(desk.finish(desk.running[event["which"] % len(desk.running)], now))
            case "cancel" if desk.running:
                placement = desk.running.pop(event["which"] % len(desk.running))
                desk.dispatcher.cancelled(placement, now)
                note(desk.match(now))
            case "withdraw" if arrived:
                ask = arrived[event["which"] % len(arrived)]
                if desk.dispatcher.withdraw(ask):
                    withdrawn.add(ask)
                note(desk.match(now))
            case "slots":
                row = desk.rows[event["which"]]
                before = row.ours
                desk.board.set_slots(row, 3, event["capacity"], event["foreign"])
                assert row.ours == before
                note(desk.match(now))
            case "speed":
                desk.board.set_speed(desk.rows[event["which"]], *event["values"])
        check(desk, now)
    return order


def check(desk: Desk, now: float) -> None:
    dispatcher = desk.dispatcher
    for row in desk.rows:
        running = [one for one in desk.running if one.row is row]
        assert row.running == running
        assert row.ours == sum(one.ask.slots for one in running)
        assert row.free == max(0, row.capacity - row.ours - row.foreign)
        assert (row.index in desk.board.open) == (row.free > 0)
        assert math.isfinite(row.ends)
        assert row.kept is None or row.kept.account is not None
    waiting = dispatcher.asks()
    assert len(waiting) == dispatcher.waiting == sum(dispatcher.depths().values())
    assert not {one.ask for one in desk.running} & set(waiting)
    places = [ask for ask, _ in dispatcher.places(now)]
    assert sorted(map(id, places)) == sorted(map(id, waiting))
    assert [dispatcher.ahead(ask) for ask in places] == list(range(len(places)))
    for ask in waiting:
        assert dispatcher.expected_start(ask, now) >= now
        if ask.held is None and ask.slots == 1:
            for row in desk.rows:
                barred = row.index in ask.closed or row.index in ask.failed or row.kept is not None
                spare = row.spare if ask.priority is Priority.BATCH else 0
                assert barred or row.free <= spare, "a slot idles"
        if ask.held is not None:
            assert ask in ask.held.held
            wake = dispatcher.wake_at(now)
            assert wake is not None
            assert wake <= ask.held_until


@settings(max_examples=300, deadline=None)
@given(plays, st.sampled_from(sorted(POLICIES)), st.sampled_from([0.0, 0.5]))
def test_counts_are_right_and_no_slot_idles_without_a_reason(
    happened: list[tuple[float, dict[str, Any]]], policy: str, reserve: float
) -> None:
    play(happened, LineRules(policy=policy, reserve=reserve))


@settings(max_examples=50, deadline=None)
@given(plays)
def test_the_same_seed_places_alike(happened: list[tuple[float, dict[str, Any]]]) -> None:
    assert play(happened, LineRules()) == play(happened, LineRules())


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.2, 5.0))
def test_everything_that_came_is_served_in_the_end(seed: int, lengths: float) -> None:
    rng = random.Random(seed)
    desk = Desk((2, 2, 1), seed=seed, speeds=(600.0, 250.0, 100.0))
    arrivals = []
    for _ in range(80):
        at = rng.uniform(0, 100)
        ask = desk.ask(
            entered=at,
            priority=rng.choice(list(Priority)),
            caller=rng.choice("abcdef"),
            slots=rng.choice([1, 1, 1, 2]),
            prompt=rng.expovariate(1 / 1500),
            completion=rng.expovariate(1 / 100),
            cached={rng.randrange(3): rng.uniform(0, 2000)},
            coming={rng.randrange(3): rng.uniform(0, 2000)},
        )
        arrivals.append((at, ask))
    assert len(desk.play(arrivals, lengths=lengths)) == len(arrivals)
    assert not desk.running
    assert all(row.ours == 0 for row in desk.rows)
