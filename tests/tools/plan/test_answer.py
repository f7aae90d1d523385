from __future__ import annotations

import pytest

from gateway.tools.plan.search import Goal
from gateway.tools.plan.workload import Workload
from tests.tools.plan.build import CPU, GPU, a_type, planned


def test_the_cheapest_that_meets_the_goal_is_first() -> None:
    dear = a_type("dear", slots=2, price_per_hour=0.5)
    found = planned(Workload(500, 100, 100), dear, CPU)
    assert [one.parts[0].node_type.name for one in found.options] == ["cpu", "dear"]
    assert found.best is found.options[0]
    assert found.best.trial is not None


def test_a_type_that_can_not_meet_the_goal_comes_last_with_its_reason() -> None:
    found = planned(Workload(500, 100, 100), CPU, GPU, goal=Goal(completion_p95=12.0))
    assert found.best is not None
    assert found.best.name == "1 x gpu"
    rejected = next(one for one in found.options if one.rejected)
    assert "decode_tps 10 and prefill_tps 100" in rejected.rejected


def test_without_prices_the_fewest_machines_are_best() -> None:
    fast = a_type("fast", decode_tps=40, prefill_tps=400, price_per_hour=None)
    slow = a_type("slow", price_per_hour=None)
    best = planned(Workload(1500, 100, 100), slow, fast).best
    assert best is not None
    assert best.parts[0].node_type.name == "fast"
    assert best.price.per_hour is None


def test_the_peak_sizes_the_fleet_and_the_mean_prices_its_tokens() -> None:
    flat, peaky = (planned(Workload(300, 100, 100, peak=peak), CPU).best for peak in (1.0, 4.0))
    assert flat is not None
    assert peaky is not None
    assert peaky.machines > flat.machines
    assert peaky.price.per_million is not None
    assert flat.price.per_million is not None
    assert peaky.price.per_million / peaky.machines == pytest.approx(
        flat.price.per_million / flat.machines
    )
