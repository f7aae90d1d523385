"""What the rows of nodes say, and the slots of them that class `batch` leaves free."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gateway.schedule.core import requests
from gateway.schedule.core.dispatcher import DispatchRules
from gateway.schedule.core.requests import (
    DEFAULT_COMPLETION_TOKENS,
    MOST_PENALTY_SECONDS,
    MOST_TOKENS_PER_REQUEST,
    spread_reserve,
)
from gateway.terms import Priority
from tests.each_case import each_case
from tests.schedule.build import a_request, a_scheduler, lease_at_once, node
from tests.schedule.queue_simulation import QueueSimulation


def test_a_burst_on_a_crowded_row_moves_the_ends_of_all_only_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else 1,000 answers that end in one turn of the event loop would look at 1,000 each."""
    ends, moves = [], []
    for crowd in (requests.CROWD, 10_000):
        monkeypatch.setattr(requests, "CROWD", crowd)
        sim = QueueSimulation((1000,))
        [row] = sim.rows
        row.set_speed(5000.0, 0.03, 0.0001)
        running = sim.fill(prompt_tokens=10.0, completion_tokens=2000.0)
        last, moved = running[-1], 0
        for one in running:
            one.row.prefill_done(one, 10.0)
        for one in running[:900]:
            before = last.ends
            sim.finish(one, 12.0)
            moved += last.ends != before
        ends.append(sum(one.ends for one in row.running) / 100 - 12.0)
        moves.append(moved)
        assert row.ends_sum == pytest.approx(sum(one.ends for one in row.running))
        assert row.prefill_until == 10.0
        for one in running[900:]:
            sim.finish(one, 13.0)
        assert (row.ends_sum, row.prefill_until, row.decoding) == (0.0, 0.0, 0)
    assert ends[0] == pytest.approx(ends[1], rel=0.03)
    assert moves[1] == 900
    assert moves[0] < 120


@each_case("nonsense", [math.nan, math.inf, -math.inf, 0.0, -5.0, 1e300])
def test_absurd_speeds_and_slots_are_clamped(nonsense: float) -> None:
    sim = QueueSimulation((2, 2))
    row = sim.rows[0]
    row.set_speed(nonsense, nonsense, nonsense)
    row.set_penalty(nonsense)
    row.set_slots(nonsense, nonsense, nonsense)
    sim.state.set_limits(nonsense, 1)
    sim.arrive()
    assert abs(row.penalty) <= MOST_PENALTY_SECONDS
    for value in (row.prefill_tps, row.token_base, row.per_prompt_token, row.per_output_token):
        assert math.isfinite(value)
        assert value >= 0.0


@each_case(
    ("size", "given", "kept"),
    [
        ("completion_tokens", 1e18, MOST_TOKENS_PER_REQUEST),
        ("completion_tokens", math.inf, MOST_TOKENS_PER_REQUEST),
        ("completion_tokens", -3.0, 1.0),
        ("completion_tokens", math.nan, DEFAULT_COMPLETION_TOKENS),
        ("prompt_tokens", math.inf, MOST_TOKENS_PER_REQUEST),
        ("prompt_tokens", -1.0, 0.0),
        ("prompt_tokens", math.nan, 0.0),
    ],
)
def test_absurd_numbers_of_tokens_are_clamped(size: str, given: float, kept: float) -> None:
    assert getattr(QueueSimulation().request(**{size: given}), size) == kept


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
