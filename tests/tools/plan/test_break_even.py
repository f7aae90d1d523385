from __future__ import annotations

import pytest

from gateway.tools.plan.break_even import break_even
from gateway.tools.plan.workload import Workload
from tests.tools.plan.build import CPU, GPU, a_type, planned


def test_gpus_become_cheaper_where_they_are_used() -> None:
    found = break_even(planned(Workload(1000, 500, 100), CPU, GPU))
    assert found is not None
    gpu = found.crossings[0]
    assert (gpu.cheaper, gpu.than) == ("GPU nodes", "CPU nodes")
    assert gpu.first is not None
    assert gpu.stays is not None
    cpu_curve, gpu_curve = found.curves[:2]
    for rate, cpu_price, gpu_price in zip(
        cpu_curve.rates, cpu_curve.prices, gpu_curve.prices, strict=True
    ):
        if rate < gpu.first:
            assert cpu_price <= gpu_price
        if rate >= gpu.stays:
            assert gpu_price < cpu_price
    assert cpu_curve.prices[0] == pytest.approx(0.2 * 730)


def test_there_is_no_break_even_of_one_tier_or_without_prices() -> None:
    assert break_even(planned(Workload(300, 100, 100), CPU)) is None
    free = a_type("free", price_per_hour=None)
    assert break_even(planned(Workload(300, 100, 100), free, GPU)) is None
