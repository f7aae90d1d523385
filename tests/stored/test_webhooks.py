"""The rows of deliveries, on stores of both kinds."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy
from openai import AsyncOpenAI
from sqlalchemy import Connection, func, select
from structlog.testing import capture_logs

from gateway.config.stored import WebhookSettings, WebhookTarget, WebhookUrl
from gateway.events import EventBus, WebhookAttempted
from gateway.store.schema import webhook_deliveries
from gateway.store.schema import webhook_deliveries as rows
from gateway.store.store import Store
from gateway.stored.batch_rows import Batch
from gateway.stored.claims import BatchState
from gateway.stored.folder import job
from gateway.stored.webhooks import (
    JITTER,
    KEPT_SECONDS,
    LEAST_ATTEMPTS,
    LONGEST_ERROR,
    LONGEST_RETRY_AFTER,
    MOST_OF_ORIGIN,
    RETRY_DELAYS,
    Delivery,
    DeliveryState,
    WebhookEvent,
    WebhookEvents,
    WebhookPoster,
    WebhookSender,
    WebhookTargets,
    add_deliveries,
    claim_deliveries,
    next_attempt,
    record_attempt,
    remove_ended,
    waiting_origins,
)
from gateway.transport.resolver import Resolver
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway
from tests.store.stores import CountingStore, opened, wait_until
from tests.stored import batch_gateway
from tests.stored.batch_place import jsonl
from tests.stored.receivers import (
    LIMIT,
    SECRET,
    ReceivedRequest,
    Receiver,
    never,
    receiving,
    status,
    target,
)
from tests.stored.stored_rows import NOW, a_batch, alone
from tests.web.two_keys import ALICE, BOB, KEYS, client

A, B = WebhookUrl.parse("https://a.example/x"), WebhookUrl.parse("https://b.example:8443/y")


def event(number: int = 1) -> WebhookEvent:
    return WebhookEvent("batch.completed", f"batch_{number}", "alice", "night", NOW + 0.5)


def add(store: Store, *urls: WebhookUrl, number: int = 1, now: float = NOW) -> list[str]:
    return store.run_now(lambda c: add_deliveries(c, urls, event(number), now))


def claim(store: Store, now: float = NOW, **places: int) -> list[Delivery]:
    origins = {{"a": A, "b": B}[name].origin: number for name, number in places.items()}
    return store.run_now(job(claim_deliveries, origins, now, now + 30))


def row_of(store: Store, id_: str) -> Any:
    asked = select(webhook_deliveries).where(webhook_deliveries.c.id == id_)
    return store.run_now(lambda c: c.execute(asked).one())


def test_an_event_is_one_row_for_each_url_however_often_it_is_added(store: Store) -> None:
    ids = add(store, A, B)
    assert add(store, A, B) == ids
    assert len(set(ids)) == 2
    number = store.run_now(lambda c: c.scalar(select(func.count()).select_from(webhook_deliveries)))
    assert number == 2
    first, second = claim(store, a=5)[0], claim(store, b=5)[0]
    assert first.body == second.body
    told = json.loads(first.body)
    assert told.pop("id").startswith("evt_")
    assert told == {
        "object": "event",
        "type": "batch.completed",
        "created_at": int(NOW),
        "data": {"id": "batch_1"},
    }
    assert (first.owner, first.group_name, first.url) == ("alice", "night", str(A))
    assert first.id.startswith("wh_")
    assert "." not in first.id
    assert (first.created_at, first.attempts) == (NOW + 0.5, 1)


def test_what_waits_is_told_by_origin_the_longest_due_first(store: Store) -> None:
    add(store, A, number=1, now=NOW + 5)
    add(store, A, number=2, now=NOW + 9)
    add(store, B, number=3, now=NOW + 1)
    found = [tuple(one) for one in store.run_now(waiting_origins)]
    assert found == [(B.origin, 1, NOW + 1), (A.origin, 2, NOW + 5)]


def test_a_claimed_delivery_is_nobody_elses_until_its_lease_ends(store: Store) -> None:
    add(store, A)
    (first,) = claim(store, a=1)
    assert claim(store, a=1) == []
    assert claim(store, now=NOW + 29, a=1) == []
    (again,) = claim(store, now=NOW + 30, a=1)
    assert (again.id, again.body, again.attempts) == (first.id, first.body, 2)


def test_no_more_are_claimed_than_there_are_places(store: Store) -> None:
    for number in range(5):
        add(store, A, B, number=number, now=NOW - number)
    found = claim(store, a=2, b=1)
    assert sorted(one.origin for one in found) == [A.origin, A.origin, B.origin]
    # Those that have waited for longest.
    assert {one.object_id for one in found} == {"batch_4", "batch_3"}


def test_an_ended_delivery_waits_no_more(store: Store) -> None:
    (id_,) = add(store, A)
    (claimed,) = claim(store, a=1)
    for _ in range(2):
        store.run_now(lambda c: record_attempt(c, claimed, DeliveryState.DELIVERED, NOW + 2, None))
    row = row_of(store, id_)
    assert (row.state, row.next_at, row.last_error) == ("delivered", NOW + 2, None)
    assert store.run_now(waiting_origins) == []
    assert add(store, A) == [id_]
    assert store.run_now(waiting_origins) == []


def test_a_failure_is_tried_again_at_its_time(store: Store) -> None:
    (id_,) = add(store, A)
    (claimed,) = claim(store, a=1)
    store.run_now(job(record_attempt, claimed, DeliveryState.WAITING, NOW + 5, "x" * 500))
    assert claim(store, now=NOW + 4, a=1) == []
    assert row_of(store, id_).last_error == "x" * LONGEST_ERROR
    assert claim(store, now=NOW + 5, a=1)[0].attempts == 2


def test_a_late_failure_does_not_disturb_who_tries_it_now(store: Store) -> None:
    (id_,) = add(store, A)
    (late,) = claim(store, a=1)
    (current,) = claim(store, now=NOW + 30, a=1)
    for state in (DeliveryState.WAITING, DeliveryState.GIVEN_UP):
        store.run_now(job(record_attempt, late, state, NOW, "late"))
    row = row_of(store, id_)
    assert (row.state, row.next_at, row.last_error) == ("waiting", NOW + 60, None)
    # A success counts, however late.
    store.run_now(job(record_attempt, late, DeliveryState.DELIVERED, NOW, None))
    store.run_now(job(record_attempt, current, DeliveryState.WAITING, NOW, "failed"))
    assert row_of(store, id_).state == "delivered"


def test_old_ended_deliveries_are_removed_and_waiting_ones_never(store: Store) -> None:
    add(store, A, number=1, now=NOW - 1000)
    add(store, B, number=2, now=NOW - 1000)
    (claimed,) = claim(store, b=1)
    store.run_now(job(record_attempt, claimed, DeliveryState.REFUSED, NOW, "status 410"))
    assert store.run_now(lambda c: remove_ended(c, NOW, 10)) == 0
    assert store.run_now(lambda c: remove_ended(c, NOW + 1, 10)) == 1
    assert [one.origin for one in store.run_now(waiting_origins)] == [A.origin]


def test_looking_for_what_waits_goes_by_its_index(store: Store) -> None:
    if "sqlite" not in store.location.shown:
        pytest.skip("on a small table PostgreSQL reads all of it")
    asked: list[str] = []

    def job(connection: Connection) -> str:
        noted = sqlalchemy.event.listens_for(connection, "before_cursor_execute")
        noted(lambda *given: asked.append(given[2]))
        waiting_origins(connection)
        return str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {asked[0]}").all())

    assert "USING INDEX ix_webhook_deliveries_waiting" in store.run_now(job, write=False)


@pytest.fixture
def events() -> WebhookEvents:
    all_, named = target("https://all.example"), target("https://named.example", named_only=True)
    settings = WebhookSettings(targets=(all_, named))
    return WebhookEvents(WebhookTargets(lambda: settings), lambda: NOW + 7)


def batch(state: BatchState, webhook_url: str | None = None) -> Batch:
    return a_batch(state=state, ended_at=NOW, webhook_url=webhook_url)


def told(store: Store) -> list[tuple[str, str, str, float, float]]:
    asked = select(rows.c.event, rows.c.object_id, rows.c.url, rows.c.created_at, rows.c.next_at)
    return [
        tuple(row) for row in store.run_now(lambda c: c.execute(asked.order_by(rows.c.url)).all())
    ]


@pytest.mark.parametrize(
    "state",
    [BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED],
)
def test_a_batch_that_has_ended_is_told_to_all_and_to_whom_it_names(
    store: Store, events: WebhookEvents, state: BatchState
) -> None:
    ended = batch(state, "https://named.example/x")
    for _ in range(2):
        store.run_now(lambda c: events.batch_ended(c, ended))
    assert told(store) == [
        (f"batch.{state}", ended.id, "https://all.example/", NOW, NOW + 7),
        (f"batch.{state}", ended.id, "https://named.example/x", NOW, NOW + 7),
    ]


def test_a_response_is_told_as_it_has_ended(store: Store, events: WebhookEvents) -> None:
    row = alone(1)
    store.run_now(lambda c: events.response_ended(c, row, "incomplete", NOW + 3))
    assert told(store) == [
        ("response.incomplete", row.id, "https://all.example/", NOW + 3, NOW + 7)
    ]


def test_nobody_is_told_of_a_batch_that_goes_on_or_whose_end_fails(
    store: Store, events: WebhookEvents
) -> None:
    store.run_now(lambda c: events.batch_ended(c, batch(BatchState.IN_PROGRESS)))

    def job(connection: Connection) -> None:
        events.batch_ended(connection, batch(BatchState.COMPLETED))
        raise RuntimeError("the batch could not be ended")

    with pytest.raises(RuntimeError):
        store.run_now(job)
    assert told(store) == []


DAY = 86400.0


class Sending:
    """A sender on a store, with quick retries, and what became of its attempts."""

    def __init__(
        self,
        store: Store,
        *targets: WebhookTarget,
        recorded: Callable[[], int] | None = None,
        **settings: Any,
    ) -> None:
        self.settings = WebhookSettings(targets=targets, **settings)
        self.store = store
        self.outcomes: list[str] = []
        self.bus = EventBus()
        self.bus.subscribe(WebhookAttempted, lambda event: self.outcomes.append(event.outcome))
        self.targets = WebhookTargets(lambda: self.settings)
        self.ahead = 0.0
        """Seconds by which the sender's clock is ahead."""
        self.sender = WebhookSender(
            store,
            self.targets,
            lambda: self.settings,
            WebhookPoster(Resolver(), self.now),
            self.bus,
            delays=(0.05,),
            now=self.now,
            poll_seconds=0.02,
            close_seconds=0.05,
            recorded=recorded,
        )

    def now(self) -> float:
        return time.time() + self.ahead

    async def add(self, url: str, number: int = 1, at: float | None = None) -> None:
        now = self.now()
        event = WebhookEvent("batch.completed", f"batch_{number}", "alice", None, at or now)
        parsed = WebhookUrl.parse(url)
        await self.store.run(lambda c: add_deliveries(c, [parsed], event, now))
        self.sender.wake()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not condition():
                self.bus.flush()
                await asyncio.sleep(0.01)

    async def row(self) -> Any:
        return await self.store.run(lambda c: c.execute(select(rows)).one(), write=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.sender.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def sending(url: str, *targets: WebhookTarget, **settings: Any) -> AsyncIterator[Sending]:
    with opened(url) as store:
        made = Sending(store, *targets, **settings)
        async with made.running():
            yield made


def at(receiver: Receiver) -> str:
    return f"{receiver.url}/hooks"


async def test_a_failure_is_tried_again_with_the_same_id_and_410_ends_it(store_url: str) -> None:
    answers = (status(500), status(302, "location: /x"), status(410))
    async with receiving(*answers) as receiver, sending(store_url, target(at(receiver))) as place:
        await place.add(at(receiver))
        await place.until(lambda: place.outcomes == ["failed", "failed", "refused"])
        row = await place.row()
        assert (row.state, row.attempts, row.last_error) == ("refused", 3, "status 410")
    ids = {request.headers["webhook-id"] for request in receiver.requests}
    assert len(ids) == 1
    assert len(receiver.requests) == 3
    assert len({request.body for request in receiver.requests}) == 1


async def test_an_event_is_given_up_after_its_time(store_url: str) -> None:
    async with (
        receiving(status(500)) as receiver,
        sending(store_url, target(at(receiver)), give_up=0.2) as place,
    ):
        await place.add(at(receiver))
        await place.until(lambda: "given_up" in place.outcomes)
        row = await place.row()
        assert (row.state, row.last_error) == ("given_up", "status 500")
        assert place.outcomes[:-1] == ["failed"] * (row.attempts - 1)
        assert row.attempts >= LEAST_ATTEMPTS
    assert len(receiver.requests) == row.attempts


async def test_retry_after_leaves_the_whole_receiver_alone(store_url: str) -> None:
    answers = (status(429, "retry-after: 60"), status(204))
    async with receiving(*answers) as receiver, sending(store_url, target(at(receiver))) as place:
        await place.add(at(receiver), 1)
        await place.until(lambda: place.outcomes == ["failed"])
        await place.add(at(receiver), 2)
        await place.until(lambda: place.sender.waiting == 2)
        assert len(receiver.requests) == 1
        place.ahead = 61.0
        place.sender.wake()
        await place.until(lambda: place.outcomes.count("delivered") == 2)


async def test_a_slow_receiver_delays_nobody_elses_events(store_url: str) -> None:
    async with receiving(never) as slow, receiving() as quick:
        place_ = sending(store_url, target(at(slow)), target(at(quick)), timeout=LIMIT)
        async with place_ as place:
            for number in range(2 * MOST_OF_ORIGIN):
                await place.add(at(slow), number)
            await slow.came(MOST_OF_ORIGIN)
            for number in range(MOST_OF_ORIGIN + 1):
                await place.add(at(quick), number)
            await place.until(lambda: len(place.outcomes) > MOST_OF_ORIGIN)
            # None of the slow one's has ended.
            assert set(place.outcomes) == {"delivered"}
            assert slow.connections == MOST_OF_ORIGIN
        # Those that were cut by the end are due at once, for another process.
        with opened(store_url) as store:
            (left,) = store.run_now(waiting_origins)
            assert (left.number, left.next_at <= time.time()) == (2 * MOST_OF_ORIGIN, True)


async def test_a_receiver_that_fails_gets_one_attempt_at_a_time(store_url: str) -> None:
    running = most = 0

    async def failing(writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        if len(receiver.requests) > MOST_OF_ORIGIN:
            most = max(most, running)
        await asyncio.sleep(0.02)
        writer.write(status(500))
        running -= 1

    async with receiving(failing) as receiver, sending(store_url, target(at(receiver))) as place:
        for number in range(8):
            await place.add(at(receiver), number)
        await place.until(lambda: len(place.outcomes) > 20)
    assert most == 1


async def test_a_target_that_a_key_has_no_more_gets_nothing_and_may_return(
    store_url: str,
) -> None:
    async with receiving() as receiver, sending(store_url) as place:
        place.settings = WebhookSettings(targets=(target(at(receiver), keys=("bob",)),))
        await place.add(at(receiver))
        await place.until(lambda: place.outcomes.count("failed") >= 2)
        assert receiver.connections == 0
        assert "no target" in (await place.row()).last_error
        place.settings = WebhookSettings(targets=(target(at(receiver)),))
        await place.until(lambda: "delivered" in place.outcomes)


async def test_what_another_process_has_added_is_found(store_url: str) -> None:
    async with receiving() as receiver, sending(store_url, target(at(receiver))) as place:
        with opened(store_url) as other:
            url = WebhookUrl.parse(at(receiver))
            event = WebhookEvent("batch.failed", "batch_1", "alice", None, time.time())
            other.run_now(lambda c: add_deliveries(c, [url], event, time.time()))
        await place.until(lambda: place.outcomes == ["delivered"])
        row = await place.row()
        assert (row.state, row.attempts, row.last_error) == ("delivered", 1, None)
        await place.until(lambda: place.sender.waiting == 0)


async def test_two_processes_deliver_each_event_once(store_url: str) -> None:
    async with (
        receiving() as receiver,
        sending(store_url, target(at(receiver))) as one,
        sending(store_url, target(at(receiver))) as two,
    ):
        for number in range(20):
            await one.add(at(receiver), number)
        await one.until(lambda: len(receiver.requests) >= 20)

        def ended() -> bool:
            two.bus.flush()
            return len(one.outcomes + two.outcomes) == 20

        await one.until(ended)
    ids = [request.headers["webhook-id"] for request in receiver.requests]
    assert len(ids) == len(set(ids)) == 20


async def test_old_deliveries_are_removed(store_url: str) -> None:
    async with receiving() as receiver, sending(store_url, target(at(receiver))) as place:
        await place.add(at(receiver))
        await place.until(lambda: place.outcomes == ["delivered"])
        place.ahead = KEPT_SECONDS + 3700
        place.sender.wake()

        def left() -> int:
            return len(place.store.run_now(lambda c: c.execute(select(rows.c.id)).all()))

        await place.until(lambda: left() == 0)


async def test_logs_name_the_receiver_without_its_path(store_url: str) -> None:
    async with receiving(status(500), status(204)) as receiver:
        url = f"{receiver.url}/services/T0/hidden"
        async with sending(store_url, target(url)) as place:
            with capture_logs() as logged:
                await place.add(url)
                await place.until(lambda: place.outcomes == ["failed", "delivered"])
    lines = [line for line in logged if line["event"] == "webhook"]
    assert [line["outcome"] for line in lines] == ["failed", "delivered"]
    assert {line["receiver"] for line in lines} == {receiver.url}
    assert {line["type"] for line in lines} == {"batch.completed"}
    assert "hidden" not in str(logged)
    assert "whsec_" not in str(logged)


def delivery(attempts: int, created_at: float = 0.0) -> Delivery:
    return Delivery("wh_1", "alice", None, "e", "o", "u", "origin", "{}", created_at, attempts)


def test_attempts_are_spread_over_a_day_and_the_last_one_ends_it() -> None:
    at_, times = 0.0, [0.0]
    for attempt in range(1, 100):
        next_at = next_attempt(delivery(attempt), at_, DAY, uniform=lambda: 0.5)
        if next_at is None:
            break
        at_ = next_at
        times.append(at_)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps[: len(RETRY_DELAYS)] == pytest.approx(RETRY_DELAYS)
    assert times[-1] == DAY
    assert len(times) == len(RETRY_DELAYS) + 2


@pytest.mark.parametrize("random", [0.0, 0.5, 1.0])
def test_delays_vary(random: float) -> None:
    found = next_attempt(delivery(2), 1000.0, DAY, uniform=lambda: random)
    assert found == pytest.approx(1000 + RETRY_DELAYS[1] * (1 + JITTER * (2 * random - 1)))


def test_retry_after_is_honoured_within_bounds() -> None:
    assert next_attempt(delivery(1), 0.0, DAY, 60.0, uniform=lambda: 0.5) == 60.0
    assert next_attempt(delivery(1), 0.0, DAY, 1.0, uniform=lambda: 0.5) == RETRY_DELAYS[0]
    assert next_attempt(delivery(1), 0.0, DAY, 1e9, uniform=lambda: 0.5) == LONGEST_RETRY_AFTER
    assert next_attempt(delivery(1), 0.0, 100.0, 1e9, uniform=lambda: 0.5) == 100.0


def test_a_gateway_that_was_down_for_a_day_still_tries_some_times() -> None:
    now = 3 * DAY
    for attempt in range(1, LEAST_ATTEMPTS):
        assert (next_attempt(delivery(attempt), now, DAY, uniform=lambda: 0.5) or 0) > now
    assert next_attempt(delivery(LEAST_ATTEMPTS), now, DAY, uniform=lambda: 0.5) is None


async def test_the_store_is_asked_when_something_was_recorded_and_not_before(
    tmp_path: Path,
) -> None:
    """Two processes on one SQLite file: each knows of its own, and the store tells of the other."""
    url, recorded = f"sqlite:///{tmp_path}/store.db", [0]
    with opened(url) as other, opened(url) as plain:
        assert plain.status().up
        store = CountingStore(plain.location, look_seconds=0.01)
        store.start()
        try:
            wait_until(lambda: store.status().up and store.changes >= 2, store)
            async with receiving(status(204), status(204)) as receiver:
                looks = 0

                def count_look() -> int:
                    nonlocal looks
                    looks += 1
                    return recorded[0]

                place = Sending(store, target(at(receiver)), recorded=count_look)
                async with place.running():
                    await place.until(lambda: looks > 10)
                    asked = store.jobs
                    assert asked <= 4  # to remove old ones, and to look when the store tells
                    await place.until(lambda: looks > 20)
                    assert store.jobs == asked
                    await place.add(at(receiver), 1)
                    recorded[0] += 1
                    await place.until(lambda: place.outcomes == ["delivered"])
                    there = Sending(other, target(at(receiver)))
                    await there.add(at(receiver), 2)
                    await place.until(lambda: place.outcomes == ["delivered"] * 2)
        finally:
            store.close(30.0)


async def test_what_a_lost_process_may_have_sent_is_sent_again_when_its_lease_is_over(
    store_url: str,
) -> None:
    async with receiving() as receiver:
        with opened(store_url) as store:
            place = Sending(store, target(at(receiver)))
            await place.add(at(receiver))
            places, now = {WebhookUrl.parse(at(receiver)).origin: 1}, time.time()
            (lost,) = await store.run(job(claim_deliveries, places, now, now + 3600))
            async with place.running():
                await place.until(lambda: place.sender.waiting == 1)
                assert receiver.requests == []
                place.ahead = 3600.0
                place.sender.wake()
                await place.until(lambda: place.outcomes == ["delivered"])
            assert (await place.row()).attempts == 2
    (request,) = receiver.requests
    assert (request.headers["webhook-id"], request.body.decode()) == (lost.id, lost.body)


@asynccontextmanager
async def gateway(folder: Path, **target: Any) -> AsyncIterator[Running]:
    (folder / "hooks.secret").write_text(SECRET)
    settings = {
        "keys": KEYS,
        "webhooks": {
            "targets": [{"secret_file": "hooks.secret", "allow_private": True, **target}],
        },
    }
    async with EmulatedNode() as node, running_gateway(folder, [node.url], settings) as running:
        yield running


def lines(number: int) -> bytes:
    return jsonl(batch_gateway.lines(number, max_tokens=4))


async def create(asked: AsyncOpenAI, content: bytes, **extra: Any) -> str:
    file = await asked.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await asked.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        extra_body=extra,
    )
    return batch.id


def unwrapped(asked: AsyncOpenAI, request: ReceivedRequest) -> tuple[str, str]:
    event: Any = asked.webhooks.unwrap(request.body, request.headers, secret=SECRET)
    return event.type, event.data.id


@pytest.mark.usefixtures("hurried")
async def test_a_batch_that_completes_is_told_and_can_be_fetched_then(tmp_path: Path) -> None:
    async with receiving() as receiver:
        url = f"{receiver.url}/hooks"
        async with gateway(tmp_path, url=url) as running, client(running) as alice:
            id_ = await create(alice, lines(3), webhook_url=f"{url}/job-7")
            await receiver.came(2)
            assert [unwrapped(alice, request) for request in receiver.requests] == [
                ("batch.completed", id_)
            ] * 2
            assert {request.line for request in receiver.requests} == {
                "POST /hooks HTTP/1.1",
                "POST /hooks/job-7 HTTP/1.1",
            }
            ended = await alice.batches.retrieve(id_)
            assert (ended.status, ended.request_counts and ended.request_counts.completed) == (
                "completed",
                3,
            )
            page = (await running.admin.get("/metrics")).text
            assert "llama_gateway_webhook_deliveries_waiting" in page


@pytest.mark.usefixtures("hurried")
async def test_a_batch_that_fails_is_told(tmp_path: Path) -> None:
    async with (
        receiving() as receiver,
        gateway(tmp_path, url=receiver.url) as running,
        client(running) as alice,
    ):
        failed = await create(alice, b"\n\n")
        await receiver.came(1)
        assert unwrapped(alice, receiver.requests[0]) == ("batch.failed", failed)


@pytest.mark.usefixtures("hurried")
async def test_a_webhook_url_that_is_not_listed_for_the_key_makes_no_batch(tmp_path: Path) -> None:
    async with receiving() as receiver:
        url = f"{receiver.url}/hooks"
        async with (
            gateway(tmp_path, url=url, named_only=True, keys=[ALICE.id]) as running,
            client(running) as alice,
            client(running, BOB) as bob,
        ):
            for asked, wrong in ((alice, f"{url}y"), (bob, url)):
                with pytest.raises(openai.BadRequestError) as caught:
                    await create(asked, lines(1), webhook_url=wrong)
                assert caught.value.param == "webhook_url"
                assert (await asked.batches.list()).data == []
    assert receiver.connections == 0


@pytest.mark.usefixtures("hurried")
async def test_neither_logs_nor_the_admin_api_show_secrets(tmp_path: Path) -> None:
    async with receiving() as receiver:
        url = f"{receiver.url}/services/hidden-path"
        async with gateway(tmp_path, url=url) as running, client(running) as alice:
            await create(alice, b"\n")
            await receiver.came(1)
            shown = (await running.admin.get("/admin/config")).text
            assert receiver.url in shown
    log = (tmp_path / "gateway.log").read_text()
    assert receiver.url in log
    for text in (shown, log):
        assert "hidden-path" not in text
        assert SECRET not in text


@pytest.mark.usefixtures("hurried")
async def test_a_background_response_is_told_when_it_has_ended(tmp_path: Path) -> None:
    async with receiving() as receiver:
        url = f"{receiver.url}/hooks"
        async with gateway(tmp_path, url=url) as running, client(running) as alice:
            made = await alice.responses.create(
                model="demo",
                input="hi",
                background=True,
                max_output_tokens=8,
                extra_body={"webhook_url": f"{url}/job-7"},
            )
            await receiver.came(2)
            ended = await alice.responses.retrieve(made.id)
            told = {unwrapped(alice, request) for request in receiver.requests}
            assert told == {(f"response.{ended.status}", made.id)}
            assert ended.status in {"completed", "incomplete"}
            assert {request.line for request in receiver.requests} == {
                "POST /hooks HTTP/1.1",
                "POST /hooks/job-7 HTTP/1.1",
            }


@pytest.mark.usefixtures("hurried")
async def test_a_cancelled_background_response_is_told(tmp_path: Path) -> None:
    async with (
        receiving() as receiver,
        gateway(tmp_path, url=receiver.url) as running,
        client(running) as alice,
    ):
        made = await alice.responses.create(
            model="demo", input="hi", background=True, max_output_tokens=4000
        )
        await alice.responses.cancel(made.id)
        await receiver.came(1)
        assert unwrapped(alice, receiver.requests[0]) == ("response.cancelled", made.id)
