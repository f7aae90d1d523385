"""What the scheduler remembers of its decisions, and how well its expectations come true."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.lease import (
    NOTHING_TRIED,
    AttemptReport,
    GrantedLease,
    LeaseRequest,
    PromptKey,
    Tried,
    Usage,
    UsageReport,
)
from gateway.schedule.decision_log import (
    MOST_COLLECTED,
    MOST_FOLLOWED,
    Decision,
    DecisionLog,
    Grant,
)
from gateway.schedule.lease_service import LocalLeaseService
from gateway.schedule.scheduler import Scheduler
from tests.emulator import EmulatedNode
from tests.known import known
from tests.nodes.build import Clock, a_spec
from tests.schedule.build import a_request, a_scheduler, node
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import BareGateway, bare_gateway


def lease(
    scheduler: Scheduler, request: LeaseRequest, tried: Tried = NOTHING_TRIED
) -> GrantedLease:
    return known(scheduler.lease_now(request, tried))


def decisions(log: DecisionLog, request: LeaseRequest) -> list[Decision]:
    return log.find([request.id])[request.id].decisions


def only_grant(scheduler: Scheduler, request: LeaseRequest) -> Grant:
    (grant,) = decisions(scheduler.decision_log, request)
    assert isinstance(grant, Grant)
    return grant


def test_a_grant_has_the_prediction_and_then_what_came_of_it() -> None:
    clock = Clock()
    scheduler = a_scheduler(node("a"), node("b"), clock=clock)
    leases = LocalLeaseService(scheduler, scheduler.fleet)
    request = a_request(text_bytes=4000, max_tokens=20)
    granted = lease(scheduler, request)
    grant = only_grant(scheduler, request)
    placement = scheduler.records[granted.id].placement
    assert grant.at + grant.expected_ttft == pytest.approx(placement.prefill_ends)
    assert grant.at + grant.expected_seconds == pytest.approx(placement.ends)
    comparison = known(grant.comparison)
    assert comparison.chosen.name == granted.node.name
    assert len(comparison.others) == 1
    assert (grant.outcome, grant.used, comparison.chosen.speed.measured) == (None, None, False)
    clock.passes(2.0)
    leases.content_began(granted.id)
    clock.passes(3.0)
    leases.ended(AttemptReport(granted.id, "ok", 200, True, True, True))
    usage = Usage(1000, 10, 20)
    leases.settle(UsageReport(granted.id, usage, usage, 20), request)
    assert grant.first_content_at == pytest.approx(grant.at + 2.0)
    assert grant.ended_at == pytest.approx(grant.at + 5.0)
    assert (grant.outcome, grant.status) == ("ok", 200)
    assert (grant.used, grant.reported) == ((1000, 10, 20), True)


def test_the_log_is_bounded_and_says_how_far_it_reaches_back() -> None:
    clock = Clock()
    scheduler = a_scheduler(node(slots=64), clock=clock)
    log = scheduler.decision_log
    started = clock()
    assert log.reaches_back_to() == started
    log.grants = deque(maxlen=3)
    requests = [a_request() for _ in range(5)]
    for request in requests:
        clock.passes(1.0)
        lease(scheduler, request)
    assert decisions(log, requests[1]) == []
    assert decisions(log, requests[4]) != []
    assert log.reaches_back_to() == pytest.approx(started + 3.0)


def test_nothing_of_a_prompt_is_kept_alive() -> None:
    scheduler = a_scheduler(node("a"), node("b"))
    blocks = tuple(range(1 << 60, (1 << 60) + 1000))
    request = a_request(prompt_key=PromptKey(blocks, 4000.0), text_bytes=16_000)
    lease(scheduler, request)
    kept = msgspec.json.encode(msgspec.to_builtins(only_grant(scheduler, request)))
    assert str(blocks[0]).encode() not in kept
    assert len(kept) < 2000


def test_what_is_followed_is_bounded_in_number_and_length() -> None:
    scheduler = a_scheduler(node("a", slots=1000))
    log, request = scheduler.decision_log, a_request()
    log.follow("first")
    log.follow(request.id)
    for _ in range(MOST_COLLECTED + 5):
        lease(scheduler, request)
    for number in range(MOST_FOLLOWED - 1):
        log.follow(f"other_{number}")
    assert len(log.followed) == MOST_FOLLOWED
    assert log.take("first") is None
    collected = known(log.take(request.id))
    assert len(collected) == MOST_COLLECTED
    log.follow_none()
    assert log.followed == {}


@in_virtual_time
async def test_the_page_has_the_times_to_the_first_token_and_the_end_by_those_expected() -> None:
    async with (
        EmulatedNode(slots=1, prefill_tps=100, decode_tps=20) as node,
        bare_gateway(a_spec("a", node.url)) as gateway,
    ):
        for number in range(4):
            await gateway.chat(f"{number} " + "hello " * 100, max_tokens=10)
        before = await figures(gateway)
        await gateway.chat("5 " + "hello " * 100, max_tokens=10)
        after = await figures(gateway)
        id_ = gateway.ended[-1].request_id
        (remembered,) = gateway.scheduler.decision_log.find([id_]).values()
        (grant,) = [one for one in remembered.decisions if isinstance(one, Grant)]
    family = "llama_gateway_prediction_ratio"
    for of in ("first_token", "completion"):
        assert after[f"{family}_count", of] == before[f"{family}_count", of] + 1
    ratio = after[f"{family}_sum", "first_token"] - before[f"{family}_sum", "first_token"]
    assert grant.first_content_at is not None
    assert ratio == pytest.approx((grant.first_content_at - grant.at) / grant.expected_ttft)
    assert 0.5 < ratio < 2.0, "the node's speed is known by now"


async def figures(gateway: BareGateway) -> dict[tuple[str, str], float]:
    """The values of /metrics that tell of predictions, by name and `of`."""
    gateway.bus.flush()
    page = (await gateway.admin.get("/metrics")).text
    return {
        (sample.name, sample.labels["of"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "of" in sample.labels and not sample.name.endswith("_bucket")
    }
