from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.errors import ConfigError
from gateway.workshop.plan.answer import (
    Deployment,
    PlanAnswer,
    break_even,
    compare_deployments,
)
from gateway.workshop.plan.catalogue import (
    FleetPrice,
    NodeCatalogue,
    NodeType,
    ReferenceModel,
    fitting_types,
    packaged_catalogue,
    read_catalogue,
)
from gateway.workshop.plan.search import (
    FleetPart,
    Goal,
    PlanQuestion,
    TimeLimit,
    Workload,
    option_price,
)
from gateway.workshop.simulate.fleets import models_from_text
from tests.each_case import each_case
from tests.known import known
from tests.workshop.plan.build import CPU, GPU, a_type, planned


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


def problems(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_catalogue(path)
    return [str(one).removeprefix(str(path)) for one in caught.value.problems]


@each_case("one", packaged_catalogue().types)
def test_every_figure_of_it_has_a_source_or_is_marked_as_an_example(one: object) -> None:
    figures = {key for key in FIGURES if getattr(one, key)}
    assert figures - set(getattr(one, "sources")) == set()  # noqa: B009
    assert all(getattr(one, "sources").values())  # noqa: B009


@each_case(
    ("line", "problem"),
    [
        ("price_per_hour: -1", ":5: types[0].price_per_hour: must be greater than or equal to 0"),
        ("price_per_hour: .nan", ":5: types[0].price_per_hour: must be a finite number"),
        ("price_per_month: 1e99", ":5: types[0].price_per_month: must be less than or equal to"),
        ("tier: tpu", ":5: types[0].tier: "),
        ("", ":2: types[0]: has no price (write price_per_hour, price_per_month or"),
        ("watts: 1\n    idle_watts: 2", ":6: types[0].idle_watts: must not be above watts (1)"),
    ],
)
def test_a_wrong_or_missing_figure_is_reported(tmp_path: Path, line: str, problem: str) -> None:
    text = f"types:\n  - name: a\n    decode_tps: 3\n    prefill_tps: 4\n    {line}\n"
    assert any(one.startswith(problem) for one in problems(tmp_path, text))


def test_types_that_hold_the_largest_of_several_models_are_planned_with() -> None:
    types = (a_type("small", memory_gib=4.0), a_type("large", memory_gib=40.0), a_type("unknown"))
    listed = NodeCatalogue(types=types, model=ReferenceModel(gib=4.0))
    (found,), notes = fitting_types(listed, None, (), models_from_text("3x2GiB:12GiB"))
    # Its speeds are for 4 GiB, those of routers for 8.
    assert (found.name, found.decode_tps) == ("large", 5.0)
    assert notes == (
        "small is left out: the model needs 12.0 GiB, it has 4",
        "unknown is left out: it says no memory_gib for models on demand",
    )


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
