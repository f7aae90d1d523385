from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from gateway.workshop.plan.answer import (
    Deployment,
    PlanAnswer,
    answer,
    break_even,
    compare_deployments,
)
from gateway.workshop.plan.catalogue import FleetPrice, NodeType, packaged_catalogue
from gateway.workshop.plan.search import (
    DIRECT,
    GATEWAY,
    FleetOption,
    FleetPart,
    FleetTrial,
    Goal,
    PlanQuestion,
    TimeLimit,
    Workload,
    alone,
    erlang_c,
    estimate,
    find_fleet,
    fleet_name,
    from_trace,
    least_count,
    make_trace,
    node_times,
    option_price,
)
from gateway.workshop.simulate.fleets import models_from_text, with_shares
from gateway.workshop.simulate.simulation import (
    Job,
    SimulatedMachine,
    Trace,
    TracePrompt,
    build_trace,
)
from tests.each_case import each_case
from tests.known import known

WORKLOAD = Workload(600, 100, 100)


def a_type(name: str = "node", **fields: Any) -> NodeType:
    given = {"decode_tps": 10.0, "prefill_tps": 100.0, "price_per_hour": 0.2, **fields}
    return NodeType.model_validate({"name": name, **given})


CPU = a_type("cpu", slots=2)
GPU = a_type(
    "gpu", tier="gpu", slots=8, decode_tps=60, prefill_tps=3000, batch_cost=0.05, price_per_hour=2.0
)


def planned(workload: Workload, *types: NodeType) -> PlanAnswer:
    return answer(PlanQuestion(workload, Goal(), types, requests=800), TimeLimit(120.0))


def try_fleet(parts: tuple[FleetPart, ...], trace: Trace, policy: str = GATEWAY) -> FleetTrial:
    question = PlanQuestion(Workload(1.0, 100, 100), Goal(), ())
    return question.play(parts, trace, TimeLimit(3600.0), policy)


def machine(slots: int = 1, decode: float = 10, prefill: float = 100) -> SimulatedMachine:
    return SimulatedMachine("m", slots, prefill, decode)


@each_case(
    ("servers", "offered", "probability"),
    [
        # By the definition: a^c/c! c/(c-a) over the sum of the states.
        (1, 0.3, 0.3), (2, 1.0, 1 / 3), (3, 2.0, 4 / 9), (10, 8.0, 0.40918),
        (3, 3.0, 1.0), (3, 70.0, 1.0), (100_000, 99_900.0, 0.658),
    ],
)  # fmt: skip
def test_erlang_c_is_that_of_the_tables(servers: int, offered: float, probability: float) -> None:
    assert erlang_c(servers, offered) == pytest.approx(probability, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "slots", "prompt", "speeds"),
    [(3, 1, 100, {}), (1, 2, 300, {}), (1, 4, 800, {}),
     (2, 2, 1500, {"decode_tps": 40, "prefill_tps": 600})],
)  # fmt: skip
@pytest.mark.parametrize("use", [0.6, 0.8])
def test_the_estimate_of_the_wait_is_too_long_rather_than_too_short(
    nodes: int, slots: int, prompt: int, speeds: dict[str, Any], use: float
) -> None:
    """By less than a third, or than the simulator can tell, at 95 % confidence."""
    kind, completion = a_type(slots=slots, **speeds), 180 if speeds else 100
    times = node_times(kind.machine("m"), prompt, completion)
    arrivals = use * nodes * times.capacity
    workload = Workload(arrivals * 3600, prompt, completion)
    found = estimate(times, nodes, arrivals, lengths_scv=workload.lengths_scv)
    trial = try_fleet((FleetPart(kind, nodes),), make_trace(workload, 10_000, seed=11))
    assert found.wait >= trial.wait.mean - trial.wait_error
    assert found.wait <= trial.wait.mean * 1.33 + trial.wait_error
    assert found.service == pytest.approx(trial.service, rel=0.15)


def test_the_first_tenth_of_the_requests_is_not_counted_and_parts_share_the_rest() -> None:
    parts = (FleetPart(a_type("slow"), 1), FleetPart(a_type("fast", decode_tps=80.0), 1))
    trace = make_trace(Workload(300, 100, 100), 500, seed=1)
    trial = try_fleet(parts, trace)
    assert trial.requests == 450
    slow, fast = trial.shares
    assert slow.requests + fast.requests == pytest.approx(1.0)
    assert fast.completion_tokens > slow.completion_tokens
    assert fleet_name(parts) == "1 x slow + 1 x fast"
    # Without the gateway requests wait inside the node.
    trial = try_fleet((FleetPart(a_type(), 1),), trace, DIRECT)
    assert trial.waiting_share > 0.5
    assert trial.wait.mean > 0


def found_for(
    goal: Goal, workload: Workload = WORKLOAD, *, seconds: float = 120.0, **node: Any
) -> FleetOption:
    question = PlanQuestion(workload, goal, (), requests=1500)
    return find_fleet(question, a_type(**node), TimeLimit(seconds))


def test_a_goal_takes_more_nodes_than_the_work_and_no_more_than_it_must() -> None:
    tight, loose = found_for(Goal(ttft_p95=5.0)), found_for(Goal(completion_p95=120.0))
    assert known(loose.trial).completion.p95 <= 120.0
    assert known(tight.trial).ttft.p95 <= 5.0
    least = least_count(a_type(), WORKLOAD, Goal(ttft_p95=5.0))
    assert max(loose.machines, least) < tight.machines
    fewer = (FleetPart(a_type(), tight.machines - 1),)
    trial = try_fleet(fewer, make_trace(WORKLOAD, 1500, seed=1))
    assert Goal(ttft_p95=5.0).misses(trial) != []


def test_a_node_alone_is_the_fastest_fleet_and_what_an_earlier_turn_has_read_is_not_read() -> None:
    trace = make_trace(WORKLOAD, 800, seed=1)
    trial = try_fleet((FleetPart(a_type(), 50),), trace)
    found = (trial.ttft.p95, trial.completion.p95)
    assert found == pytest.approx(alone(trace.jobs, a_type()), rel=0.05)
    turns = [Job(0, n * 100.0, TracePrompt(7, 1000 + n * 20), 10) for n in range(40)]
    ttft, _ = alone(build_trace(turns).jobs, a_type())
    assert ttft < 1.0


def test_what_is_too_large_or_too_late_to_be_simulated_is_estimated() -> None:
    huge = Workload(1e9, 100, 1000)
    found = found_for(Goal(), huge)
    assert found.trial is None
    assert "it would take 35" in found.rejected
    assert found_for(Goal(), huge, slots=200).rejected
    found = found_for(Goal(), Workload(1e6, 100, 1000))
    assert found.why_estimated == "more than 2000 nodes are not simulated"
    models = tuple(with_shares(models_from_text("100x8GiB:8GiB"), 1))
    found = found_for(Goal(), Workload(1e5, 100, 1000, models=models), memory_gib=16.0)
    assert found.why_estimated == "more than 200 nodes are not simulated"
    found = found_for(Goal(ttft_p95=5.0), seconds=1e-9)
    assert found.trial is None
    assert found.why_estimated == "1e-09 s for simulations are used up"


def test_the_busiest_hour_is_played() -> None:
    workload = Workload(360, 300, 100, peak=2.0)
    assert workload.arrivals == pytest.approx(0.2)
    jobs = make_trace(workload, 5000, seed=1).jobs
    assert len(jobs) / jobs[-1].time == pytest.approx(0.2, rel=0.05)
    assert fmean(job.prompt.tokens for job in jobs) == pytest.approx(300, rel=0.05)
    assert fmean(job.output for job in jobs) == pytest.approx(100, rel=0.05)
    again, other = (make_trace(workload, 5000, seed).jobs for seed in (1, 2))
    lengths = [[job.output for job in one] for one in (jobs, again, other)]
    assert lengths[0] == lengths[1] != lengths[2]


def trace_of(*times: float) -> Trace:
    return build_trace([Job(0, time, TracePrompt(-1 - n, 100), 50) for n, time in enumerate(times)])


def test_a_trace_tells_rate_lengths_and_its_busiest_hour() -> None:
    # Ten an hour for an hour, and twenty in the next two hours together.
    times = [n * 360.0 for n in range(10)]
    times += [3600 + n * 240.0 for n in range(15)] + [7200 + n * 720.0 for n in range(6)]
    found = from_trace(trace_of(*times))
    assert found.requests_per_hour == pytest.approx(30 / times[-1] * 3600)
    assert found.peak == pytest.approx(15 / found.requests_per_hour)
    assert (found.prompt, found.completion, found.repeat) == (100, 50, 0.0)
    assert from_trace(trace_of(*range(100))).arrival_scv == pytest.approx(0.0)  # regular arrivals


def test_the_cheapest_that_meets_the_goal_is_first() -> None:
    dear = a_type("dear", slots=2, price_per_hour=0.5)
    found = planned(Workload(500, 100, 100), dear, CPU)
    assert [one.parts[0].node_type.name for one in found.options] == ["cpu", "dear"]
    assert found.best is found.options[0]
    assert found.best.trial is not None


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


FIGURES = (
    "decode_tps", "prefill_tps", "price_per_hour", "price_per_month", "price_per_million_tokens",
    "watts", "idle_watts",
)  # fmt: skip


@each_case("one", packaged_catalogue().types)
def test_every_figure_of_it_has_a_source_or_is_marked_as_an_example(one: object) -> None:
    figures = {key for key in FIGURES if getattr(one, key)}
    assert figures - set(getattr(one, "sources")) == set()  # noqa: B009
    assert all(getattr(one, "sources").values())  # noqa: B009


def price_of(
    *types: NodeType, count: int, requests: float = 1000.0, kwh: float = 0.0
) -> FleetPrice:
    """Of so many of each type, which end these requests of 900 and 100 tokens in an hour."""
    workload = Workload(requests, 900, 100, backlog_hours=1.0)
    question = PlanQuestion(workload, Goal(), (), price_per_kwh=kwh)
    return option_price(question, [FleetPart(one, count) for one in types], None)


def test_the_price_of_a_fleet_is_paid_whether_it_works_or_not_and_that_of_tokens_is_not() -> None:
    tokens = {"prompt": 0.1, "completion": 0.4}
    found = price_of(a_type(price_per_hour=None, price_per_million_tokens=tokens), count=1)
    assert found.per_hour == pytest.approx(0.9 * 0.1 + 0.1 * 0.4)
    assert found.per_million_tokens == pytest.approx(0.13)
    # A month has 730 hours.
    one = a_type(price_per_hour=None, price_per_month=0.2 * 730)
    idle, busy = price_of(one, count=2, requests=1.0), price_of(one, count=2)
    assert idle.per_hour == busy.per_hour == pytest.approx(0.4)
    assert idle.month == pytest.approx(0.4 * 730)
    assert idle.per_million_tokens == pytest.approx(400)
    assert busy.per_million_tokens == pytest.approx(0.4)
