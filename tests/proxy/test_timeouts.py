"""How long a node may take, and what excuses its silence."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from gateway.config.routing import TimeoutSettings
from gateway.fleet.health import another_prefills
from gateway.fleet.node import Lease
from gateway.fleet.slot_occupancy import LeasePhase
from gateway.proxy.attempt import (
    REPORT_INTERVAL,
    Attempt,
    AttemptTimeouts,
    TimeoutMonitor,
    passed_timeout,
    timeouts_for,
)
from gateway.transport.errors import UpstreamError
from tests.emulator import EmulatedNode
from tests.fleet.build import Clock, a_node, take
from tests.gateways import until
from tests.proxy.fake_lease_service import a_granted_lease, a_proxy_request
from tests.proxy.proxy_over_nodes import GENERATION_PATHS, proxy_over
from tests.virtual import in_virtual_time, now

LIMITS = AttemptTimeouts(first_byte=60.0, silence=20.0, deadline=1000.0)


def outcome(lease: Lease, limits: AttemptTimeouts, now: float) -> str | None:
    error = passed_timeout(limits, 100.0, lease.last_content_at, now)
    return None if error is None else error.limit


def test_the_first_content_has_its_own_timeout() -> None:
    node = a_node(Clock(100.0))
    lease = take(node)
    assert outcome(lease, LIMITS, 159.9) is None
    assert outcome(lease, LIMITS, 160.0) == "first_byte"
    lease.head_received(150.0)  # the head is no progress
    assert outcome(lease, LIMITS, 160.0) == "first_byte"


def test_silence_counts_from_the_last_content() -> None:
    node = a_node(Clock(100.0))
    lease = take(node)
    lease.content_received(130.0)
    assert outcome(lease, LIMITS, 149.9) is None
    assert outcome(lease, LIMITS, 150.0) == "silence"
    lease.last_content_at = 150.0
    assert outcome(lease, LIMITS, 160.0) is None


def test_a_plain_response_has_the_total_timeout_alone() -> None:
    limits = AttemptTimeouts(first_byte=None, silence=20.0, deadline=1000.0)
    lease = take(a_node(Clock(100.0)))
    assert outcome(lease, limits, 999.0) is None
    assert outcome(lease, limits, 1000.0) == "total"


@dataclass(eq=False)
class WatchedAttempt:
    """An attempt as the monitor sees it."""

    lease: Lease
    timeouts: AttemptTimeouts
    sent_at: float = 100.0
    client_lagging: bool = False
    complete: bool = False
    failure: UpstreamError | None = None
    reports: int = 0
    """How often it was asked to report its progress."""

    @property
    def last_content_at(self) -> float | None:
        return self.lease.last_content_at

    def is_silence_excused(self) -> bool:
        return another_prefills(self.lease, self.lease.node.clock())

    def report_progress(self) -> None:
        self.reports += 1

    def report_received(self) -> None:
        self.lease.release()

    def fail(self, error: UpstreamError) -> None:
        self.failure = error


def as_attempt(attempt: WatchedAttempt) -> Attempt:
    return cast("Attempt", attempt)


async def limits_of(clock: Clock, attempt: WatchedAttempt) -> Callable[[float], str | None]:
    watch = TimeoutMonitor(clock)
    watch.add(as_attempt(attempt))

    def look(now: float) -> str | None:
        clock.now = now
        watch.close()
        watch.check()
        watch.close()
        return None if attempt.failure is None else getattr(attempt.failure, "limit", "other")

    return look


@pytest.mark.parametrize("moved", [False, True])
@in_virtual_time
async def test_another_requests_prefill_excuses_silence(moved: bool) -> None:
    clock = Clock(100.0)
    node = a_node(clock)
    lease, reading = take(node), take(node)
    if moved:
        lease.content_received(130.0)
    look = await limits_of(clock, WatchedAttempt(lease, LIMITS))
    reading.head_received(140.0)
    assert look(165.0) is None
    assert look(190.0) is None
    reading.content_received(190.1)
    # Content must come soon, not at once.
    assert look(190.2) is None
    assert look(194.9) is None
    assert look(195.1) == ("silence" if moved else "first_byte")


@in_virtual_time
async def test_another_requests_prefill_does_not_excuse_silence_for_ever() -> None:
    clock = Clock(100.0)
    node = a_node(clock)
    lease, reading = take(node), take(node)
    look = await limits_of(clock, WatchedAttempt(lease, LIMITS))
    reading.head_received(140.0)
    # 60 s of prefill are an excuse, more only if more was expected.
    assert look(199.0) is None
    assert look(205.0) == "first_byte"


@in_virtual_time
async def test_nothing_excuses_the_total_timeout() -> None:
    clock = Clock(100.0)
    node = a_node(clock)
    lease = take(node)
    take(node, expected_prefill=10_000.0)
    look = await limits_of(clock, WatchedAttempt(lease, LIMITS, client_lagging=True))
    assert look(999.0) is None
    assert look(1000.0) == "total"


@in_virtual_time
async def test_silence_of_a_node_whose_client_lags_is_excused() -> None:
    clock = Clock(100.0)
    lease = take(a_node(clock))
    lease.content_received(101.0)
    attempt = WatchedAttempt(lease, LIMITS, client_lagging=True)
    look = await limits_of(clock, attempt)
    assert look(500.0) is None
    attempt.client_lagging = False
    assert look(504.0) is None
    assert look(505.0) == "silence"


@in_virtual_time
async def test_the_scheduler_is_told_of_moving_streams_once_a_second() -> None:
    clock = Clock(100.0)
    attempt = WatchedAttempt(take(a_node(clock)), LIMITS)
    look = await limits_of(clock, attempt)
    for number in range(100):
        assert look(100.0 + number / 10) is None
    assert attempt.reports == 10 / REPORT_INTERVAL


@dataclass(eq=False)
class EndingAnother(WatchedAttempt):
    """An attempt whose failure ends another one."""

    on_fail: Callable[[], None] = lambda: None

    def fail(self, error: UpstreamError) -> None:
        self.failure = error
        self.on_fail()


@in_virtual_time
async def test_an_attempt_that_ends_with_another_one_is_left_alone() -> None:
    clock = Clock(100.0)
    node = a_node(clock)
    first = EndingAnother(take(node), LIMITS)
    other = WatchedAttempt(take(node), LIMITS, complete=True)
    monitor = TimeoutMonitor(clock)
    monitor.add(as_attempt(first))
    monitor.add(as_attempt(other))
    first.on_fail = lambda: monitor.remove(as_attempt(other))
    monitor.close()
    clock.now = 1000.0
    monitor.check()
    monitor.close()
    assert first.failure is not None
    assert other.failure is None
    assert other.lease.phase is not LeasePhase.RELEASED, "it was not looked at any more"
    assert not len(monitor)


@in_virtual_time
async def test_a_whole_response_frees_the_slots_before_its_client_has_read_it() -> None:
    clock = Clock(100.0)
    attempt = WatchedAttempt(take(a_node(clock)), LIMITS, complete=True)
    look = await limits_of(clock, attempt)
    assert look(101.0) is None
    assert attempt.lease.phase is LeasePhase.RELEASED


@pytest.mark.parametrize(("grace", "limit"), [(40.0, 60.0), (400.0, 400.0), (0.0, 60.0)])
def test_a_long_prompt_on_a_slow_node_has_a_longer_timeout(grace: float, limit: float) -> None:
    lease = a_granted_lease(prefill_grace=grace)
    assert timeouts_for(lease, a_proxy_request(), TimeoutSettings(first_byte=60.0)) == (
        AttemptTimeouts(limit, TimeoutSettings().silence, TimeoutSettings().total)
    )


@in_virtual_time
async def test_a_stream_that_falls_silent_is_ended(tmp_path: Path) -> None:
    one = EmulatedNode(answer_tokens=40)
    async with proxy_over(tmp_path, one, timeouts={"silence": 0.3}) as proxy:
        one.faults.next("hang", after_events=10)
        began = now()
        reply = await proxy.stream()
        assert 0.3 <= now() - began < 0.5
        assert reply.errors[0]["code"] == "node_timeout"
        await until(lambda: one.busy == 0)


@in_virtual_time
async def test_comments_do_not_prevent_the_silence_timeout(tmp_path: Path) -> None:
    one = EmulatedNode(prefill_tps=1, ping_interval=0.05)
    async with proxy_over(
        tmp_path, one, timeouts={"first_byte": 0.4}, retries={"attempts": 1}
    ) as proxy:
        proxy.node("a").speed.learn_timings({"prompt_n": 10_000, "prompt_ms": 1000})
        reply = await proxy.stream()
        assert (reply.status, reply.headers["x-gateway-reason"]) == (504, "node_timeout")
        assert reply.headers["x-should-retry"] == "false"
        await one.kill()  # it would read on for a minute


@in_virtual_time
async def test_the_first_byte_timeout_grows_with_the_expected_prefill(tmp_path: Path) -> None:
    one = EmulatedNode(prefill_tps=40, answer_tokens=2)
    async with proxy_over(
        tmp_path, one, timeouts={"first_byte": 0.3}, retries={"attempts": 1}
    ) as proxy:
        # Its speed is unknown, so the timeout is long.
        words = " ".join(40 * ["word"])
        reply = await proxy.stream(messages=[{"role": "user", "content": words}])
        assert (reply.status, reply.errors) == (200, [])


@in_virtual_time
async def test_silence_is_excused_while_another_prompt_is_read(tmp_path: Path) -> None:
    one = EmulatedNode(
        slots=2, answer_tokens=60, decode_tps=60, prefill_tps=120, prefill_stalls=True
    )
    async with proxy_over(tmp_path, one, timeouts={"silence": 0.3}) as proxy:
        first = asyncio.create_task(proxy.stream())
        node = proxy.node("a")
        await until(lambda: any(lease.phase is LeasePhase.DECODE for lease in node.leases))
        words = " ".join(120 * ["word"])
        second = asyncio.create_task(
            proxy.stream(messages=[{"role": "user", "content": words}], max_tokens=2)
        )
        one_reply, other = await asyncio.gather(first, second)
        assert (one_reply.errors, other.errors) == ([], [])


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_the_clients_deadline_ends_a_request_and_blames_no_node(
    tmp_path: Path, stream: bool
) -> None:
    one = EmulatedNode(prefill_tps=1)
    async with proxy_over(tmp_path, one) as proxy:
        began = now()
        reply = await proxy.ask(stream=stream, headers={"X-Request-Timeout": "0.3"})
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (504, "node_timeout")
        assert reply.headers["x-should-retry"] == "false"
        assert 0.3 <= now() - began < 0.5
        assert proxy.node("a").failures == 0
        assert one.requests == 1
        await one.kill()  # it would read on for a minute
        await until(lambda: proxy.node("a").leased == 0)


@pytest.mark.parametrize("answers", [True, False])
async def test_a_gateway_that_was_held_up_reads_before_it_checks_timeouts(answers: bool) -> None:
    clock, loop = time.monotonic, asyncio.get_running_loop()
    lease = take(a_node(Clock(clock())))
    lease.content_received(clock())
    attempt = WatchedAttempt(
        lease, AttemptTimeouts(first_byte=60.0, silence=0.1, deadline=math.inf), sent_at=clock()
    )
    watch = TimeoutMonitor(clock)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # As for a stream: its bytes are received first, and read in a later step.
        loop.add_reader(
            ours, lambda: ours.recv(9) and loop.call_soon(lease.content_received, clock())
        )
        watch.add(as_attempt(attempt))
        if answers:
            theirs.send(b"content")
        time.sleep(0.15)  # noqa: ASYNC251 - the loop is held up
        looked = clock()
        await until(lambda: attempt.failure is not None)
        # After content, only a new silence fails the attempt.
        assert clock() - looked >= 0.1 or not answers
        assert lease.last_content_at is not None
        assert (lease.last_content_at >= looked) is answers
        loop.remove_reader(ours)
    watch.close()


@in_virtual_time
async def test_the_clients_deadline_holds_in_the_queue_too(tmp_path: Path) -> None:
    one = EmulatedNode(slots=1, decode_tps=20, answer_tokens=40)
    async with proxy_over(tmp_path, one) as proxy:
        first = asyncio.create_task(proxy.ask())
        await until(lambda: one.busy == 1)
        reply = await proxy.ask(headers={"X-Request-Timeout": "0.2"})
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (503, "queue_timeout")
        assert reply.headers["x-should-retry"] == "false"
        assert int(reply.headers["retry-after"]) >= 1
        assert int(reply.headers["x-gateway-queue-ms"]) >= 100
        assert (await first).status_code == 200
        assert one.requests == 1


@pytest.mark.parametrize("value", ["0", "nan", "soon"])
@in_virtual_time
async def test_an_invalid_deadline_is_the_clients_error(tmp_path: Path, value: str) -> None:
    one = EmulatedNode()
    async with proxy_over(tmp_path, one) as proxy:
        reply = await proxy.ask(headers={"X-Request-Timeout": value})
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (400, "invalid_request")
        assert one.requests == 0


@in_virtual_time
async def test_a_node_may_have_its_own_total_timeout(tmp_path: Path) -> None:
    one = EmulatedNode(decode_tps=20, answer_tokens=1000)
    nodes = ({"timeouts": {"total": 0.5}},)
    async with proxy_over(tmp_path, one, nodes=nodes) as proxy:
        reply = await proxy.stream(GENERATION_PATHS[0])
        assert reply.errors[0]["code"] == "node_timeout"
        assert reply.text
