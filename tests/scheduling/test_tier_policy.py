from __future__ import annotations

import math
from typing import Any

import pytest

from gateway.config.scheduling import HybridSettings
from gateway.request import Priority
from gateway.scheduling.tiers import TierPolicy, TierRoute, TierStatus
from tests.each_case import each_case

FREE = TierStatus(alive=True, has_room=True, wait_seconds=0.0, service_seconds=1.0)
FULL = TierStatus(alive=True, has_room=False, wait_seconds=5.0, service_seconds=1.0)
OUT = TierStatus(alive=False, has_room=False)
SLOW = TierStatus(alive=True, has_room=True, wait_seconds=0.0, service_seconds=60.0)
BUSY = TierStatus(alive=True, has_room=False, wait_seconds=30.0, service_seconds=60.0)

GOING_FIRST = [Priority.URGENT, Priority.PREMIUM]
OTHERS = [Priority.NORMAL, Priority.BATCH]


def hybrid(**keys: Any) -> TierPolicy:
    return TierPolicy(HybridSettings.model_validate(keys))


def spilling(**keys: Any) -> TierPolicy:
    return hybrid(spill={"share": 1, **keys})


def route(
    rules: TierPolicy,
    priority: Priority,
    gpu: TierStatus | None,
    cpu: TierStatus | None,
    *,
    now: float = 0.0,
    most: float = 1.0,
    arrived: bool = True,
) -> TierRoute:
    if arrived:
        rules.arrived(priority, now)
    return rules.route(priority, gpu, cpu, now, most)


# Those that go to the GPU first.


@pytest.mark.parametrize("priority", GOING_FIRST)
def test_premium_goes_to_the_gpu_while_it_has_room(priority: Priority) -> None:
    for cpu in (SLOW, BUSY, OUT):
        found = route(hybrid(), priority, FREE, cpu)
        assert (found.tiers[0], found.fallback_delay, found.fallback("gpu")) == (
            "gpu",
            0.0,
            None,
        ), cpu


@each_case(
    ("gpu", "reason"),
    [
        (FULL, "gpu_full"),
        (OUT, "gpu_down"),
        (TierStatus(alive=True, has_room=False, paused=True), "gpu_limited"),
        (TierStatus(alive=False, has_room=False, failed=True), "gpu_failed"),
    ],
)
def test_a_fallback_to_the_cpu_has_a_reason(gpu: TierStatus, reason: str) -> None:
    found = route(hybrid(), Priority.PREMIUM, gpu, SLOW)
    assert found.tiers == ("gpu", "cpu")
    assert found.fallback_delay == 0.0
    assert found.fallback("cpu") == reason
    assert found.fallback("gpu") is None
    assert found.reservation is None


def test_a_gpu_that_fills_up_before_placing_was_full() -> None:
    assert route(hybrid(), Priority.PREMIUM, FREE, SLOW).fallback("cpu") == "gpu_full"


def test_a_request_waits_for_a_full_gpu_if_that_finishes_sooner() -> None:
    soon = TierStatus(alive=True, has_room=False, wait_seconds=1.5, service_seconds=1.0)
    assert route(hybrid(), Priority.PREMIUM, soon, SLOW).fallback_delay == 2.0
    assert route(hybrid(wait="1s"), Priority.PREMIUM, soon, SLOW).fallback_delay == 0.0
    assert route(hybrid(wait="1m"), Priority.PREMIUM, soon, SLOW).fallback_delay == 60.0
    assert route(hybrid(wait=0), Priority.PREMIUM, soon, SLOW).fallback_delay == 0.0


def test_no_request_waits_for_a_full_gpu_if_a_cpu_node_finishes_sooner() -> None:
    soon = TierStatus(alive=True, has_room=False, wait_seconds=1.5, service_seconds=10.0)
    quick = TierStatus(alive=True, has_room=True, wait_seconds=0.0, service_seconds=11.0)
    assert route(hybrid(), Priority.PREMIUM, soon, quick).fallback_delay == 0.0


def test_no_request_waits_for_a_gpu_of_unknown_wait_or_one_that_is_paused() -> None:
    unknown = TierStatus(alive=True, has_room=False, service_seconds=1.0)
    assert route(hybrid(), Priority.PREMIUM, unknown, SLOW).fallback_delay == 0.0
    paused = TierStatus(
        alive=True, has_room=False, wait_seconds=0.5, service_seconds=1.0, paused=True
    )
    assert route(hybrid(), Priority.PREMIUM, paused, SLOW).fallback_delay == 0.0


def test_the_classes_that_go_to_the_gpu_first_are_settable() -> None:
    rules = hybrid(gpu_first=["urgent", "normal"])
    assert route(rules, Priority.NORMAL, FREE, SLOW).tiers == ("gpu", "cpu")
    assert route(rules, Priority.PREMIUM, FREE, SLOW).tiers == ("cpu",)
    assert route(hybrid(gpu_first=[]), Priority.URGENT, FREE, SLOW).tiers == ("cpu",)


# All others.


@pytest.mark.parametrize("priority", OTHERS)
def test_without_spill_over_the_others_never_use_the_gpu(priority: Priority) -> None:
    for cpu in (SLOW, BUSY, OUT):
        assert route(hybrid(), priority, FREE, cpu) == TierRoute("cpu", ("cpu",)), cpu


@each_case("priority", Priority)
def test_a_model_of_gpu_nodes_alone_is_served_there_for_every_class(priority: Priority) -> None:
    for rules in (hybrid(), spilling(share=0)):
        for gpu in (FREE, FULL, OUT):
            found = route(rules, priority, gpu, None)
            assert found.tiers == ("gpu",)
            assert found.reservation is None
            assert found.fallback("gpu") is None


@each_case("priority", Priority)
def test_a_model_of_cpu_nodes_alone_is_no_fallback(priority: Priority) -> None:
    found = route(spilling(), priority, None, BUSY)
    assert (found.tiers, found.fallback("cpu")) == (("cpu",), None)


def test_normal_spills_over_once_the_cpu_would_take_too_long() -> None:
    rules = spilling(after="20s")
    found = route(rules, Priority.NORMAL, FREE, BUSY)
    assert (found.tiers, found.fallback("gpu")) == (("gpu",), "cpu_wait")
    assert found.reservation is not None
    shorter = TierStatus(alive=True, has_room=False, wait_seconds=20.0)
    assert route(rules, Priority.NORMAL, FREE, shorter).tiers == ("cpu",)


def test_normal_spills_over_when_every_cpu_node_is_down() -> None:
    assert route(spilling(), Priority.NORMAL, FREE, OUT).fallback("gpu") == "cpu_down"


@pytest.mark.parametrize("gpu", [FULL, OUT])
def test_nothing_spills_to_a_gpu_without_room(gpu: TierStatus) -> None:
    rules = spilling()
    found = route(rules, Priority.NORMAL, gpu, BUSY)
    assert (found.tiers, found.reservation) == (("cpu",), None)
    assert _running(rules) == 0


def test_nothing_spills_while_a_cpu_node_is_free() -> None:
    assert route(spilling(after=0), Priority.NORMAL, FREE, SLOW).tiers == ("cpu",)


def test_batch_spills_only_if_the_settings_name_it() -> None:
    assert route(spilling(), Priority.BATCH, FREE, BUSY).tiers == ("cpu",)
    batch_only = spilling(classes=["batch"])
    assert route(batch_only, Priority.BATCH, FREE, BUSY).tiers == ("gpu",)
    assert route(batch_only, Priority.NORMAL, FREE, BUSY).tiers == ("cpu",)


def test_spill_over_keeps_its_share_of_the_requests() -> None:
    rules = spilling(share=0.25)
    routes = [route(rules, Priority.NORMAL, FREE, BUSY) for _ in range(40)]
    assert [found.tiers for found in routes].count(("gpu",)) == 10


def test_requests_of_other_classes_earn_no_share() -> None:
    rules = spilling(share=0.5)
    for _ in range(50):
        route(rules, Priority.PREMIUM, FREE, BUSY)
        route(rules, Priority.BATCH, FREE, BUSY)
    assert route(rules, Priority.NORMAL, FREE, BUSY, arrived=False).tiers == ("cpu",)


def test_spill_over_keeps_to_its_money_and_resumes_when_less_was_used() -> None:
    rules = hybrid(spill={"money_per_hour": 1.0})
    first = route(rules, Priority.NORMAL, FREE, BUSY, most=0.9)
    second = route(rules, Priority.NORMAL, FREE, BUSY, most=0.9)
    assert route(rules, Priority.NORMAL, FREE, BUSY, most=0.01).tiers == ("cpu",)
    assert first.reservation is not None
    assert second.reservation is not None
    first.reservation.settle(0.2, happened=True, now=1.0)
    second.reservation.cancel()
    assert route(rules, Priority.NORMAL, FREE, BUSY, most=0.9).tiers == ("gpu",)


def test_spending_survives_a_reload_that_switches_spill_over_off_and_on() -> None:
    on = HybridSettings.model_validate({"spill": {"money_per_hour": 1.0}})
    rules = TierPolicy(on)
    spent = route(rules, Priority.NORMAL, FREE, BUSY)
    assert spent.reservation is not None
    rules.configure(HybridSettings())
    assert route(rules, Priority.NORMAL, FREE, BUSY).tiers == ("cpu",)
    spent.reservation.settle(1.0, happened=True, now=10.0)
    rules.configure(on)
    assert route(rules, Priority.NORMAL, FREE, BUSY, now=11.0).tiers == ("cpu",)
    assert route(rules, Priority.NORMAL, FREE, BUSY, now=3611.0).tiers == ("gpu",)


def test_the_state_of_the_budget_is_shown() -> None:
    assert hybrid().view(0.0) == {"gpu_first": ["urgent", "premium"], "spill": None}
    rules = hybrid(spill={"money_per_hour": 2.0, "window": "30m"})
    route(rules, Priority.NORMAL, FREE, BUSY, most=0.5)
    shown = rules.view(0.0)["spill"]
    assert isinstance(shown, dict)
    assert (shown["requests"], shown["running"]) == (1, 1)
    assert (shown["reserved"], shown["money"], shown["paid"]) == (0.5, 1.0, 0.0)
    boundless = spilling()
    route(boundless, Priority.NORMAL, FREE, BUSY, most=math.inf)
    unbounded = boundless.view(0.0)["spill"]
    assert isinstance(unbounded, dict)
    assert (unbounded["reserved"], unbounded["money"]) == (None, None)


def _running(rules: TierPolicy) -> object:
    shown = rules.view(0.0)["spill"]
    assert isinstance(shown, dict)
    return shown["running"]
