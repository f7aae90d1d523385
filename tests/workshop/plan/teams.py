"""Three invented teams, and the plan for each."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.workshop.plan.answer import answer
from gateway.workshop.plan.catalogue import fitting_types, packaged_catalogue
from gateway.workshop.plan.search import (
    FleetOption,
    Goal,
    PlanQuestion,
    TimeLimit,
    Workload,
    from_trace,
)
from gateway.workshop.simulate.simulation import Trace, Traffic, generate, parse_figures
from tests.known import known

CPU_TYPES = ("cpu-8", "cpu-16", "cpu-32", "cpu-64")
"""Types of one socket: what the teams may buy. Their data stay in the house."""


@dataclass(frozen=True, slots=True)
class Team:
    """A team and its question."""

    name: str
    about: str
    question: PlanQuestion

    def plan(self) -> FleetOption:
        """The cheapest fleet of equal nodes for it."""
        return known(answer(self.question, TimeLimit(300.0)).best)

    @property
    def backlog(self) -> float | None:
        """Requests that wait from the start; None: they arrive."""
        workload = self.question.workload
        return workload.requests_per_hour if workload.backlog_hours is not None else None


def shop_trace() -> Trace:
    """Three hours of a shop: five times as many questions for ten minutes of each hour."""
    sizes = "turns=1,tenants=1,system=400,question=200,answer=120,callers=1,burst=5"
    rate = f"requests=1000,rate={1000 / 10_800}"
    return generate(parse_figures(f"{rate},{sizes}", Traffic), seed=7)


def teams() -> list[Team]:
    """Return all three."""
    types, _ = fitting_types(packaged_catalogue(), None, CPU_TYPES)
    large, _ = fitting_types(packaged_catalogue(), None, ("cpu-64",))
    shop = shop_trace()
    return [
        Team(
            "clinic",
            "20 people, 6 questions an hour each, twice as many in the busiest; two thirds of a "
            "prompt are the same instructions; 95 % answered within 45 s",
            PlanQuestion(
                Workload(120, 900, 150, repeat=0.66, peak=2.0),
                Goal(completion_p95=45.0),
                types,
                requests=1000,
            ),
        ),
        Team(
            "shop",
            "330 questions an hour, in bursts, as recorded; the first word within 10 s for 95 %",
            PlanQuestion(from_trace(shop), Goal(ttft_p95=10.0), types, recorded=shop),
        ),
        Team(
            "batch",
            "50,000 summaries a night, of 600 tokens in 80, within eight hours, by cpu-64",
            PlanQuestion(
                Workload(50_000, 600, 80, backlog_hours=8.0), Goal(), large, requests=2000
            ),
        ),
    ]
