"""Node types and questions for the tests of plans."""

from __future__ import annotations

from typing import Any

from gateway.workshop.plan.answer import PlanAnswer, answer
from gateway.workshop.plan.catalogue import NodeType
from gateway.workshop.plan.search import (
    GATEWAY,
    FleetPart,
    FleetTrial,
    Goal,
    PlanQuestion,
    TimeLimit,
    Workload,
)
from gateway.workshop.simulate.simulation import Trace


def a_type(name: str = "node", **fields: Any) -> NodeType:
    given = {"decode_tps": 10.0, "prefill_tps": 100.0, "price_per_hour": 0.2, **fields}
    return NodeType.model_validate({"name": name, **given})


CPU = a_type("cpu", slots=2, price_per_hour=0.2)
GPU = a_type(
    "gpu", tier="gpu", slots=8, decode_tps=60, prefill_tps=3000, batch_cost=0.05, price_per_hour=2.0
)


def planned(workload: Workload, *types: NodeType, goal: Goal | None = None) -> PlanAnswer:
    question = PlanQuestion(workload, goal or Goal(), types, requests=800)
    return answer(question, TimeLimit(120.0))


def try_fleet(
    parts: tuple[FleetPart, ...],
    trace: Trace,
    limit: TimeLimit,
    *,
    backlog: float | None = None,
    policy: str = GATEWAY,
    warm: bool = False,
) -> FleetTrial:
    """Play a trace on a fleet; a `backlog` is done in some hours."""
    hours = None if backlog is None else 8.0
    workload = Workload(backlog or 1.0, 100, 100, backlog_hours=hours)
    return PlanQuestion(workload, Goal(), (), warm=warm).play(parts, trace, limit, policy)
