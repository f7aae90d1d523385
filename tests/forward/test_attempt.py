"""How long a node may take, what excuses its silence, and what else ends a request."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from gateway import errors
from gateway.callers.keys import new_key
from gateway.config.scheduling import TimeoutSettings
from gateway.events import AttemptEnded
from gateway.forward.in_flight import (
    Attempt,
    AttemptTimeouts,
    PrefillProgress,
    TimeoutMonitor,
    timeouts_for,
)
from gateway.nodes.health import another_prefills
from gateway.nodes.node import Lease, LeasePhase, NodeState
from gateway.transport.errors import InvalidResponse, UpstreamError
from tests.api.events import event
from tests.emulator import EmulatedNode
from tests.forward.granted_lease import a_granted_lease, a_node_info, a_proxy_request
from tests.forward.proxy_over_nodes import (
    A_FIRST,
    BODIES,
    proxy_over,
)
from tests.gateways import until
from tests.nodes.build import Clock, a_node, take
from tests.virtual import in_virtual_time, now

LIMITS = AttemptTimeouts(first_byte=60.0, silence=20.0, deadline=1000.0)


@dataclass(eq=False)
class WatchedAttempt:
    lease: Lease
    timeouts: AttemptTimeouts = LIMITS
    sent_at: float = 100.0
    client_lagging = False
    complete: bool = False
    failure: UpstreamError | None = None
    reports: int = 0
    on_fail: Callable[[], None] = lambda: None

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
        self.on_fail()


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
async def test_another_requests_prefill_excuses_silence_but_not_for_ever(moved: bool) -> None:
    limit = "silence" if moved else "first_byte"
    for until_content in (190.1, None):
        clock = Clock(100.0)
        node = a_node(clock)
        lease, reading = take(node), take(node)
        if moved:
            lease.content_received(130.0)
        look = await limits_of(clock, WatchedAttempt(lease))
        reading.head_received(140.0)
        assert (look(165.0), look(190.0)) == (None, None)
        if until_content is None:
            # 60 s of prefill are an excuse, more only if more was expected.
            assert (look(199.0), look(205.0)) == (None, limit)
        else:
            reading.content_received(until_content)
            # Content must come soon, not at once.
            assert (look(190.2), look(194.9), look(195.1)) == (None, None, limit)


@in_virtual_time
async def test_an_attempt_that_ends_with_another_one_is_left_alone() -> None:
    clock = Clock(100.0)
    node = a_node(clock)
    first, other = WatchedAttempt(take(node)), WatchedAttempt(take(node), complete=True)
    monitor = TimeoutMonitor(clock)
    for attempt in (first, other):
        monitor.add(as_attempt(attempt))
    first.on_fail = lambda: monitor.remove(as_attempt(other))
    monitor.close()
    clock.now = 1000.0
    monitor.check()
    monitor.close()
    assert first.failure is not None
    assert other.failure is None
    assert other.lease.phase is not LeasePhase.RELEASED, "it was not looked at any more"
    assert not len(monitor)


@pytest.mark.parametrize(("grace", "limit"), [(40.0, 60.0), (400.0, 400.0), (0.0, 60.0)])
def test_a_long_prompt_and_the_node_itself_may_change_timeouts(grace: float, limit: float) -> None:
    settings = TimeoutSettings(first_byte=60.0)
    for node, total in ((a_node_info(), settings.total), (a_node_info(total_timeout=5.0), 5.0)):
        lease = a_granted_lease(grace=grace, node=node)
        found = timeouts_for(lease, a_proxy_request(), settings)
        assert found == AttemptTimeouts(limit, settings.silence, total)


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


# Who is to blame for a failure: the node or the request.


CALM: dict[str, Any] = {
    "health": {"failures": 3, "open": 30, "open_max": 60},
    "timeouts": {"first_byte": 0.4, "silence": 0.4},
    "retries": {"quarantine": 0},
}


@pytest.mark.parametrize("count", [1, 2, 3])
@in_virtual_time
async def test_one_caller_ejects_no_node(tmp_path: Path, count: int) -> None:
    deadly: list[dict[str, Any]] = [
        *({"kind": kind} for kind in ("reset", "hang", "garbage", "head_bomb")),
        *({"kind": "status", "status": status} for status in (500, 502, 504)),
        *({"kind": kind, "after_events": 2} for kind in ("error_event", "reset", "end")),
        {"kind": "insert", "after_events": 2, "what": "huge", "size": 2 << 20},
    ]
    servers = [EmulatedNode(answer_tokens=8) for _ in range(count)]
    async with proxy_over(tmp_path, *servers, **CALM) as proxy:
        for index, fault in enumerate(4 * deadly):
            for server in servers:
                server.faults.clear()
                server.faults.set(**fault)
            reply = await proxy.stream(list(BODIES)[index % 2], user=str(index))
            assert reply.status >= 500 or reply.errors
        for server in servers:
            server.faults.clear()
        nodes = [proxy.node(name) for name in proxy.servers]
        assert [node.state for node in nodes] == [NodeState.READY] * count
        assert [node.circuit.failures for node in nodes] == [0] * count
        answer = await proxy.ask()
        assert (answer.status_code, answer.headers["x-gateway-attempts"]) == (200, "1")


@in_virtual_time
async def test_a_node_that_fails_several_callers_is_ejected(tmp_path: Path) -> None:
    server = EmulatedNode(answer_tokens=8)
    made = [new_key() for _ in range(3)]
    keys = [{"id": key.id, "sha256": key.sha256} for key in made]
    ann, bob, cid = ({"authorization": f"Bearer {key.text}"} for key in made)
    async with proxy_over(tmp_path, server, keys=keys, **CALM) as proxy:
        server.faults.set("reset", after_events=2)
        for _ in range(5):
            await proxy.stream(headers=ann)
            await proxy.stream(headers=bob)
        assert proxy.node("a").state is NodeState.READY
        await proxy.stream(headers=cid)
        assert proxy.node("a").state is NodeState.EJECTED


@in_virtual_time
async def test_neither_a_node_that_answers_the_retry_itself_nor_a_slow_one_is_blamed(
    tmp_path: Path,
) -> None:
    server = EmulatedNode(answer_tokens=8, decode_tps=10.0)
    settings = {**CALM, "timeouts": {"total": 5.0}}
    async with proxy_over(tmp_path, server, **settings) as proxy:
        for name in range(4):
            server.faults.next("reset")
            assert (await proxy.stream()).errors == []
            server.engine.answer_tokens = 10_000
            reply = await proxy.stream(user=str(name), max_tokens=10_000)
            assert [error["code"] for error in reply.errors] == ["node_timeout"]
            server.engine.answer_tokens = 8
        circuit = proxy.node("a").circuit
        assert (circuit.failures, circuit.suspect_callers) == (0, set())


@in_virtual_time
async def test_bytes_that_never_complete_an_event_do_not_prevent_the_timeout(
    tmp_path: Path,
) -> None:
    one = EmulatedNode(answer_tokens=6)
    async with proxy_over(tmp_path, one, timeouts={"silence": 0.5}) as proxy:
        # 230 bytes an event, 12 s for each: the first content has its own timeout.
        one.faults.next("trickle", size=1, seconds=0.05)
        began = now()
        reply = await proxy.ask(stream=True, headers={"X-Request-Timeout": "3"})
        assert 3.0 <= now() - began < 3.5
        assert reply.status_code in {200, 504}
        assert "node_timeout" in reply.text
        await one.kill()


# A request can be cancelled in every state, and its client gets the error.


GONE = errors.no_node("The node is being drained.", 3.0)


@pytest.mark.parametrize("state", ["queued", "in prefill", "streaming", "between attempts"])
@in_virtual_time
async def test_a_request_is_cancelled_while_it_is(tmp_path: Path, state: str) -> None:
    one = EmulatedNode(decode_tps=50, answer_tokens=1000)
    retries = {"backoff": 5.0, "backoff_max": 5.0}
    async with proxy_over(tmp_path, one, EmulatedNode(), nodes=A_FIRST, retries=retries) as proxy:
        registry, scheduler = proxy.app.registry, proxy.app.scheduler
        if state == "queued":
            proxy.app.fleet.drain("a")
            proxy.app.fleet.drain("b")
        if state == "in prefill":
            one.engine.prefill_tps = 20
        if state == "between attempts":
            one.faults.set("status", status=429)
        task = asyncio.create_task(proxy.stream())
        phases = {"in prefill": LeasePhase.PREFILL, "streaming": LeasePhase.DECODE}

        def is_reached() -> bool:
            if state in phases:
                return any(lease.phase is phases[state] for lease in proxy.node("a").leases)
            return bool(scheduler.queue_positions() or proxy.attempts)

        await until(is_reached)
        for _ in range(2):  # the second time means nothing
            (in_flight,) = registry
            if not scheduler.refuse(in_flight.request.id, GONE):
                in_flight.cancel(GONE)
        reply = await task
        if state == "streaming":
            assert [error["code"] for error in reply.errors] == ["no_node"]
        else:
            assert (reply.status, reply.headers["x-gateway-reason"]) == (503, "no_node")
            assert reply.headers["retry-after"] == "3"
        outcomes = {"queued": [], "between attempts": ["busy"]}
        assert [kind for _, kind in proxy.outcomes] == outcomes.get(state, ["cancelled"])
        if state == "in prefill":  # the slot is held until the node has freed it
            assert proxy.node("a").leased == 1
        await proxy.settled()
        assert proxy.finished[-1].status == 503
        assert proxy.servers["b"].requests == proxy.node("a").failures == 0


@pytest.mark.parametrize(
    ("stream", "after_events"),
    [pytest.param(True, None, id="a retry"), pytest.param(False, 3, id="a resumption")],
)
@in_virtual_time
async def test_who_waits_for_a_node_again_is_not_shed_once_its_client_has_a_response_head(
    tmp_path: Path, stream: bool, after_events: int | None
) -> None:
    one, two = EmulatedNode(), EmulatedNode()
    one.faults.set("reset", after_events=after_events)
    async with proxy_over(tmp_path, one, two, heartbeat=2.0, heartbeat_plain=True) as proxy:
        scheduler, fleet = proxy.app.scheduler, proxy.app.fleet
        fleet.drain("b")
        proxy.app.bus.subscribe(AttemptEnded, lambda _: fleet.drain("a"))
        task = asyncio.create_task(proxy.ask(stream=stream))
        await until(lambda: bool(proxy.attempts) and len(scheduler.queue_positions()) == 1)
        (waiting,) = scheduler.waiters
        assert not waiting.response_started
        await until(lambda: waiting.response_started)
        fleet.drain("b", draining=False)
        reply = await task
        await proxy.settled()
        assert (reply.status_code, proxy.finished[0].node) == (200, "b")


# Progress events that only the gateway asked for are removed from the stream.


READING = event({"choices": [], "prompt_progress": {"processed": 300, "total": 400}})


def test_progress_events_are_removed_and_all_others_pass() -> None:
    before, behind = event({"choices": [1]}), event({"choices": [2]})
    assert PrefillProgress().strip_progress(before + READING + READING + behind) == before + behind
    events = event({"content": 'a "prompt_progress" b'}) + b"data: [DONE]\n\n"
    assert PrefillProgress().strip_progress(events) == events
    with pytest.raises(InvalidResponse):
        PrefillProgress().strip_progress(b'data: {"prompt_progress":\n\n')
