from __future__ import annotations

import math
from pathlib import Path

import pytest

from gateway.config.errors import ConfigError
from gateway.workshop.plan.catalogue import (
    FleetPrice,
    NodeCatalogue,
    NodeType,
    NoTypeFitsError,
    ReferenceModel,
    fitting_types,
    packaged_catalogue,
    read_catalogue,
)
from gateway.workshop.plan.search import FleetPart, Goal, PlanQuestion, Workload, option_price
from gateway.workshop.simulate.fleets import models_from_text
from tests.each_case import each_case
from tests.workshop.plan.build import a_type

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


def test_the_packaged_catalogue_has_what_the_plan_promises() -> None:
    names = {one.name for one in packaged_catalogue().types}
    assert {"cpu-8", "cpu-16", "cpu-32", "cpu-64", "cpu-2x16", "cpu-2x32", "cpu-2x64"} <= names
    assert {"graviton3-64", "ampere-80", "t4", "l4", "a100", "endpoint-hour"} <= names
    assert packaged_catalogue().model == ReferenceModel(name="Llama 3 8B Q4_K_M", gib=4.58)


@each_case("one", packaged_catalogue().types)
def test_every_figure_of_it_has_a_source_or_is_marked_as_an_example(one: object) -> None:
    figures = {key for key in FIGURES if getattr(one, key)}
    assert figures - set(getattr(one, "sources")) == set()  # noqa: B009
    assert all(getattr(one, "sources").values())  # noqa: B009


def test_a_typo_is_reported_with_its_line_and_key(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        "types:\n  - name: a\n    decode_tps: 3\n    prefil_tps: 4\n    price_per_hour: 1\n",
    )
    assert found[0] == ":2: types[0].prefill_tps: is missing (add it)"
    assert found[1].startswith(":4: types[0].prefil_tps: unknown key (did you mean prefill_tps?")


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


def test_two_prices_two_types_of_one_name_and_no_type(tmp_path: Path) -> None:
    figures = "decode_tps: 3, prefill_tps: 4, price_per_hour: 1"
    both = f"types:\n  - {{name: a, {figures}, price_per_month: 2}}\n"
    assert "can't stand beside price_per_hour (keep one price)" in problems(tmp_path, both)[0]
    twice = f"types:\n  - {{name: a, {figures}}}\n  - {{name: a, {figures}}}\n"
    assert "the type in line 2 has this name already" in problems(tmp_path, twice)[0]
    assert problems(tmp_path, "types: []\n") == [":1: types: is empty (write one type)"]
    assert problems(tmp_path, "- a\n") == [":1: must be a mapping (write types: [...])"]


def test_a_model_of_twice_the_size_is_half_as_fast() -> None:
    listed = NodeCatalogue(types=(a_type(memory_gib=16.0),), model=ReferenceModel(gib=4.0))
    (found,), notes = fitting_types(listed, 8.0)
    assert (found.decode_tps, found.prefill_tps, notes) == (5.0, 50.0, ())


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


def test_a_type_without_the_memory_is_left_out() -> None:
    types = (a_type("small", memory_gib=4.0), a_type("large", memory_gib=40.0))
    listed = NodeCatalogue(types=types, model=ReferenceModel(gib=8.0))
    found, notes = fitting_types(listed, None)
    assert [one.name for one in found] == ["large"]
    assert notes == ("small is left out: the model needs 9.4 GiB, it has 4",)
    with pytest.raises(NoTypeFitsError, match="no type has the memory for it: small is left out"):
        fitting_types(listed, 400.0)


def test_a_type_that_is_not_in_the_catalogue_is_named_with_those_that_are() -> None:
    listed = NodeCatalogue(types=(a_type("a"), a_type("b")))
    with pytest.raises(NoTypeFitsError, match="has no type 'c'; it has a, b"):
        fitting_types(listed, None, ("b", "c"))
    with pytest.raises(NoTypeFitsError, match=r"what its speeds are: model\.gib"):
        fitting_types(listed, 3.0)
    with pytest.raises(NoTypeFitsError, match="more than 0"):
        fitting_types(listed, math.nan)


def test_a_machine_of_two_sockets_is_two_nodes() -> None:
    one = a_type(servers=2, slots=3)
    assert [(m.name, m.slots) for m in one.machines(2)] == [
        (f"node-{number}", 3) for number in (1, 2, 3, 4)
    ]


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


def test_electricity_lies_between_idle_and_busy() -> None:
    one = a_type(price_per_hour=0.1, watts=300, idle_watts=100)
    assert one.electricity(0.0, 0.30) == pytest.approx(0.03)
    assert one.electricity(0.5, 0.30) == pytest.approx(0.06)
    assert one.electricity(7.0, 0.30) == pytest.approx(0.09)
    found = price_of(one, count=2, kwh=0.30)
    assert found.electricity_per_hour == pytest.approx(0.18)
    assert found.per_hour == pytest.approx(0.38)


def test_one_unknown_price_makes_that_of_the_fleet_unknown() -> None:
    found = price_of(*(a_type(price_per_hour=hour) for hour in (0.1, None)), count=1)
    assert (found.per_hour, found.month, found.per_million_tokens) == (None, None, None)
    assert not math.isnan(found.electricity_per_hour)
