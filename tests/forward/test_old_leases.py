"""A request is not sent under a lease that may be void by then: it asks for another one."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from gateway.api.transcript import PostToNode
from gateway.events import StreamResumed
from gateway.forward import resume
from gateway.forward.resume import ResumeInput, ResumePlan, plan_resume
from gateway.schedule.lease_service import LocalLeaseService
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import A_FIRST, ProxyOverNodes, proxy_over, two_nodes
from tests.virtual import in_virtual_time


def void_leases(proxy: ProxyOverNodes, *may_start: bool) -> list[int]:
    """Have these answers given to who is about to send a request, then yes; returns who asks."""
    asked: list[int] = []
    answers = list(may_start)

    def answer(lease_id: int) -> bool:
        asked.append(lease_id)
        return answers.pop(0) if answers else True

    cast("LocalLeaseService", proxy.app.proxy_context.leases).start_while(answer)
    return asked


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_it_goes_under_the_next_lease_and_no_attempt_is_counted(
    tmp_path: Path, stream: bool
) -> None:
    node = EmulatedNode(answer_tokens=5)
    async with proxy_over(tmp_path, node, retries={"attempts": 1}) as proxy:
        asked = void_leases(proxy, False, False)
        answer = await (proxy.stream() if stream else proxy.ask())
        assert answer.headers["x-gateway-attempts"] == "1"
        assert len(set(asked)) == 3
        assert node.requests == 1
        await proxy.settled()
        assert proxy.outcomes == [("a", "ok")]
        (record,) = proxy.finished
        assert (record.status, record.attempts, record.completion_tokens) == (200, 1, 5)
        assert proxy.node("a").failures == 0
        assert proxy.app.scheduler.records == {}


@in_virtual_time
async def test_each_attempt_asks_once_whether_it_may(tmp_path: Path) -> None:
    async with two_nodes(tmp_path, answer_tokens=5) as (proxy, one, _):
        asked = void_leases(proxy)
        one.faults.next("status", status=503)
        assert (await proxy.ask()).status_code == 200
        assert len(set(asked)) == len(asked) == 2


def test_a_stream_is_resumed_under_the_next_lease_as_it_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = 0

    async def plan(post: PostToNode, source: ResumeInput) -> ResumePlan:
        nonlocal plans
        plans += 1
        return await plan_resume(post, source)

    monkeypatch.setattr(resume, "plan_resume", plan)

    @in_virtual_time
    async def run() -> None:
        one, two = EmulatedNode(answer_tokens=40), EmulatedNode(answer_tokens=40)
        async with proxy_over(tmp_path, one, two, nodes=A_FIRST) as proxy:
            events: list[StreamResumed] = []
            proxy.app.bus.subscribe(StreamResumed, events.append)
            whole = await proxy.stream(temperature=0, max_tokens=40)
            asked = void_leases(proxy, True, False, False, True)
            one.faults.next("close", after_events=10)
            reply = await proxy.stream(temperature=0, max_tokens=40)
            assert reply.text == whole.text
            assert len(set(asked)) == 4
            assert [event.resumed_on for event in events] == ["b"]
            assert plans == 1
            await proxy.settled()
            assert [record.attempts for record in proxy.finished] == [1, 2]
            assert proxy.outcomes[1:] == [("a", "reset"), ("b", "ok")]
            assert proxy.node("b").failures == 0

    run()
