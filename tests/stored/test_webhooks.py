"""Events that are told to receivers: their rows, whom they may go to, and how they are sent."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import re
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI, InvalidWebhookSignatureError, OpenAI
from sqlalchemy import Connection, select

from gateway.config.stored import WebhookSettings, WebhookTarget, WebhookUrl
from gateway.errors import GatewayError
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
    MOST_READ,
    RETRY_DELAYS,
    Delivery,
    DeliveryState,
    PostResult,
    WebhookEvent,
    WebhookEvents,
    WebhookPoster,
    WebhookSender,
    WebhookTargets,
    add_deliveries,
    address_problem,
    claim_deliveries,
    next_attempt,
    record_attempt,
    remove_ended,
    waiting_origins,
)
from gateway.transport.resolver import Resolver
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.store.stores import CountingStore, opened, wait_until
from tests.stored import batch_gateway
from tests.stored.batch_place import jsonl
from tests.stored.receivers import (
    LIMIT,
    OTHER_SECRET,
    SECRET,
    Answer,
    ReceivedRequest,
    Receiver,
    never,
    receiving,
    status,
    target,
)
from tests.stored.stored_rows import NOW, a_batch
from tests.virtual import in_virtual_time, now
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
    assert [origin for origin, _, _ in store.run_now(waiting_origins)] == [A.origin]


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

    def __init__(self, store: Store, *targets: WebhookTarget, **settings: Any) -> None:
        recorded = settings.pop("recorded", None)
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

    async def add(self, receiver: Receiver, number: int = 1) -> None:
        now, url = self.now(), WebhookUrl.parse(at(receiver))
        event = WebhookEvent("batch.completed", f"batch_{number}", "alice", None, now)
        await self.store.run(lambda c: add_deliveries(c, [url], event, now))
        self.sender.wake()

    async def until(self, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            self.bus.flush()
            return condition()

        await until(holds, LIMIT)


@asynccontextmanager
async def sending(store: Store, *receivers: Receiver, **settings: Any) -> AsyncIterator[Sending]:
    place = Sending(store, *(target(at(one)) for one in receivers), **settings)
    task = asyncio.create_task(place.sender.run())
    try:
        yield place
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def at(receiver: Receiver) -> str:
    return f"{receiver.url}/hooks"


async def test_a_failure_is_tried_again_with_the_same_id_and_410_ends_it(store: Store) -> None:
    answers = (status(500), status(302, "location: /x"), status(410))
    async with receiving(*answers) as receiver, sending(store, receiver) as place:
        await place.add(receiver)
        await place.until(lambda: place.outcomes == ["failed", "failed", "refused"])
        row = store.run_now(lambda c: c.execute(select(rows)).one())
        assert (row.state, row.attempts, row.last_error) == ("refused", 3, "status 410")
    ids = {request.headers["webhook-id"] for request in receiver.requests}
    assert len(ids) == 1
    assert len(receiver.requests) == 3
    assert len({request.body for request in receiver.requests}) == 1


async def test_retry_after_leaves_the_whole_receiver_alone(store: Store) -> None:
    answers = (status(429, "retry-after: 60"), status(204))
    async with receiving(*answers) as receiver, sending(store, receiver) as place:
        await place.add(receiver, 1)
        await place.until(lambda: place.outcomes == ["failed"])
        await place.add(receiver, 2)
        await place.until(lambda: place.sender.waiting == 2)
        assert len(receiver.requests) == 1
        place.ahead = 61.0
        place.sender.wake()
        await place.until(lambda: place.outcomes.count("delivered") == 2)


async def test_a_slow_receiver_delays_nobody_elses_events(store: Store) -> None:
    async with receiving(never) as slow, receiving() as quick:
        async with sending(store, slow, quick, timeout=LIMIT) as place:
            for number in range(2 * MOST_OF_ORIGIN):
                await place.add(slow, number)
            await slow.came(MOST_OF_ORIGIN)
            for number in range(MOST_OF_ORIGIN + 1):
                await place.add(quick, number)
            await place.until(lambda: len(place.outcomes) > MOST_OF_ORIGIN)
            # None of the slow one's has ended.
            assert set(place.outcomes) == {"delivered"}
            assert slow.connections == MOST_OF_ORIGIN
        # Those that were cut by the end are due at once, for another process.
        ((_, left, next_at),) = store.run_now(waiting_origins)
        assert (left, next_at <= time.time()) == (2 * MOST_OF_ORIGIN, True)


def next_try(
    attempts: int, now: float = 0.0, seconds: float = DAY, *retry_after: float, random: float = 0.5
) -> float | None:
    delivery = Delivery("wh_1", "alice", None, "e", "o", "u", "origin", "{}", 0.0, attempts)
    return next_attempt(delivery, now, seconds, *retry_after, uniform=lambda: random)


def test_attempts_are_spread_over_a_day_and_the_last_one_ends_it() -> None:
    times: list[float] = [0.0]
    while (at := next_try(len(times), times[-1])) is not None:
        times.append(at)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps[: len(RETRY_DELAYS)] == pytest.approx(RETRY_DELAYS)
    assert times[-1] == DAY
    assert len(times) == len(RETRY_DELAYS) + 2
    # A gateway that was down for a day still tries some times.
    late = [next_try(attempt, 3 * DAY) for attempt in range(1, LEAST_ATTEMPTS + 1)]
    assert late.pop() is None
    assert all(at is not None and at > 3 * DAY for at in late)


def test_delays_vary_and_retry_after_is_honoured_within_bounds() -> None:
    ends = [next_try(2, random=one) for one in (0.0, 1.0)]
    assert ends == pytest.approx([RETRY_DELAYS[1] * (1 + one * JITTER) for one in (-1, 1)])
    assert next_try(1, 0.0, DAY, 60.0) == 60.0
    assert next_try(1, 0.0, DAY, 1.0) == RETRY_DELAYS[0]
    assert next_try(1, 0.0, DAY, 1e9) == LONGEST_RETRY_AFTER
    assert next_try(1, 0.0, 100.0, 1e9) == 100.0


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
        async with receiving() as receiver, sending(store, receiver, recorded=look) as place:
            await place.until(lambda: looks > 10)
            asked = store.jobs
            assert asked <= 4  # to remove old ones, and to look when the store tells
            await place.until(lambda: looks > 20)
            assert store.jobs == asked
            await place.add(receiver, 1)
            recorded += 1
            await place.until(lambda: place.outcomes == ["delivered"])
            await Sending(other).add(receiver, 2)
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


def targets(*given: dict[str, Any]) -> WebhookTargets:
    settings = WebhookSettings(targets=tuple(target(**one) for one in given))
    return WebhookTargets(lambda: settings)


@pytest.mark.parametrize(
    ("owner", "url", "code"),
    [
        ("ci", "https://h.example/other", "webhook_url_not_allowed"),
        ("ci", "https://h.example/hooksy", "webhook_url_not_allowed"),
        ("ci", "https://h.example/hooks%2fx", "invalid_request"),
        ("ci", "https://h.example/", "webhook_url_not_allowed"),
        ("ci", "https://h.example.evil/hooks", "webhook_url_not_allowed"),
        ("bob", "https://h.example/hooks", "webhook_url_not_allowed"),
        ("ci", "https://h.example/hooks/../other", "invalid_request"),
        ("ci", "https://x@h.example/hooks", "invalid_request"),
        ("ci", 7, "invalid_request"),
        ("ci", "", "invalid_request"),
    ],
)
def test_a_url_below_a_target_of_the_key_is_taken_and_no_refusal_tells_of_others(
    owner: str, url: object, code: str
) -> None:
    known = targets({"url": "https://h.example/hooks", "keys": ("ci",)})
    assert known.check("ci", None, "https://H.example:443/hooks/a") == "https://h.example/hooks/a"
    with pytest.raises(GatewayError) as caught:
        known.check(owner, None, url)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, code, "webhook_url")
    assert "/hooks" not in error.message
    assert not error.retryable


def test_an_event_goes_to_the_targets_of_its_key_and_to_the_url_of_its_request() -> None:
    known = targets(
        {"url": "https://all.example"},
        {"url": "https://ci.example", "keys": ("ci",)},
        {"url": "https://night.example", "groups": ("night",), "events": ("batch.failed",)},
        {"url": "https://named.example/a", "named_only": True},
    )

    def sent(owner: str, group: str | None, event: str, named: str | None = None) -> list[str]:
        return [url.host for url in known.receivers(owner, group, event, named)]

    assert sent("bob", None, "batch.completed") == ["all.example"]
    assert sent("ci", None, "batch.completed") == ["all.example", "ci.example"]
    assert sent("bob", "night", "batch.completed") == ["all.example"]
    assert sent("bob", "night", "batch.failed") == ["all.example", "night.example"]
    named = "https://named.example/a/7"
    assert sent("bob", None, "batch.failed", named) == ["all.example", "named.example"]
    # The target is gone, or is not this key's any more.
    assert sent("bob", None, "batch.failed", "https://ci.example/x") == ["all.example"]
    assert sent("bob", None, "batch.failed", "what was never checked") == ["all.example"]
    # No URL gets an event twice.
    assert sent("bob", None, "batch.failed", "https://all.example/") == ["all.example"]


PUBLIC = [
    "1.1.1.1", "8.8.8.8", "100.128.0.1", "172.32.0.1", "2606:4700::1111",
    "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1",
]  # fmt: skip
PRIVATE = [
    "127.0.0.1", "127.255.0.1", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1",
    "fec0::1", "100.64.0.1", "100.127.255.255", "198.18.0.1", "::1", "fd00::1", "fc00::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "::10.0.0.1",
    "64:ff9b::10.0.0.1", "64:ff9b::127.0.0.1", "2002:7f00:1::", "2002:a00:1::1",
    # Of nobody: nothing answers there.
    "0.1.2.3", "192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "2001::1",
]  # fmt: skip
NEVER = [
    "0.0.0.0", "169.254.169.254", "169.254.0.1", "224.0.0.1", "239.1.1.1",
    "240.0.0.1", "255.255.255.255", "::", "fe80::1", "fe80::1%lo", "ff02::1",
    "100::1", "64:ff9b:1::1",
    "::ffff:169.254.169.254", "64:ff9b::169.254.169.254", "2002:a9fe:a9fe::", "4000::1",
    "::ffff:0.0.0.0", "::ffff:224.0.0.1", "not an address", "",
]  # fmt: skip


@each_case("address", PUBLIC)
def test_public_addresses_are_taken_by_http_only_where_it_is_allowed(address: str) -> None:
    assert address_problem(address, target("https://h", allow_private=False), "https") is None
    assert address_problem(address, target("https://h"), "https") is None
    assert address_problem(address, target("http://h"), "http") is not None
    assert address_problem(address, target("http://h", allow_http=True), "http") is None


@each_case("address", PRIVATE)
def test_private_addresses_are_taken_where_the_target_allows_them(address: str) -> None:
    problem = address_problem(address, target("https://h", allow_private=False), "https")
    assert problem == "is private or loopback"
    assert address_problem(address, target("https://h"), "https") is None
    assert address_problem(address, target("http://h"), "http") is None


@each_case("address", NEVER)
def test_other_addresses_are_never_taken(address: str) -> None:
    assert address_problem(address, target("https://h", allow_http=True), "https") is not None


@given(st.ip_addresses())
def test_no_address_that_python_calls_not_global_is_taken(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    taken = address_problem(str(address), target("https://h", allow_private=False), "https") is None
    if taken and isinstance(address, ipaddress.IPv4Address):
        assert address.is_global
        assert not address.is_multicast
    if taken:
        mapped = ipaddress.IPv6Address(f"::ffff:{address}") if address.version == 4 else address
        public = target("https://h", allow_private=False)
        assert address_problem(str(mapped), public, "https") is None


BODY = '{"object":"event","id":"evt_1","type":"batch.completed","created_at":1,"data":{"id":"b"}}'


def poster(*addresses: str) -> WebhookPoster:
    """A poster by which every name has these addresses; without them, the system's."""
    resolver = Resolver(lambda _: list(addresses)) if addresses else Resolver()
    return WebhookPoster(resolver, time.time)


async def post(
    url: str, poster_: WebhookPoster | None = None, timeout: float = 10.0, **more: Any
) -> PostResult:
    secrets = more.pop("secrets", (SECRET,))
    given: WebhookTarget = target(url, *secrets, **more)
    return await (poster_ or poster()).post(given, WebhookUrl.parse(url), "wh_1", BODY, timeout)


def local(receiver: Receiver, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{receiver.port}/hooks/a%C3%A9?b=c"


async def test_an_event_is_posted_as_standard_webhooks_says_and_openais_client_verifies() -> None:
    async with receiving() as receiver:
        assert await post(local(receiver), secrets=(OTHER_SECRET, SECRET)) == PostResult(204)
    (request,) = receiver.requests
    assert request.line == "POST /hooks/a%C3%A9?b=c HTTP/1.1"
    assert request.body == BODY.encode()
    headers = request.headers
    assert headers["host"] == f"127.0.0.1:{receiver.port}"
    assert headers["content-type"] == "application/json"
    assert headers["user-agent"].startswith("llama-gateway/")
    assert "authorization" not in headers
    client = OpenAI(api_key="x", webhook_secret=SECRET)
    for secret in (SECRET, OTHER_SECRET):
        event: Any = client.webhooks.unwrap(request.body, headers, secret=secret)
        assert (event.type, event.data.id) == ("batch.completed", "b")
    for body, id_ in ((request.body + b" ", "wh_1"), (request.body, "wh_2")):
        with pytest.raises(InvalidWebhookSignatureError):
            client.webhooks.unwrap(body, {**headers, "webhook-id": id_})


@each_case("code", [200, 204, 299, 302, 307, 400, 410, 429, 503])
async def test_only_a_success_will_do_and_no_redirect_is_followed(code: int) -> None:
    async with receiving() as other:
        answer = status(code, "retry-after: 7", f"location: http://127.0.0.1:{other.port}/")
        async with receiving(answer) as receiver:
            result = await post(local(receiver))
    assert (result.status, result.error is None) == (code, code < 300)
    assert result.retry_after == (None if code < 300 else 7.0)
    assert other.connections == 0


async def drip(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    for _ in range(1000):
        writer.write(b"x: y\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("answer", [never, drip])
@in_virtual_time
async def test_a_receiver_that_answers_nothing_or_byte_by_byte_is_cut_by_the_timeout(
    answer: Answer,
) -> None:
    async with receiving(answer) as receiver:
        begin = now()
        result = await post(local(receiver), timeout=0.3)
        assert now() - begin < 0.5
    assert result == PostResult(None, "no answer within 0.3 s")


async def test_what_is_no_answer_is_a_failure_whose_words_tell_no_secret() -> None:
    async def nonsense(writer: asyncio.StreamWriter) -> None:
        writer.write(b"SECRET nonsense\r\n\r\n")

    async def close(writer: asyncio.StreamWriter) -> None:
        writer.close()

    def look_up(_: str) -> list[str]:
        raise OSError(-2, "Name or service not known")

    async with receiving(nonsense, close) as receiver:
        url = local(receiver)
        results = [(await post(url), "no valid answer") for _ in range(2)]
    results.append((await post(url), "no connection to 127.0.0.1"))
    unknown = WebhookPoster(Resolver(look_up), time.time)
    results.append((await post("https://nowhere.example/hooks", unknown), "can't be resolved"))
    for result, words in results:
        assert result.status is None
        assert words in (result.error or "")
        assert "SECRET" not in (result.error or "")
        assert "hooks" not in (result.error or "")


async def test_no_more_than_a_little_of_an_endless_answer_is_read() -> None:
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
            await writer.drain()
            sent += 0x1000

    async with receiving(endless) as receiver:
        assert await post(local(receiver)) == PostResult(200)
    assert sent < 16 << 20  # what sockets hold
    assert MOST_READ <= 4096


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving() as proxy, receiving() as receiver:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert (await post(local(receiver))).status == 204
    assert proxy.connections == 0


async def test_a_name_that_leads_to_loopback_is_refused_unless_allowed() -> None:
    async with receiving() as receiver:
        url = local(receiver, "hooks.example.org")
        refused = await post(url, poster("127.0.0.1"), allow_private=False, allow_http=True)
        assert receiver.connections == 0
        assert await post(url, poster("127.0.0.1")) == PostResult(204)
    assert refused.error == "its address 127.0.0.1 is private or loopback"
    assert receiver.requests[0].headers["host"] == f"hooks.example.org:{receiver.port}"


@pytest.mark.parametrize("bad", ["10.1.2.3", "169.254.169.254", "::1", "::ffff:127.0.0.1"])
async def test_one_address_that_is_not_allowed_refuses_the_name(bad: str) -> None:
    for addresses in (["8.8.8.8", bad], [bad, "8.8.8.8"]):
        result = await post(
            "https://hooks.example.org/", poster(*addresses), allow_private=False, timeout=2
        )
        assert result.error is not None
        assert result.error.startswith(f"its address {bad} ")


async def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """DNS rebinding: whatever the name has next, nobody asks for it between check and connect."""
    asked = 0
    async with receiving() as good, receiving(host="127.0.0.2") as bad:

        def look_up(_: str) -> list[str]:
            nonlocal asked
            asked += 1
            return ["127.0.0.1"] if asked == 1 else ["127.0.0.2"]

        sender = WebhookPoster(Resolver(look_up), time.time)
        assert (await post(local(good, "rebinding.example"), sender)).status == 204
    assert (asked, good.connections, bad.connections) == (1, 1, 0)


async def test_a_resolver_that_hangs_is_cut_by_the_timeout() -> None:
    over = threading.Event()

    def look_up(_: str) -> list[str]:
        over.wait(120)
        return []

    sender = WebhookPoster(Resolver(look_up), time.time)
    begin = time.monotonic()
    assert (await post("https://slow.example/", sender, timeout=0.2)).status is None
    assert time.monotonic() - begin < 60
    over.set()


async def test_the_certificate_is_checked_for_the_name_not_for_the_address(tmp_path: Path) -> None:
    authority, ca = trustme.CA(), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("hooks.example.org").configure_cert(tls)
    async with receiving(tls=tls) as receiver:
        sender = poster("127.0.0.1")
        named = f"https://hooks.example.org:{receiver.port}/x"
        assert await post(named, sender, ca=ca) == PostResult(204)
        assert receiver.server_names == ["hooks.example.org"]
        # Another name at the same address; the address itself; and an authority that is not known.
        other = await post(f"https://other.example.org:{receiver.port}/x", sender, ca=ca)
        bare = await post(f"https://127.0.0.1:{receiver.port}/x", sender, ca=ca)
        unknown = await post(named, sender)
    assert len(receiver.requests) == 1
    for result in (other, bare, unknown):
        assert result.status is None
        assert "certificate" in (result.error or "")


PAGE = Path(__file__).parents[2] / "docs" / "webhooks.md"


async def test_the_receiver_of_the_page_takes_what_is_signed_and_refuses_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    monkeypatch.setenv("OPENAI_WEBHOOK_SECRET", SECRET)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    async with receiving() as receiver:
        for secrets in ((SECRET,), (OTHER_SECRET, SECRET), (OTHER_SECRET,)):
            await post(local(receiver), secrets=secrets)
    transport = httpx.ASGITransport(names["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://receiver") as client:
        results = [
            await client.post("/hooks", content=one.body, headers=one.headers)
            for one in receiver.requests
        ]
    assert [result.status_code for result in results] == [204, 204, 400]
    # The second was the same event again.
    assert capsys.readouterr().out == "batch.completed b\n"
