"""A request can be cancelled in every state, and its client gets the error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway import errors
from gateway.events import AttemptEnded, RequestRecord
from gateway.forward.in_flight import InFlightRequest, PrefillProgress
from gateway.lease import ExpectedReading, GrantedLease, NodeInfo
from gateway.nodes.node import LeasePhase
from gateway.transport.errors import InvalidResponse
from tests.api.events import event
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.forward.granted_lease import a_proxy_request
from tests.forward.proxy_over_nodes import ProxyOverNodes, proxy_over
from tests.gateways import until
from tests.virtual import in_virtual_time

GONE = errors.no_node("The node is being drained.", 3.0)


def end(proxy: ProxyOverNodes) -> None:
    gateway = proxy.app
    (in_flight,) = gateway.registry
    if not gateway.scheduler.refuse(in_flight.request.id, GONE):
        in_flight.cancel(GONE)


def phase(proxy: ProxyOverNodes, wanted: LeasePhase) -> Callable[[], bool]:
    return lambda: any(lease.phase is wanted for lease in proxy.node("a").leases)


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_a_waiting_request_is_cancelled(tmp_path: Path, stream: bool) -> None:
    async with proxy_over(tmp_path, one := EmulatedNode()) as proxy:
        gateway = proxy.app
        proxy.app.fleet.drain("a")
        task = asyncio.create_task(proxy.ask(stream=stream))
        await until(lambda: len(gateway.scheduler.queue_positions()) == 1)
        end(proxy)
        reply = await task
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (503, "no_node")
        assert reply.headers["retry-after"] == "3"
        assert proxy.attempts == []
        assert one.requests == 0


@in_virtual_time
async def test_a_request_in_prefill_is_cancelled(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, EmulatedNode(prefill_tps=20)) as proxy:
        task = asyncio.create_task(proxy.stream())
        await until(phase(proxy, LeasePhase.PREFILL))
        end(proxy)
        reply = await task
        assert (reply.status, reply.headers["x-gateway-reason"]) == (503, "no_node")
        assert proxy.outcomes == [("a", "cancelled")]
        assert proxy.node("a").failures == 0
        # The slot is held until the node has freed it.
        assert proxy.node("a").leased == 1


@in_virtual_time
async def test_a_streaming_request_is_cancelled(tmp_path: Path) -> None:
    one = EmulatedNode(decode_tps=50, answer_tokens=1000)
    async with proxy_over(tmp_path, one) as proxy:
        task = asyncio.create_task(proxy.stream())
        await until(phase(proxy, LeasePhase.DECODE))
        end(proxy)
        end(proxy)
        reply = await task
        assert [error["code"] for error in reply.errors] == ["no_node"]
        assert proxy.finished == [] or proxy.finished[-1].status == 503
        await proxy.settled()
        assert proxy.finished[-1].status == 503
        assert proxy.outcomes == [("a", "cancelled")]
        assert proxy.node("a").failures == 0


@in_virtual_time
async def test_a_request_that_waits_for_its_retry_is_cancelled(tmp_path: Path) -> None:
    one = EmulatedNode()
    retries = {"backoff": 5.0, "backoff_max": 5.0}
    async with proxy_over(tmp_path, one, retries=retries) as proxy:
        one.faults.set("status", status=429)
        task = asyncio.create_task(proxy.ask())
        await until(lambda: len(proxy.attempts) == 1)
        end(proxy)
        reply = await task
        assert reply.status_code == 503
        assert len(proxy.attempts) == 1


@in_virtual_time
async def test_a_request_is_found_by_its_id_and_by_its_x_request_id(tmp_path: Path) -> None:
    one = EmulatedNode(decode_tps=50, answer_tokens=1000)
    async with proxy_over(tmp_path, one) as proxy:
        registry = proxy.app.registry
        tasks = [
            asyncio.create_task(proxy.stream(headers={"x-request-id": name}))
            for name in ("mine", "twice", "twice")
        ]
        await until(lambda: len(registry) == 3)
        mine = registry.find("mine")
        assert mine is not None
        assert registry.find(mine.request.id) is mine
        assert registry.find("twice") is None
        assert registry.find("nobody") is None
        assert registry.cancel_where(lambda in_flight: in_flight is not mine, GONE) == 2
        mine.cancel(GONE)
        replies = await asyncio.gather(*tasks)
        assert all(reply.errors or reply.status == 503 for reply in replies)


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
        fleet.resume("b")
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


def test_without_an_attempt_nothing_is_known() -> None:
    request, progress = a_proxy_request(), PrefillProgress()
    record = RequestRecord("a", request.path)
    waiting = InFlightRequest(request, record, prefill_progress=progress)
    assert waiting.prefill_status(1.0) is None


# What its node has read of a prompt.


@dataclass
class Reading:
    """An attempt that reads a prompt of 1000 tokens."""

    lease: GrantedLease
    request: SimpleNamespace
    last_content_at: float | None = None


@each_case(
    ("reports", "content", "read"),
    [
        ([], False, None),
        ([(0, 0)], False, None),
        ([(200, 200)], False, None),  # all of it was cached
        ([(200, 200), (400, 200)], False, (400, 200)),
        ([(900, 0)], True, (1000, 0)),  # else there would be no content
    ],
)
def test_what_was_read_is_what_the_node_said_last(
    reports: list[tuple[int, int]], content: bool, read: tuple[int, int] | None
) -> None:
    node = NodeInfo("a", "cpu", "llama.cpp", None, None, None, None, None, ())
    lease = GrantedLease(1, node, "demo", "demo", True, ExpectedReading(0, None, 60.0))
    request = SimpleNamespace(lease_request=SimpleNamespace(size=SimpleNamespace(slots=1)))
    api = SimpleNamespace(progress_fields={}, progress_replaces_event=False)
    attempt, progress = cast("Any", Reading(lease, request)), PrefillProgress()
    progress.begin_attempt(attempt, cast("Any", api), b"{}")
    for done, cached in reports:
        figures = {"processed": done, "total": 1000, "cache": cached}
        progress.strip_progress(event({"prompt_progress": figures}))
    attempt.last_content_at = 2.0 if content else None
    assert progress.read_by(attempt) == read
