"""The sums of docs/usage-reports.md, with its figures, and what is said of unknown ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.usage.money import (
    Amount,
    GpuPrice,
    NodeHours,
    all_gpu_cost,
    effective_hourly_cost,
    gpu_cost,
    idle_cost,
    per_million_tokens,
    per_request,
    running_hourly_cost,
)
from tests.each_case import each_case

HOUR = 3600.0
CPU = NodeHours("cpu-a", "cpu", 10 * HOUR, 2.0)
GPU = NodeHours("gpu-a", "gpu", 10 * HOUR, 20.0)


def test_a_request_costs_its_share() -> None:
    assert per_request(3.0, 1200) == Amount(0.0025)


def test_a_million_tokens_costs_what_they_cost_together() -> None:
    assert per_million_tokens(3.0, 1_500_000) == Amount(2.0)


def test_idle_time_costs_what_no_request_was_charged() -> None:
    assert idle_cost([CPU], 0.5) == Amount(1.5)
    assert idle_cost([CPU, GPU], 0.0) == Amount(22.0)


def test_idle_time_never_costs_less_than_nothing() -> None:
    assert idle_cost([CPU], 2.01) == Amount(0.0)
    told = idle_cost([CPU], 3.0)
    assert told.value is None
    assert "does not cover" in str(told.reason)


def test_the_hybrid_costs_its_prices_weighted_by_share_of_requests() -> None:
    told = effective_hourly_cost({"cpu": 90, "gpu": 10}, {"cpu": [CPU], "gpu": [GPU]})
    assert told.value == pytest.approx(0.38)
    assert running_hourly_cost([CPU, GPU]).value == pytest.approx(2.20)


def test_four_machines_of_a_tier_weigh_as_one_of_their_mean_price() -> None:
    machines = [NodeHours(f"cpu-{name}", "cpu", 10 * HOUR, 2.0) for name in "abcd"]
    told = effective_hourly_cost({"cpu": 9, "gpu": 1}, {"cpu": machines, "gpu": [GPU]})
    assert told.value == pytest.approx(0.38)
    assert running_hourly_cost([*machines, GPU]).value == pytest.approx(2.80)


def test_a_tier_without_requests_needs_no_price() -> None:
    told = effective_hourly_cost({"cpu": 5, "gpu": 0}, {"cpu": [CPU]})
    assert told.value == pytest.approx(0.20)


@each_case(
    ("told", "reason"),
    [
        (per_request(0.0, 0), "no request"),
        (per_million_tokens(1.0, 0), "no token"),
        (idle_cost([], 0.0), "no hour"),
        (idle_cost([NodeHours("a", "cpu", HOUR, 0.0)], 0.0), "no hour"),
        (effective_hourly_cost({}, {}), "no request"),
        (effective_hourly_cost({"gpu": 1}, {"cpu": [CPU]}), "tier gpu"),
        (
            effective_hourly_cost({"gpu": 1}, {"gpu": [NodeHours("g", "gpu", HOUR, 0.0)]}),
            "cost_per_hour",
        ),
        (running_hourly_cost([]), "no hour"),
        (running_hourly_cost([NodeHours("a", "cpu", 0.0, 0.0)]), "no hour"),
        (all_gpu_cost(1.0, 9, 10), "1 of 10"),
        (all_gpu_cost(0.0, 0, 0), "no request"),
    ],
)
def test_what_is_unknown_has_a_reason_and_no_figure(told: Amount, reason: str) -> None:
    assert told.value is None
    assert reason in str(told.reason)
    assert told.to_json() == {"value": None, "reason": told.reason}


def test_work_on_the_gpu_tier_costs_its_tokens() -> None:
    hosted = GpuPrice(per_prompt_token=0.1e-6, per_completion_token=0.4e-6)
    assert gpu_cost([hosted], 1000, 900, 500) == pytest.approx(0.0003)


def test_work_on_the_gpu_tier_costs_the_time_that_its_speeds_make() -> None:
    own = GpuPrice(per_slot_second=2.0 / 3600 / 4, prefill_tps=2000.0, decode_tps=50.0)
    assert gpu_cost([own], 1000, 0, 500) == pytest.approx(10.5 * 2.0 / 3600 / 4)
    assert gpu_cost([own], 1000, 1000, 0) == 0.0


def test_the_cheapest_gpu_node_counts_and_one_of_unknown_speed_does_not() -> None:
    unmeasured = GpuPrice(per_slot_second=1e-9)
    hosted = GpuPrice(per_prompt_token=1e-6)
    assert gpu_cost([unmeasured], 10, 0, 0) is None
    assert gpu_cost([unmeasured, hosted], 10, 0, 0) == pytest.approx(1e-5)
    assert gpu_cost([], 10, 0, 0) is None


amounts = st.floats(0, 1e9)
hours = st.lists(
    st.builds(
        NodeHours,
        st.just("n"),
        st.sampled_from(["cpu", "gpu"]),
        st.floats(0, 1e9),
        st.floats(0, 1e9),
    ),
    max_size=4,
)


@given(hours, amounts, st.dictionaries(st.sampled_from(["cpu", "gpu"]), st.integers(0, 10**9)))
def test_no_figure_is_negative_or_not_a_number(
    listed: list[NodeHours], charged: float, requests: dict[str, int]
) -> None:
    by_tier = {tier: [one for one in listed if one.tier == tier] for tier in ("cpu", "gpu")}
    for told in (
        idle_cost(listed, charged),
        effective_hourly_cost(requests, by_tier),
        running_hourly_cost(listed),
        per_request(charged, sum(requests.values())),
        per_million_tokens(charged, sum(requests.values())),
    ):
        if told.value is None:
            assert told.reason
        else:
            assert told.value >= 0
            assert not math.isnan(told.value)
