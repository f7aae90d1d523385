"""Which stored rows are offered, how many and when: the policy in numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import count

import pytest

from gateway.lease import BatchRoom
from gateway.stored.claims import Pick, RequestKind, StoredRow
from gateway.stored.feeding import (
    BatchWork,
    Lane,
    Pace,
    PrefixGroup,
    in_danger,
    late_places,
    rows_to_offer,
)

IDS = count()


def a_row(batch: str = "b1", prefix: int = 0, tokens: int = 100, owner: str = "k1") -> StoredRow:
    return StoredRow(
        RequestKind.LINE, owner, "/v1/chat/completions", id=f"row_{next(IDS):06}", place="file-1",
        offset=0, length=10, created_at=0.0, keep_until=1e9, folder="f", batch=batch,
        prefix=prefix, max_tokens=tokens,
    )  # fmt: skip


def a_lane(*rows: StoredRow, nodes: int = 1) -> Lane:
    lane = Lane(nodes)
    for row in rows:
        lane.add(row)
    return lane


def offered(lane: Lane, number: int, **options: Iterable[str]) -> list[StoredRow]:
    found = [lane.next(**options) for _ in range(number)]  # type: ignore[arg-type]
    return [row for row in found if row is not None]


# How many.


@pytest.mark.parametrize(
    ("room", "arriving", "rows"),
    [
        (BatchRoom(slots=8, free=8, soon=0, waiting=0, ahead=0), 0, 8),
        (BatchRoom(slots=8, free=8, soon=0, waiting=0, ahead=0), 3, 5),
        (BatchRoom(slots=8, free=0, soon=2, waiting=0, ahead=0), 0, 2),
        (BatchRoom(slots=8, free=1, soon=2, waiting=3, ahead=0), 0, 0),
        (BatchRoom(slots=8, free=0, soon=0, waiting=2, ahead=0), 0, -2),
        (BatchRoom(slots=8, free=0, soon=2, waiting=0, ahead=2), 0, 0),
        (BatchRoom(slots=4, free=4, soon=4, waiting=0, ahead=0), 0, 4),
        (BatchRoom(slots=0, free=0, soon=0, waiting=0, ahead=0), 0, 0),
    ],
)
def test_as_many_rows_are_offered_as_fill_the_slots(
    room: BatchRoom, arriving: int, rows: int
) -> None:
    assert rows_to_offer(room, arriving) == rows


# Which.


def test_long_rows_go_before_short_ones() -> None:
    lane = a_lane(*(a_row(tokens=tokens) for tokens in (5, 500, 50, 0)))
    assert [row.max_tokens for row in offered(lane, 5)] == [0, 500, 50, 5]
    assert (lane.ready, lane.running) == (0, 4)


def test_slots_are_shared_evenly_between_owners_whatever_their_batches() -> None:
    rows = [a_row(f"b{number}", owner="k1") for number in range(3) for _ in range(20)]
    rows += [a_row("c", owner="k2") for _ in range(20)]
    first = offered(a_lane(*rows), 12)
    assert Counter(row.owner for row in first) == {"k1": 6, "k2": 6}
    assert Counter(row.batch for row in first) == {"b0": 2, "b1": 2, "b2": 2, "c": 6}


def test_an_owner_alone_gets_all_slots_and_gives_up_half_when_another_comes() -> None:
    lane = a_lane(*(a_row("b", owner="k1") for _ in range(40)))
    running = offered(lane, 8)
    for _ in range(40):
        lane.add(a_row("c", owner="k2"))
    for _ in range(8):
        lane.ended(running.pop(0))
        running += offered(lane, 1)
    assert Counter(row.owner for row in running) == {"k1": 4, "k2": 4}


def test_batches_in_danger_go_first_yet_starve_nobody() -> None:
    rows = [a_row("b", owner="k1") for _ in range(20)] + [a_row("c", owner="k2") for _ in range(20)]
    first = offered(a_lane(*rows), 12, urgent=["c"])
    assert Counter(row.batch for row in first) == {"c": 9, "b": 3}


def test_as_many_groups_are_under_way_as_there_are_nodes() -> None:
    rows = [a_row(prefix=prefix, tokens=100 + prefix) for prefix in (1, 2, 3) for _ in range(10)]
    lane = a_lane(*rows, nodes=2)
    first = offered(lane, 8)
    assert Counter(row.prefix for row in first) == {3: 4, 2: 4}


def test_a_slot_goes_on_with_the_group_that_it_has_served() -> None:
    rows = [a_row(prefix=prefix) for prefix in (1, 2) for _ in range(10)]
    lane = a_lane(*rows, nodes=2)
    running = offered(lane, 8)
    for index in (0, 1, 5, 2, 7):
        row = running[index]
        lane.ended(row)
        (following,) = offered(lane, 1)
        assert following.prefix == row.prefix
        running[index] = following


def test_the_last_group_gets_the_slots_of_those_that_have_ended() -> None:
    lane = a_lane(*(a_row(prefix=1) for _ in range(20)), *(a_row(prefix=2) for _ in range(4)),
                  nodes=2)  # fmt: skip
    running = offered(lane, 8)
    assert Counter(row.prefix for row in running) == {1: 4, 2: 4}
    for row in [row for row in running if row.prefix == 2]:
        lane.ended(row)
        assert [one.prefix for one in offered(lane, 1)] == [1]


def test_paused_owners_are_left_out() -> None:
    lane = a_lane(a_row("b", owner="k1"), a_row("c", owner="k2"))
    assert [row.owner for row in offered(lane, 2, paused={"k1"})] == ["k2"]
    assert [row.owner for row in offered(lane, 2)] == ["k1"]


# Deadlines.


def test_a_deadline_is_in_danger_if_the_rows_before_it_take_too_long() -> None:
    works = [
        BatchWork("b1", "k1", 100, deadline=1000.0),
        BatchWork("b2", "k1", 100, deadline=3000.0),
        BatchWork("b3", "k2", 100, deadline=900.0),
        BatchWork("b4", "k2", 100),
    ]
    assert in_danger(works, {}, 1.0, now=0.0) == []
    assert in_danger(works, {}, 0.2, now=0.0) == ["b1"]
    assert in_danger(works, {"b3": 50}, 0.2, now=0.0) == ["b3", "b1"]
    assert in_danger(works, {}, 0.1, now=0.0) == ["b3", "b1", "b2"]
    assert in_danger(works, {}, None, now=0.0) == []
    assert in_danger(works, {}, None, now=880.0) == ["b3"]
    assert in_danger([replace(works[0], rows=0)], {}, 0.001, now=999.0) == []


def test_a_deadline_is_near_when_all_slots_would_need_a_third_of_the_time_left() -> None:
    works = [BatchWork("b1", "k1", 100, deadline=1000.0)]
    # 100 rows of 10 s on 8 slots: 13 rounds, 130 s.
    slow: dict[str, float | int] = {"slots": 8, "row_seconds": 10.0}
    assert in_danger(works, {}, 0.01, now=0.0, **slow) == []  # type: ignore[arg-type]
    assert in_danger(works, {}, 0.01, now=611.0, **slow) == ["b1"]  # type: ignore[arg-type]
    assert in_danger(works, {}, 10.0, now=611.0, **slow) == []  # type: ignore[arg-type]
    # As long as no row has ended, one is believed to take 30 s.
    assert in_danger(works, {}, 0.0, now=0.0, slots=8) == ["b1"]
    assert in_danger(works, {}, 0.0, now=0.0, slots=100) == []
    # The pace is not known yet.
    assert in_danger(works, {}, None, now=611.0, **slow) == []  # type: ignore[arg-type]
    assert in_danger(works, {}, None, now=971.0, **slow) == ["b1"]  # type: ignore[arg-type]


def test_a_few_late_rows_may_wait() -> None:
    assert late_places(4, 256) == (2, 32)
    assert late_places(64, 256) == (8, 32)
    assert late_places(4000, 256) == (16, 32)
    assert late_places(64, 16) == (2, 2)
    assert late_places(64, 3) == (1, 1)
    assert late_places(64, 0) == (0, 0)


def test_the_owner_with_fewest_late_rows_waits_next() -> None:
    rows = [a_row(batch, owner=owner) for batch, owner in (("b", "k1"), ("c", "k2"), ("d", "k1"))]
    lane = a_lane(*rows)
    late = {"d": 1, "b": 1, "c": 1}

    def next_late(paused: Iterable[str] = (), **waiting: int) -> str | None:
        row = lane.next_late(late, set(paused), waiting)
        return None if row is None else row.batch

    assert next_late(["k1", "k2"]) is None
    assert next_late(k1=1) == "c"
    assert next_late() == "d"
    assert next_late(k1=1) == "b"
    assert next_late() is None
    assert lane.running == 3


def test_the_time_that_a_row_takes_is_a_mean_of_the_last_ones() -> None:
    pace = Pace(lambda: 0.0)
    assert pace.row_seconds is None
    for seconds in (10.0, 20.0, None):
        pace.ended(seconds)
    assert pace.row_seconds == pytest.approx(15.0)
    for _ in range(200):
        pace.ended(40.0)
    assert pace.row_seconds == pytest.approx(40.0, rel=0.05)


def test_the_pace_counts_only_while_there_are_rows() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    pace.tick(busy=True)
    for _ in range(20):
        assert pace.rows_a_second is None or pace.rows_a_second == pytest.approx(2.0, rel=0.2)
        now[0] += 0.5
        pace.ended()
    assert pace.rows_a_second == pytest.approx(2.0, rel=0.05)
    now[0] += 1000.0
    pace.tick(busy=False)
    assert pace.rows_a_second == pytest.approx(2.0, rel=0.05)
    for _ in range(300):
        now[0] += 2.0
        pace.ended()
    assert pace.rows_a_second == pytest.approx(0.5, rel=0.05)


def test_ready_rows_are_dropped_when_their_deadline_has_passed() -> None:
    soon, later, never = (
        replace(a_row(batch), deadline=deadline)
        for batch, deadline in (("b", 10.0), ("c", 20.0), ("d", None))
    )
    lane = a_lane(soon, later, never)
    assert [work.deadline for work in lane.works()] == [10.0, 20.0, math.inf]
    assert lane.drop_late(9.9) == []
    assert lane.drop_late(10.0) == [soon]
    assert (lane.ready, lane.ready_of("b"), lane.ready_of("c")) == (2, 0, 1)


def test_rows_that_get_no_slots_have_no_pace() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    for _ in range(10):
        assert pace.rows_a_second is None
        pace.tick(busy=True)
        now[0] += 1.0
    now[0] += 5.0
    pace.tick(busy=True)
    assert pace.rows_a_second == 0.0


# What to claim.


def test_claims_take_what_there_is_and_no_more_than_is_wanted() -> None:
    assert Lane().wants([], 16) == []
    assert Lane().wants([BatchWork("b1", "k1", 3)], 16) == [Pick(3, RequestKind.LINE, "b1")]
    lane = a_lane(*(a_row() for _ in range(10)))
    assert sum(want.limit for want in lane.wants([BatchWork("b1", "k1", 99)], 16)) == 6
    assert lane.wants([BatchWork("b1", "k1", 99)], 8) == []


def test_claims_are_for_groups_under_way_first() -> None:
    groups = tuple(PrefixGroup(prefix, 50, 100 + prefix, 5000) for prefix in (1, 2, 3, 4))
    work = BatchWork("b1", "k1", 200, groups=groups)
    lane = a_lane(a_row(prefix=2), nodes=2)
    assert [want.prefix for want in Lane(2).wants([work], 8)] == [4, 3]
    lane.next()
    assert [want.prefix for want in lane.wants([work], 8)] == [2, 4]
    assert all(want.limit == 4 for want in lane.wants([work], 8))
