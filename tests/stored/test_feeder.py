"""Lines of batches: which are offered, how a whole gateway runs them, and why they wait."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import update

from gateway.callers.keys import hash_key
from gateway.lease import BatchRoom
from gateway.store.failures import StoreUnavailable
from gateway.store.schema import batches
from gateway.store.store import Store
from gateway.stored.claims import Pick, RequestKind, StoredRow
from gateway.stored.feeder import Feeder
from gateway.stored.feeding import (
    BatchWork,
    Lane,
    Pace,
    PrefixGroup,
    in_danger,
    late_places,
    rows_to_offer,
)
from gateway.stored.waits import MESSAGES, ServingNodes, why_lines_wait
from gateway.terms import Priority
from tests.callers.kills import rows_of
from tests.emulator import EmulatedNode
from tests.gateways import Running, until
from tests.known import known
from tests.polling import eventually
from tests.stored.batch_gateway import (
    HEADERS,
    ended,
    gateway_over,
    key,
    lines,
    output,
    show,
    submit,
    time_to_first_token,
)
from tests.stored.stored_rows import a_line
from tests.virtual import in_virtual_time, now

IDS = count()


def a_row(batch: str = "b1", prefix: int = 0, tokens: int = 100, owner: str = "k1") -> StoredRow:
    row = a_line(next(IDS), owner=owner, prefix=prefix, max_tokens=tokens, deadline=None)
    return replace(row, batch=batch)


def a_lane(*rows: StoredRow, nodes: int = 1) -> Lane:
    lane = Lane(nodes)
    for row in rows:
        lane.add(row)
    return lane


def offered(lane: Lane, number: int, **options: Any) -> list[StoredRow]:
    found = [lane.next(**options) for _ in range(number)]
    return [row for row in found if row is not None]


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
    slow: dict[str, Any] = {"slots": 8, "row_seconds": 10.0}
    assert in_danger(works, {}, 0.01, now=0.0, **slow) == []
    assert in_danger(works, {}, 0.01, now=611.0, **slow) == ["b1"]
    assert in_danger(works, {}, 10.0, now=611.0, **slow) == []
    # As long as no row has ended, one is believed to take 30 s.
    assert in_danger(works, {}, 0.0, now=0.0, slots=8) == ["b1"]
    assert in_danger(works, {}, 0.0, now=0.0, slots=100) == []
    # The pace is not known yet.
    assert in_danger(works, {}, None, now=611.0, **slow) == []
    assert in_danger(works, {}, None, now=971.0, **slow) == ["b1"]


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


def test_the_pace_is_that_of_the_last_minutes_and_counts_only_while_there_are_rows() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    for _ in range(10):
        assert (pace.rows_a_second, pace.row_seconds) == (None, None)
        pace.tick(busy=True)
        now[0] += 1.0
    now[0] += 5.0
    pace.tick(busy=True)
    assert pace.rows_a_second == 0.0, "rows that get no slots"
    for rows, apart, takes in ((1000, 0.5, 15.0), (300, 2.0, 40.0)):
        for _ in range(rows):
            now[0] += apart
            pace.ended(takes)
        for _ in range(2):
            assert pace.rows_a_second == pytest.approx(1 / apart, rel=0.05)
            assert pace.row_seconds == pytest.approx(takes, rel=0.05)
            now[0] += 1000.0
            pace.tick(busy=False)


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


CHAT = "/v1/chat/completions"
OTHER = "lg_k2_" + "t" * 43
OTHERS: dict[str, Any] = {"id": "k2", "name": "bob", "sha256": hash_key(OTHER).sha256}
OTHER_HEADERS = {"authorization": f"Bearer {OTHER}"}


def a_node(slots: int = 2, **options: Any) -> EmulatedNode:
    """A node that writes 20 tokens in a second."""
    return EmulatedNode(
        **{"slots": slots, "prefill_tps": 2000.0, "decode_tps": 20.0, "answer_tokens": 5000}
        | options
    )


def a_site(
    folder: Path, *nodes: EmulatedNode, own: dict[str, Any] | None = None, **settings: Any
) -> contextlib.AbstractAsyncContextManager[Running]:
    """A gateway with two callers; `own`: fields of the batch's key."""
    chosen = {"batches": {"windows": {"shortest": 5}}, **settings}
    return gateway_over(folder, *nodes, keys=[key(**(own or {})), OTHERS], **chosen)


@contextlib.asynccontextmanager
async def chats(running: Running, clients: int, tokens: int = 20) -> AsyncIterator[list[float]]:
    """Clients that always want an answer; gives the seconds that each chat took."""
    seconds: list[float] = []

    async def one(number: int) -> None:
        while True:
            asked = [{"role": "user", "content": f"chat {number} at {now()}"}]
            body, began = {"messages": asked, "max_tokens": tokens}, now()
            answer = await running.client.post(CHAT, json=body, headers=OTHER_HEADERS)
            assert answer.status_code == 200, answer.text
            seconds.append(now() - began)

    tasks = [asyncio.create_task(one(number)) for number in range(clients)]
    try:
        yield seconds
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [one for one in results if not isinstance(one, asyncio.CancelledError)]


def counts(batch: dict[str, Any]) -> tuple[int, int, int]:
    """Lines: all, completed, failed."""
    found = batch["request_counts"]
    return found["total"], found["completed"], found["failed"]


async def own_fields(running: Running, batch: str) -> dict[str, Any]:
    found: dict[str, Any] = (await show(running, batch))["llama_gateway"]
    return found


def feeder_of(running: Running) -> Feeder:
    return known(running.gateway.background.feeder)


def queued_of(running: Running, caller: str = "k1") -> list[Priority]:
    """The classes in which requests of a caller wait."""
    waiters = running.gateway.scheduler.waiters
    return [one.request.caller.priority for one in waiters if one.request.caller.id == caller]


async def responded_later(running: Running, tokens: int) -> str:
    """The path of a new response in the background."""
    body = {"input": "tell", "background": True, "max_output_tokens": tokens}
    made = await running.client.post("/v1/responses", json=body, headers=HEADERS)
    return f"/v1/responses/{made.json()['id']}"


async def response(running: Running, path: str) -> dict[str, Any]:
    found = await running.client.get(path, headers=HEADERS)
    shown: dict[str, Any] = found.json()
    return shown


@in_virtual_time
async def test_all_lines_run_once_as_many_at_a_time_as_there_are_slots(tmp_path: Path) -> None:
    node = a_node(4)
    async with a_site(tmp_path, node) as running:
        items = [*lines(40), *lines(2, 40, model="gpt-nothing")]
        batch = await submit(running, items)
        await until(lambda: node.slots.busy == 4)
        seen: list[tuple[int, int]] = []
        while counts(await show(running, batch))[1] < 30:
            seen.append((node.slots.busy, len(running.gateway.scheduler.waiters)))
            await asyncio.sleep(0.02)
        assert fmean(busy for busy, _ in seen) >= 0.95 * 4
        assert max(waiting for _, waiting in seen) <= 4
        found = await ended(running, batch)
        assert (found["status"], counts(found), node.requests) == ("completed", (42, 40, 2), 40)
        for error in await output(running, found["error_file_id"]):
            assert error["response"]["status_code"] == 404
            assert error["response"]["body"]["error"]["code"] == "model_not_found"
        results = await output(running, found["output_file_id"])
        assert {one["custom_id"] for one in results} == {f"line-{number}" for number in range(40)}
        metrics = (await running.admin.get("/metrics")).text
        assert 'llama_gateway_batch_lines_total{outcome="done"} 40\n' in metrics


@in_virtual_time
async def test_a_gateway_that_ends_puts_back_what_it_runs(tmp_path: Path) -> None:
    async with a_site(tmp_path, node := a_node()) as running:
        batch = await submit(running, lines(20))
        await until(lambda: node.requests >= 4)
    async with a_site(tmp_path, a_node()) as running:
        found = await ended(running, batch)
        assert counts(found) == (20, 20, 0)
        results = await output(running, found["output_file_id"])
        assert len({one["custom_id"] for one in results}) == len(results) == 20


@pytest.mark.usefixtures("hurried")
@pytest.mark.slow
async def test_lines_end_while_the_store_is_away_and_are_recorded_later(tmp_path: Path) -> None:
    node = EmulatedNode(slots=2, decode_tps=40)
    async with gateway_over(tmp_path, node) as running:
        batch, feeder = await submit(running, lines(40)), feeder_of(running)
        await until(lambda: node.requests >= 2)
        away = StoreUnavailable("it is away", "wait")
        with patch.object(Store, "run", side_effect=away):
            # Those that were claimed before run to their end.
            await until(lambda: feeder.claimed == feeder.running == node.slots.busy == 0, 20.0)
            assert node.requests < 40
        found = await ended(running, batch)
        assert counts(found) == (40, 40, 0)
        assert node.requests == 40
        log = (tmp_path / "gateway.log").read_text()
        assert log.count('"lines of batches wait"') == 1


async def first_tokens(
    folder: Path, nodes: int, slots: int, reserve: float, words: int, batch: list[dict[str, Any]]
) -> tuple[float, float]:
    """Seconds to the first token of chats of so many words, at the 95th percentile; busy slots."""
    folder.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    speeds: dict[str, Any] = {"prefill_tps": 500.0, "decode_tps": 10.0, "decode_step": 0.005}
    fleet = [a_node(slots, prefill_stalls=True, cache_ram=1 << 12, **speeds) for _ in range(nodes)]
    busy: list[int] = []
    async with a_site(folder, *fleet, classes={"batch": {"reserve_slots": reserve}}) as running:
        if batch:
            await submit(running, batch)
            await asyncio.sleep(20.0)

        async def chat(number: int) -> float:
            await asyncio.sleep(1.5 * number)
            busy.append(sum(node.slots.busy for node in fleet))
            text = f"chat {number}: say something" + " more" * words
            body = {"messages": [{"role": "user", "content": text}], "temperature": 0}
            return await time_to_first_token(running.client, body, HEADERS)

        seconds = await asyncio.gather(*map(chat, range(30)))
    return quantiles(seconds, n=20)[-1], fmean(busy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fleet", "number", "line_words", "words", "busy"),
    [
        pytest.param((2, 4, 0.25), 200, 0, 300, 6.0, id="long prompts"),
        pytest.param((4, 2, 0.5), 100, 300, 0, 4.0, id="as many nodes as chats"),
    ],
)
@in_virtual_time
async def test_chats_do_not_notice_the_lines_of_a_batch_beside_them(
    tmp_path: Path, fleet: tuple[int, int, float], number: int, line_words: int, words: int,
    busy: float,
) -> None:  # fmt: skip
    items: list[dict[str, Any]] = []
    for index in range(number):
        text = f"write text number {index}" + " about it" * (line_words // 2)
        messages, tokens = [{"role": "user", "content": text}], 30 + (index * 37) % 61
        items += lines(1, index, messages=messages, max_tokens=tokens)
    alone, busy_alone = await first_tokens(tmp_path / "alone", *fleet, words, [])
    beside, busy_beside = await first_tokens(tmp_path / "beside", *fleet, words, items)
    assert busy_beside > busy > busy_alone
    assert beside <= 1.25 * alone


@in_virtual_time
async def test_lines_whose_folder_is_away_wait_and_go_on(tmp_path: Path) -> None:
    node = a_node(1)
    async with a_site(tmp_path, node) as running:
        batch = await submit(running, lines(6))
        await until(lambda: node.requests == 2)
        folder, away = tmp_path / "state/batches", tmp_path / "away"
        folder.rename(away)
        folder.mkdir(mode=0o700)
        await asyncio.sleep(10.0)
        assert node.requests == 2
        folder.rmdir()
        away.rename(folder)
        assert counts(await ended(running, batch, 120.0)) == (6, 6, 0)
        assert node.requests == 6


@in_virtual_time
async def test_lines_are_raised_to_the_usual_class_of_their_key_and_no_higher(
    tmp_path: Path,
) -> None:
    async with a_site(tmp_path, a_node(), own={"max_class": "urgent"}) as running:
        seen = set[Priority]()
        async with chats(running, 6):
            await asyncio.sleep(3.0)
            batch = await submit(running, lines(8), completion_window="30s")
            while (await show(running, batch))["status"] in {"validating", "in_progress"}:
                seen.update(queued_of(running))
                await asyncio.sleep(0.2)
        assert Priority.NORMAL in seen
        assert seen <= {Priority.NORMAL, Priority.BATCH}


@in_virtual_time
async def test_late_lines_and_chats_of_another_key_get_equal_shares(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node()) as running:
        async with chats(running, 8) as theirs:
            await asyncio.sleep(3.0)
            batch = await submit(running, lines(200), completion_window="60s")
            await until(lambda: queued_of(running))
            before = len(theirs)
            await asyncio.sleep(30.0)
            of_chats = len(theirs) - before
            of_lines = counts(await show(running, batch))[1]
            await running.client.post(f"/v1/batches/{batch}/cancel", headers=HEADERS)
        assert of_lines + of_chats >= 50
        assert 0.4 <= of_lines / (of_lines + of_chats) <= 0.6


@in_virtual_time
async def test_a_line_that_runs_at_the_deadline_is_cut_and_costs_nothing(tmp_path: Path) -> None:
    node = a_node(2)
    limited = {"limits": {"tokens_per_day": 100_000}}
    async with a_site(tmp_path, node, own=limited) as running:
        began = now()
        batch = await submit(running, lines(5, max_tokens=5000), completion_window="20s")
        await until(lambda: node.slots.busy == 2)
        found = await ended(running, batch)
        assert 20.0 <= now() - began <= 25.0
        assert (found["status"], counts(found)) == ("expired", (5, 0, 0))
        assert found["llama_gateway"]["expired"] == 5
        errors = await output(running, found["error_file_id"])
        assert [one["error"]["code"] for one in errors] == ["batch_expired"] * 5
        await until(lambda: node.slots.busy == 0, 5.0)
        assert found["usage"]["total_tokens"] == 0
        limits = (await running.client.get("/v1/usage", headers=HEADERS)).json()["limits"]
        assert [one["used"] for one in limits] == [0], limits
    rows, _ = rows_of(f"sqlite:///{tmp_path}/gateway.db")
    assert [row for row in rows if row["key"] == "k1"] == []


@in_virtual_time
async def test_a_paused_batch_takes_its_late_lines_out_of_the_queue(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node()) as running:
        async with chats(running, 6, tokens=100):
            await asyncio.sleep(8.0)
            batch = await submit(running, lines(20), completion_window="60s")
            await until(lambda: len(queued_of(running)) == 2)
            answer = await running.client.post(f"/v1/batches/{batch}/pause", headers=HEADERS)
            assert answer.status_code == 200
            await until(lambda: not queued_of(running), 2.0)
            await asyncio.sleep(10.0)
            assert not queued_of(running)
            own = await own_fields(running, batch)
            assert (own["running"], own["why_waiting"]["reason"]) == (0, "paused")
            assert own["why_waiting"]["since"] == own["paused"]["at"]
        await running.client.post(f"/v1/batches/{batch}/resume", headers=HEADERS)
        assert counts(await ended(running, batch)) == (20, 20, 0)


@in_virtual_time
async def test_a_line_that_runs_when_its_deadline_comes_near_yields_no_more(
    tmp_path: Path,
) -> None:
    node = a_node(1)
    async with a_site(tmp_path, node) as running:
        # The line takes 40 s of the 100 s that it has; clients want its slot all the time.
        batch = await submit(running, lines(1, max_tokens=800), completion_window="100s")
        await until(lambda: node.slots.busy == 1)
        async with chats(running, 2, tokens=100):
            assert counts(await ended(running, batch, 110.0)) == (1, 1, 0)


@in_virtual_time
async def test_a_background_response_ends_at_its_deadline(tmp_path: Path) -> None:
    node, windows = a_node(1), {"windows": {"shortest": 5, "default": 20}}
    async with a_site(tmp_path, node, batches=windows) as running:
        began = now()
        for path in [await responded_later(running, 4000) for _ in range(2)]:
            while (found := await response(running, path))["status"] in {"queued", "in_progress"}:
                assert now() - began < 60.0
                await asyncio.sleep(0.2)
            assert found["status"] == "failed"
            assert "time was over" in found["error"]["message"]
        assert 20.0 <= now() - began <= 25.0
        await until(lambda: node.slots.busy == 0, 5.0)


@in_virtual_time
async def test_a_gateway_that_is_succeeded_leaves_late_lines_that_wait_to_the_next(
    tmp_path: Path,
) -> None:
    async with a_site(tmp_path, a_node()) as running, chats(running, 6, tokens=100):
        await asyncio.sleep(8.0)
        batch = await submit(running, lines(20, max_tokens=100), completion_window="60s")
        feeder = feeder_of(running)
        await until(lambda: len(queued_of(running)) == 2 and feeder.running > 2)
        running.gateway.background.stop()
        await until(lambda: not queued_of(running), 1.0)
        assert feeder.running > 0
        await asyncio.wait_for(running.gateway.background.drain(), 10.0)
        assert counts(await show(running, batch))[1] >= 1
        assert (await own_fields(running, batch))["running"] == 0


@in_virtual_time
async def test_a_gateway_that_is_succeeded_leaves_waiting_responses_to_the_next(
    tmp_path: Path,
) -> None:
    node = a_node(1)
    async with a_site(tmp_path, node) as running:
        made = [await responded_later(running, 100) for _ in range(2)]
        await until(lambda: node.slots.busy == 1 and len(queued_of(running)) == 1)
        running.gateway.background.stop()
        await until(lambda: not queued_of(running), 3.0)
        await asyncio.wait_for(running.gateway.background.drain(), 10.0)
        found = [await response(running, path) for path in made]
        assert sorted(one["status"] in {"queued", "in_progress"} for one in found) == [False, True]


ROOM = BatchRoom(4, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("states", "is_paused", "room", "running", "reason"),
    [
        ({"ready": 1}, True, ROOM, 0, "model_paused"),
        ({"down": 2, "starting": 1}, False, ROOM, 0, "no_node"),
        ({}, False, ROOM, 0, "no_node"),
        ({"unloaded": 2, "down": 1}, False, ROOM, 0, "model_not_loaded"),
        ({"failed": 1}, False, ROOM, 0, "model_not_loaded"),
        ({"loading": 1, "unloaded": 1}, False, ROOM, 0, "model_loading"),
        ({"ready": 1}, False, BatchRoom(0, 0, 0, 0, 0), 0, "slots_reserved"),
        ({"degraded": 1, "down": 9}, False, ROOM, 0, "callers_first"),
        ({"ready": 1}, False, ROOM, 3, "other_batches"),
    ],
)
def test_lines_wait_for_what_holds_them_up_first(
    states: dict[str, int], is_paused: bool, room: BatchRoom, running: int, reason: str
) -> None:
    nodes = ServingNodes(states, 1.0, 1.0)
    assert why_lines_wait(nodes, room, running, model_paused=is_paused) == reason
    assert reason in MESSAGES


async def why(running: Running, batch: str) -> dict[str, Any]:
    """What the batch waits for, once it does."""

    async def look() -> dict[str, Any] | None:
        told = (own := await own_fields(running, batch))["why_waiting"]
        return None if told is None or told["reason"] == "validating" else own

    return await eventually(look)


@in_virtual_time
async def test_a_starved_batch_says_since_when_callers_go_first_and_when_it_starts(
    tmp_path: Path,
) -> None:
    async with a_site(tmp_path, a_node()) as running:
        # What the node does in a second is known.
        first = await submit(running, lines(8))
        assert (await ended(running, first))["llama_gateway"]["why_waiting"] is None
        async with chats(running, 3, tokens=2000):
            await until(lambda: len(running.gateway.registry) == 3)
            batch = await submit(running, lines(4))
            own = await why(running, batch)
            told = own["why_waiting"]
            assert told["reason"] == "callers_first"
            assert told["message"] == MESSAGES["callers_first"]
            assert told["until"] is None
            await asyncio.sleep(3.0)
            later = (await own_fields(running, batch))["why_waiting"]
            assert later["since"] == told["since"], "it has waited all the time"
            # Two of three chats run for 100 s: then there is a slot that nobody waits for.
            assert own["expected_start"] is not None
            assert own["expected_end"] > own["expected_start"]
            assert own["expected_by"] == "nodes"
            listed = await running.client.get("/v1/batches", headers=HEADERS)
            (shown, _) = listed.json()["data"]
            assert shown["llama_gateway"]["why_waiting"] == told
        found = await ended(running, batch)
        assert counts(found)[1] == 4
        assert found["llama_gateway"]["why_waiting"] is None


@in_virtual_time
async def test_lines_of_a_paused_model_wait_and_go_on(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node(), a_node(model="other")) as running:
        fleet = running.gateway.fleet
        fleet.pause_model("demo", paused=True)
        paused = await submit(running, lines(20, model="demo"))
        others = await submit(running, lines(20, model="other"))
        assert counts(await ended(running, others))[1] == 20
        assert (await why(running, paused))["why_waiting"]["reason"] == "model_paused"
        found = await show(running, paused)
        assert (found["status"], counts(found)) == ("in_progress", (20, 0, 0))
        fleet.pause_model("demo", paused=False)
        assert counts(await ended(running, paused))[1] == 20


@in_virtual_time
async def test_a_batch_of_another_folder_says_where_its_files_are(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node()) as running:
        batch, store = await submit(running, lines(4)), known(running.gateway.store)
        await ended(running, batch)
        elsewhere = {"folder": "another", "state": "in_progress", "ended_at": None}
        await store.run(lambda connection: connection.execute(update(batches).values(elsewhere)))
        # Another gateway of the store may run it.
        assert (await own_fields(running, batch))["why_waiting"] is None
        # In a cluster the leader alone runs batches, and hears which folder each member has.
        waits = known(known(running.gateway.background.batches).upkeep.waits)
        there: list[bool] = []
        waits.is_folder_there = lambda _: there[-1]
        for is_there, reason in ((True, "folder_elsewhere"), (False, "folder_gone")):
            there.append(is_there)
            told = (await own_fields(running, batch))["why_waiting"]
            assert (told["reason"], told["since"]) == (reason, None)
