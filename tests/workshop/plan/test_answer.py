from __future__ import annotations

import pytest

from gateway.workshop.plan.answer import (
    Deployment,
    PlanAnswer,
    break_even,
    compare_deployments,
    contradiction,
    explain,
    headline,
)
from gateway.workshop.plan.search import Goal, TimeLimit, Workload
from tests.known import known
from tests.workshop.plan.build import CPU, GPU, a_type, planned


def test_the_cheapest_that_meets_the_goal_is_first() -> None:
    dear = a_type("dear", slots=2, price_per_hour=0.5)
    found = planned(Workload(500, 100, 100), dear, CPU)
    assert [one.parts[0].node_type.name for one in found.options] == ["cpu", "dear"]
    assert found.best is found.options[0]
    assert found.best.trial is not None


def test_a_type_that_can_not_meet_the_goal_comes_last_with_its_reason() -> None:
    found = planned(Workload(500, 100, 100), CPU, GPU, goal=Goal(completion_p95=12.0))
    assert known(found.best).name == "1 x gpu"
    rejected = next(one for one in found.options if one.rejected)
    assert "decode_tps 10 and prefill_tps 100" in rejected.rejected


def test_without_prices_the_fewest_machines_are_best() -> None:
    fast = a_type("fast", decode_tps=40, prefill_tps=400, price_per_hour=None)
    slow = a_type("slow", price_per_hour=None)
    best = known(planned(Workload(1500, 100, 100), slow, fast).best)
    assert best.parts[0].node_type.name == "fast"
    assert best.price.per_hour is None


def test_the_peak_sizes_the_fleet_and_the_mean_prices_its_tokens() -> None:
    flat, peaky = (
        known(planned(Workload(300, 100, 100, peak=peak), CPU).best) for peak in (1.0, 4.0)
    )
    assert peaky.machines > flat.machines
    assert known(peaky.price.per_million_tokens) / peaky.machines == pytest.approx(
        known(flat.price.per_million_tokens) / flat.machines
    )


def rows(found: PlanAnswer) -> dict[str, Deployment]:
    return {row.way: row for row in compare_deployments(found, TimeLimit(120.0))}


def test_little_work_needs_one_node_and_no_queue() -> None:
    found = rows(planned(Workload(20, 100, 100), CPU))
    assert found["single"].verdict == "best"
    assert "wait, 0.0 s in the mean; simplest" in found["single"].reason
    assert "one is enough" in found["balanced"].reason
    assert found["hybrid"].verdict == "no"


def test_waits_need_a_queue_that_orders_them() -> None:
    found = rows(planned(Workload(350, 100, 100), CPU))
    assert found["single"].verdict == "no"
    assert "nothing orders or bounds it" in found["single"].reason
    assert found["queue"].verdict == "best"
    peak = rows(planned(Workload(350, 100, 100, peak=3.0), CPU))["queue"]
    assert "so only for work that can wait (class batch)" in peak.reason


def test_more_than_one_node_can_do_is_balanced() -> None:
    hybrid = rows(planned(Workload(1500, 100, 100), CPU, GPU))["hybrid"]
    assert hybrid.verdict in {"works", "best"}
    assert "both run, used or not: 2.20" in hybrid.reason
    found = rows(planned(Workload(1500, 100, 100), CPU))
    assert found["balanced"].verdict == "best"
    for way in ("single", "queue"):
        assert found[way].verdict == "no"
        assert "the queue grows by" in found[way].reason


def test_gpus_become_cheaper_where_they_are_used() -> None:
    found = known(break_even(planned(Workload(1000, 500, 100), CPU, GPU)))
    assert found.others == ["GPU nodes", "hybrids"]
    first, stays = map(known, found.crossing("GPU nodes"))
    cpu, prices = found.prices["CPU nodes"], found.prices["GPU nodes"]
    for rate, cpu_price, gpu_price in zip(found.rates, cpu, prices, strict=True):
        if rate < first:
            assert cpu_price <= gpu_price
        if rate >= stays:
            assert gpu_price < cpu_price
    assert cpu[0] == pytest.approx(0.2 * 730)


def test_there_is_no_break_even_of_one_tier_or_without_prices() -> None:
    assert break_even(planned(Workload(300, 100, 100), CPU)) is None
    free = a_type("free", price_per_hour=None)
    assert break_even(planned(Workload(300, 100, 100), free, GPU)) is None


def test_every_figure_is_shown_with_what_it_comes_from() -> None:
    found = planned(Workload(500, 100, 100, peak=2.0), CPU)
    assert headline(known(found.best)) == "3 x cpu: 438.00 a month"
    lines = explain(found.question, known(found.best))
    assert lines["arrivals"] == "500 an hour x peak 2 / 3,600 = 0.2778 a second"
    assert lines["pure sum"] == (
        "0.2778 a second x 100 tokens / 10 tokens/s = 2.78: 3 instances of one slot"
    )
    assert "2 x 0.92 s of reading" in lines["slots share"]
    assert "x (1 + 0.15 x 1)" in lines["slots share"]
    assert "Allen-Cunneen with Cs²" in lines["estimate"]
    assert "± " in lines["simulator"]
    assert "x 730 =" in lines["price"]
    assert "makes 5.56 a million written" in lines["per token"]


def test_a_backlog_shows_its_hours_what_repeats_and_that_a_price_is_unknown() -> None:
    workload = Workload(1000, 1000, 50, repeat=0.8, backlog_hours=2.0)
    found = planned(workload, a_type(price_per_hour=None))
    lines = explain(found.question, known(found.best))
    assert lines["cached"] == "80% of 1000 prompt tokens repeat: 200 are read"
    assert lines["price"] == "unknown: the node has no price (--price-per-hour)"
    assert lines["arrivals"] == "1,000 at once / 2 h / 3,600 = 0.1389 a second to be done"
    assert "all 1,000 done in " in lines["simulator"]


def test_a_price_that_contradicts_its_own_speed_is_noticed() -> None:
    wrong = contradiction(0.20, 10, 0.50)
    assert "10 tokens/s at 0.20 an hour are 5.56 a million tokens, not 0.50" in wrong
    assert contradiction(0.20, 10, 5.6) == ""
