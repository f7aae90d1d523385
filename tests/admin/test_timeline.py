"""`/admin/timeline`: what each slot has done in the last ten minutes."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from gateway.admin.why import (
    MOST_LANES,
    TIMELINE_SECONDS,
    SlotSpan,
    TimelineEndpoint,
    sample_of,
)
from gateway.callers.keys import AdminRole
from tests.admin.test_why import ask, measure, two_nodes
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.virtual import in_virtual_time, now
from tests.web.bare_gateway import BareGateway, bare_gateway
from tests.web.test_route_tables import ADMIN_KEYS, bearer, gateway_with_keys

UNIX = 1_700_000_000.0
"""Unix time when the virtual clock is at 0."""


def spans(
    gateway: BareGateway, after: float = 0.0, *, shows_callers: bool = True
) -> list[SlotSpan]:
    name_of = gateway.key_sync.key_ring.name_of
    endpoint = TimelineEndpoint(gateway.scheduler, lambda: UNIX + now(), name_of)
    return endpoint.read(after, shows_callers=shows_callers).spans


@in_virtual_time
async def test_an_attempt_reads_then_writes_and_then_has_ended() -> None:
    async with bare_gateway(
        EmulatedNode(slots=2, decode_tps=10, prefill_tps=100), serving=True
    ) as gateway:
        asked = asyncio.create_task(ask(gateway, "it", "word " * 300, max_tokens=50))
        await gateway.until(lambda: bool(gateway.scheduler.records))
        (reads,) = spans(gateway)
        await gateway.until(lambda: gateway.registry.top_level()[0].tokens_so_far()[1] > 5)
        (writes,) = spans(gateway)
        await asked
        (ended,) = spans(gateway)
        ended_at = UNIX + now()
    assert (reads.writes, reads.end, reads.outcome) == (None, None, None)
    assert (reads.node, reads.slots, reads.resumes) == ("a", 1, False)
    assert writes.writes is not None
    assert writes.writes - writes.begin > 2
    assert writes.end is None
    assert ended.end is not None
    assert ended.end - writes.writes > 2
    assert ended.end == pytest.approx(ended_at, abs=1)
    assert ended.outcome == "ok"
    # The three are of one request, and begin alike.
    assert ended[:7] == writes[:7] == reads[:7]


@in_virtual_time
async def test_of_what_was_told_before_only_what_has_changed_is_told_again() -> None:
    async with bare_gateway(EmulatedNode(slots=2, decode_tps=10), serving=True) as gateway:
        await ask(gateway, "first", max_tokens=5)
        await asyncio.sleep(1)
        told_at = UNIX + now()
        assert spans(gateway, told_at) == []
        await ask(gateway, "second", max_tokens=5)
        (second,) = spans(gateway, told_at)
        assert [one.begin for one in spans(gateway)][-1] == second.begin
        # What is older than the picture is told to nobody.
        await asyncio.sleep(TIMELINE_SECONDS + 1)
        assert spans(gateway) == []


@in_virtual_time
async def test_a_cut_and_the_attempt_that_goes_on_are_told_as_such() -> None:
    async with two_nodes() as (gateway, fast, _):
        await measure(gateway)
        fast.faults.next("reset", after_events=5)
        await ask(gateway, "it", max_tokens=20)
        before, after = sorted(spans(gateway)[-2:], key=lambda one: one.begin)
    assert before.request == after.request
    assert (before.node, after.node) == ("a", "b")
    assert before.outcome not in {"ok", None}
    assert (after.outcome, after.resumes) == ("ok", True)


@in_virtual_time
async def test_callers_are_told_to_operators_alone() -> None:
    async with gateway_with_keys() as (gateway, _):
        viewer = bearer(ADMIN_KEYS[AdminRole.VIEWER].text)
        response = await gateway.admin.get("/admin/timeline", headers=viewer)
        assert response.status_code == 200
        assert response.json()["columns"] == list(SlotSpan._fields)
    async with bare_gateway(EmulatedNode(), serving=True) as gateway:
        await ask(gateway, "it", max_tokens=5)
        (shown,) = spans(gateway)
        (hidden,) = spans(gateway, shows_callers=False)
    assert shown.caller == "anonymous:127.0.0.1"
    assert hidden == shown._replace(caller=None)


@in_virtual_time
async def test_a_time_that_is_none_is_refused() -> None:
    async with bare_gateway(EmulatedNode()) as gateway:
        for after in ("yesterday", "-1", "nan"):
            response = await gateway.admin.get(f"/admin/timeline?after={after}")
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "after"), after


@each_case("slots", [[4] * 1000, [64] * 30, [1, 300, 1], [7] * 20, [2] * 51])
def test_a_large_fleet_is_told_by_a_sample_that_is_spread_over_it(slots: list[int]) -> None:
    fleet = {f"n{number}": one for number, one in enumerate(slots)}
    sample = sample_of(fleet)
    assert sum(sample.values()) <= MOST_LANES
    assert sum(sample.values()) > MOST_LANES - max(slots)
    assert all(lanes <= fleet[name] for name, lanes in sample.items())
    places = [int(name[1:]) for name in sample]
    assert places == sorted(places)
    steps = {after - before for before, after in pairwise(places)}
    assert len(slots) < 4 or max(steps) - min(steps) <= 2


def test_a_small_fleet_is_told_whole() -> None:
    fleet = {f"n{number}": 4 for number in range(25)}
    assert sample_of(fleet) == fleet
