"""The rows of deliveries, on stores of both kinds."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from sqlalchemy import Connection, select

from gateway.config.stored import WebhookSettings, WebhookTarget, WebhookUrl
from gateway.events import EventBus, WebhookAttempted
from gateway.store.schema import webhook_deliveries as rows
from gateway.store.store import Store
from gateway.stored.claims import BatchState
from gateway.stored.folder import job
from gateway.stored.webhooks import (
    JITTER,
    LEAST_ATTEMPTS,
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
from tests.stored.stored_rows import NOW, a_batch
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
    asked = select(rows).where(rows.c.id == id_)
    return store.run_now(lambda c: c.execute(asked).one())


def test_an_event_is_one_row_for_each_url_however_often_it_is_added(store: Store) -> None:
    ids = add(store, A, B)
    assert add(store, A, B) == ids
    assert len(told(store)) == len(set(ids)) == 2
    first, second = claim(store, a=5)[0], claim(store, b=5)[0]
    assert first.body == second.body
    body = json.loads(first.body)
    assert body.pop("id").startswith("evt_")
    assert body == {
        "object": "event",
        "type": "batch.completed",
        "created_at": int(NOW),
        "data": {"id": "batch_1"},
    }
    assert (first.owner, first.group_name, first.url) == ("alice", "night", str(A))


def test_a_claimed_delivery_is_nobody_elses_until_its_lease_ends(store: Store) -> None:
    add(store, A)
    (first,) = claim(store, a=1)
    assert claim(store, a=1) == []
    assert claim(store, now=NOW + 29, a=1) == []
    (again,) = claim(store, now=NOW + 30, a=1)
    assert (again.id, again.body, again.attempts) == (first.id, first.body, 2)


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


def told(store: Store) -> list[tuple[str, str, str, float, float]]:
    asked = select(rows.c.event, rows.c.object_id, rows.c.url, rows.c.created_at, rows.c.next_at)
    return [
        tuple(row) for row in store.run_now(lambda c: c.execute(asked.order_by(rows.c.url)).all())
    ]


@pytest.mark.parametrize(
    "state",
    [BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED],
)
def test_a_batch_is_told_once_it_has_ended_to_all_and_to_whom_it_names(
    store: Store, state: BatchState
) -> None:
    all_, named = target("https://all.example"), target("https://named.example", named_only=True)
    settings = WebhookSettings(targets=(all_, named))
    events = WebhookEvents(WebhookTargets(lambda: settings), lambda: NOW + 7)
    ended = a_batch(state=state, ended_at=NOW, webhook_url="https://named.example/x")

    def job(connection: Connection) -> None:
        events.batch_ended(connection, ended)
        raise RuntimeError("the batch could not be ended")

    with pytest.raises(RuntimeError):
        store.run_now(job)
    store.run_now(lambda c: events.batch_ended(c, replace(ended, state=BatchState.IN_PROGRESS)))
    assert told(store) == []
    for _ in range(2):
        store.run_now(lambda c: events.batch_ended(c, ended))
    assert told(store) == [
        (f"batch.{state}", ended.id, "https://all.example/", NOW, NOW + 7),
        (f"batch.{state}", ended.id, "https://named.example/x", NOW, NOW + 7),
    ]


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
        self.ahead = 0.0
        """Seconds by which the sender's clock is ahead."""
        self.sender = WebhookSender(
            store, WebhookTargets(lambda: self.settings), lambda: self.settings,
            WebhookPoster(Resolver(), self.now), self.bus, delays=(0.05,), now=self.now,
            poll_seconds=0.02, close_seconds=0.05, recorded=recorded,
        )  # fmt: skip

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


def test_delays_vary_and_retry_after_is_honoured_within_bounds() -> None:
    ends = [next_attempt(delivery(2), 0.0, DAY, uniform=lambda: one) for one in (0.0, 1.0)]  # noqa: B023
    assert ends == pytest.approx([RETRY_DELAYS[1] * (1 + one * JITTER) for one in (-1, 1)])
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
    url, recorded, looks = f"sqlite:///{tmp_path}/store.db", 0, 0

    def look() -> int:
        nonlocal looks
        looks += 1
        return recorded

    with opened(url) as other, opened(url, CountingStore, look_seconds=0.01) as store:
        assert isinstance(store, CountingStore)
        wait_until(lambda: store.changes >= 2, store)
        async with receiving(status(204), status(204)) as receiver:
            place = Sending(store, target(at(receiver)), recorded=look)
            async with place.running():
                await place.until(lambda: looks > 10)
                asked = store.jobs
                assert asked <= 4  # to remove old ones, and to look when the store tells
                await place.until(lambda: looks > 20)
                assert store.jobs == asked
                await place.add(at(receiver), 1)
                recorded += 1
                await place.until(lambda: place.outcomes == ["delivered"])
                await Sending(other, target(at(receiver))).add(at(receiver), 2)
                await place.until(lambda: place.outcomes == ["delivered"] * 2)


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
async def test_a_batch_and_a_response_are_told_when_they_have_ended_without_secrets_in_logs(
    tmp_path: Path,
) -> None:
    async with receiving() as receiver:
        url = f"{receiver.url}/hidden-path"
        async with gateway(tmp_path, url=url) as running, client(running) as alice:
            batch = await create(alice, lines(3), webhook_url=f"{url}/job-7")
            await receiver.came(2)
            of_batch = [("batch.completed", batch)] * 2
            assert [unwrapped(alice, one) for one in receiver.requests] == of_batch
            assert (await alice.batches.retrieve(batch)).status == "completed"
            made = await alice.responses.create(
                model="demo", input="hi", background=True, max_output_tokens=8,
                extra_body={"webhook_url": f"{url}/job-7"},
            )  # fmt: skip
            await receiver.came(4)
            ended = await alice.responses.retrieve(made.id)
            assert ended.status in {"completed", "incomplete"}
            of_response = [(f"response.{ended.status}", made.id)] * 2
            assert [unwrapped(alice, one) for one in receiver.requests[2:]] == of_response
            paths = [one.line.split(" ")[1] for one in receiver.requests]
            assert sorted(paths) == ["/hidden-path"] * 2 + ["/hidden-path/job-7"] * 2
            page = (await running.admin.get("/metrics")).text
            assert "llama_gateway_webhook_deliveries_waiting" in page
            shown = (await running.admin.get("/admin/config")).text
    for text in (shown, (tmp_path / "gateway.log").read_text()):
        assert receiver.url in text
        assert "hidden-path" not in text
        assert SECRET not in text


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
