from __future__ import annotations

from gateway.tools.plan.answer import PlanAnswer
from gateway.tools.plan.deployments import Deployment, compare_deployments
from gateway.tools.plan.trial import TimeLimit
from gateway.tools.plan.workload import Workload
from tests.tools.plan.build import CPU, GPU, planned


def rows(found: PlanAnswer) -> dict[str, Deployment]:
    return {row.way: row for row in compare_deployments(found, TimeLimit(120.0))}


def test_a_hybrid_says_that_both_of_its_machines_run() -> None:
    found = planned(Workload(1500, 100, 100), CPU, GPU)
    hybrid = rows(found)["hybrid"]
    assert hybrid.verdict in {"works", "best"}
    assert "both run, used or not: 2.20" in hybrid.reason


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


def test_more_than_one_node_can_do_is_balanced() -> None:
    found = rows(planned(Workload(1500, 100, 100), CPU))
    assert found["balanced"].verdict == "best"
    for way in ("single", "queue"):
        assert found[way].verdict == "no"
        assert "the queue grows by" in found[way].reason


def test_a_peak_that_only_batches_can_wait_out_is_said() -> None:
    found = rows(planned(Workload(350, 100, 100, peak=3.0), CPU))
    assert "so only for work that can wait (class batch)" in found["queue"].reason
