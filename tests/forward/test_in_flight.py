"""A request can be cancelled in every state, and its client gets the error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway import errors
from gateway.events import AttemptEnded
from gateway.forward.in_flight import PrefillProgress
from gateway.nodes.node import LeasePhase
from gateway.transport.errors import InvalidResponse
from tests.api.events import event
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.forward.granted_lease import a_granted_lease
from tests.forward.proxy_over_nodes import A_FIRST, proxy_over
from tests.gateways import until
from tests.virtual import in_virtual_time

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


# What its node has read of a prompt.


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
    size = SimpleNamespace(lease_request=SimpleNamespace(size=SimpleNamespace(slots=1)))
    lease = a_granted_lease(grace=60.0)
    attempt: Any = SimpleNamespace(lease=lease, request=size, last_content_at=None)
    api: Any = SimpleNamespace(progress_fields={}, progress_replaces_event=False)
    progress = PrefillProgress()
    progress.begin_attempt(attempt, api, b"{}")
    for done, cached in reports:
        figures = {"processed": done, "total": 1000, "cache": cached}
        progress.strip_progress(event({"prompt_progress": figures}))
    attempt.last_content_at = 2.0 if content else None
    assert progress.read_by(attempt) == read
