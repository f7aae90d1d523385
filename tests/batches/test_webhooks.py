"""Deliveries from the store to real receivers: retries, slow receivers, what survives a kill."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from structlog.testing import capture_logs

from gateway.batches.webhook_receivers import WebhookPoster, WebhookTargets
from gateway.batches.webhooks import (
    JITTER,
    KEPT_SECONDS,
    LEAST_ATTEMPTS,
    LONGEST_RETRY_AFTER,
    MOST_OF_ORIGIN,
    RETRY_DELAYS,
    Delivery,
    RetryPolicy,
    WebhookEvent,
    WebhookSender,
    add_deliveries,
    waiting_origins,
)
from gateway.config.webhooks import WebhookSettings, WebhookTarget, WebhookUrl
from gateway.events import EventBus, WebhookAttempted
from gateway.store.schema import webhook_deliveries as rows
from gateway.store.store import Store
from gateway.transport.resolver import Resolver
from tests.batches.receivers import LIMIT, Receiver, never, receiving, status, target
from tests.store.stores import opened, wait_until

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
            policy=RetryPolicy((0.05,)),
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
    return f"http://127.0.0.1:{receiver.port}/hooks"


async def test_an_event_is_delivered_once(store_url: str) -> None:
    async with receiving() as receiver, sending(store_url, target(at(receiver))) as place:
        await place.add(at(receiver))
        await place.until(lambda: place.outcomes == ["delivered"])
        row = await place.row()
        assert (row.state, row.attempts, row.last_error) == ("delivered", 1, None)
        await place.until(lambda: place.sender.waiting == 0)
    assert len(receiver.requests) == 1


async def test_a_failure_is_tried_again_with_the_same_id_and_a_signature_of_its_own(
    store_url: str,
) -> None:
    answers = (status(500), status(302, "location: /x"), status(204))
    async with receiving(*answers) as receiver, sending(store_url, target(at(receiver))) as place:
        await place.add(at(receiver))
        await place.until(lambda: place.outcomes == ["failed", "failed", "delivered"])
        assert (await place.row()).attempts == 3
    ids = {request.headers["webhook-id"] for request in receiver.requests}
    assert len(ids) == 1
    assert len(receiver.requests) == 3
    assert len({request.body for request in receiver.requests}) == 1


async def test_410_ends_it(store_url: str) -> None:
    async with (
        receiving(status(410)) as receiver,
        sending(store_url, target(at(receiver))) as place,
    ):
        await place.add(at(receiver))
        await place.until(lambda: place.outcomes == ["refused"])
        row = await place.row()
        assert (row.state, row.last_error) == ("refused", "status 410")


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


async def test_a_target_that_was_removed_gets_nothing_and_may_come_back(store_url: str) -> None:
    async with receiving() as receiver, sending(store_url) as place:
        await place.add(at(receiver))
        await place.until(lambda: place.outcomes.count("failed") >= 2)
        assert receiver.connections == 0
        assert "no target" in (await place.row()).last_error
        place.settings = WebhookSettings(targets=(target(at(receiver)),))
        await place.until(lambda: "delivered" in place.outcomes)


async def test_a_target_of_another_key_is_not_used(store_url: str) -> None:
    async with receiving() as receiver:
        others = target(at(receiver), keys=("bob",))
        async with sending(store_url, others) as place:
            await place.add(at(receiver))
            await place.until(lambda: place.outcomes.count("failed") >= 2)
    assert receiver.connections == 0


async def test_what_another_process_has_added_is_found(store_url: str) -> None:
    async with receiving() as receiver, sending(store_url, target(at(receiver))) as place:
        with opened(store_url) as other:
            url = WebhookUrl.parse(at(receiver))
            event = WebhookEvent("batch.failed", "batch_1", "alice", None, time.time())
            other.run_now(lambda c: add_deliveries(c, [url], event, time.time()))
        await place.until(lambda: place.outcomes == ["delivered"])


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
        url = f"http://127.0.0.1:{receiver.port}/services/T0/hidden"
        async with sending(store_url, target(url)) as place:
            with capture_logs() as logged:
                await place.add(url)
                await place.until(lambda: place.outcomes == ["failed", "delivered"])
    lines = [line for line in logged if line["event"] == "webhook"]
    assert [line["outcome"] for line in lines] == ["failed", "delivered"]
    assert {line["receiver"] for line in lines} == {f"http://127.0.0.1:{receiver.port}"}
    assert {line["type"] for line in lines} == {"batch.completed"}
    assert "hidden" not in str(logged)
    assert "whsec_" not in str(logged)


# Policy.


def delivery(attempts: int, created_at: float = 0.0) -> Delivery:
    return Delivery("wh_1", "alice", None, "e", "o", "u", "origin", "{}", created_at, attempts)


def test_attempts_are_spread_over_a_day_and_the_last_one_ends_it() -> None:
    policy = RetryPolicy(uniform=lambda: 0.5)
    at_, times = 0.0, [0.0]
    for attempt in range(1, 100):
        next_at = policy.next_attempt(delivery(attempt), at_, DAY)
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
    policy = RetryPolicy(uniform=lambda: random)
    found = policy.next_attempt(delivery(2), 1000.0, DAY)
    assert found == pytest.approx(1000 + RETRY_DELAYS[1] * (1 + JITTER * (2 * random - 1)))


def test_retry_after_is_honoured_within_bounds() -> None:
    policy = RetryPolicy(uniform=lambda: 0.5)
    assert policy.next_attempt(delivery(1), 0.0, DAY, 60.0) == 60.0
    assert policy.next_attempt(delivery(1), 0.0, DAY, 1.0) == RETRY_DELAYS[0]
    assert policy.next_attempt(delivery(1), 0.0, DAY, 1e9) == LONGEST_RETRY_AFTER
    assert policy.next_attempt(delivery(1), 0.0, 100.0, 1e9) == 100.0


def test_a_gateway_that_was_down_for_a_day_still_tries_some_times() -> None:
    policy = RetryPolicy(uniform=lambda: 0.5)
    now = 3 * DAY
    for attempt in range(1, LEAST_ATTEMPTS):
        assert (policy.next_attempt(delivery(attempt), now, DAY) or 0) > now
    assert policy.next_attempt(delivery(LEAST_ATTEMPTS), now, DAY) is None


# Kill.


class CountingStore(Store):
    """Counts the jobs that it is asked for."""

    jobs = 0

    async def run(self, *values: Any, **named: Any) -> Any:
        self.jobs += 1
        return await super().run(*values, **named)


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


_PROCESS = """
import asyncio, sys, time
from pathlib import Path
from gateway.batches.webhook_receivers import WebhookPoster
from gateway.batches.webhook_receivers import WebhookTargets
from gateway.batches.webhooks import WebhookSender
from gateway.config.webhooks import WebhookSettings
from gateway.events import EventBus
from gateway.store.database import locate_store
from gateway.store.store import Store
from gateway.transport.resolver import Resolver
from tests.batches.receivers import target

async def main(store_url, url):
    store = Store(locate_store(store_url, Path("unused")))
    store.start()
    await store.wait_opened(30)
    settings = WebhookSettings(targets=(target(url),), timeout=30)
    poster = WebhookPoster(Resolver(), time.time)
    sender = WebhookSender(
        store, WebhookTargets(lambda: settings), lambda: settings, poster, EventBus()
    )
    await sender.run()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
async def test_a_kill_between_sending_and_recording_sends_it_again(store_url: str) -> None:
    """The receiver has the event, and the process that sent it dies before it can know."""
    async with receiving(never, status(204)) as receiver:
        process: asyncio.subprocess.Process | None = None
        try:
            with opened(store_url) as store:
                place = Sending(store, target(at(receiver)))
                await place.add(at(receiver))
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", _PROCESS, store_url, at(receiver)),
                    cwd=Path(__file__).parents[2],
                )
                await receiver.came(1)
                process.kill()
                await process.wait()
                row = await place.row()
                assert (row.state, row.attempts) == ("waiting", 1)
                assert row.next_at > time.time()
                async with place.running():
                    place.ahead = row.next_at - time.time()  # its lease is over
                    place.sender.wake()
                    await place.until(lambda: place.outcomes == ["delivered"])
                assert (await place.row()).attempts == 2
        finally:
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
    first, second = receiver.requests
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.body == second.body
