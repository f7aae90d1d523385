"""Published sums come out, and so does what they leave out."""

from __future__ import annotations

import math

import pytest

from gateway.tools.plan.explanation import contradiction, whole_instances
from gateway.tools.plan.pricing import (
    NodePrice,
    PricedPart,
    fleet_price,
    instances,
    per_million_tokens,
    per_month,
    price_by_share,
    price_of_all,
)


@pytest.mark.parametrize(("requests", "needed"), [(100, 1), (1_000, 3), (10_000, 28)])
def test_instances_by_pure_arithmetic(requests: int, needed: int) -> None:
    assert whole_instances(instances(requests, 100, 10)) == needed


def test_three_nodes_at_60_a_month_against_an_endpoint_at_070_an_hour() -> None:
    nodes = fleet_price([PricedPart(NodePrice(60 / 730), 3, 0.9)], 0.0)
    assert nodes.month == pytest.approx(180)
    assert per_month(0.70) == pytest.approx(511)


def test_shares_weigh_prices_but_both_machines_run() -> None:
    parts = [(0.9, 0.20), (0.1, 2.00)]
    assert price_by_share(parts) == pytest.approx(0.38)
    assert price_of_all(parts) == pytest.approx(2.20)


def test_ten_tokens_a_second_at_020_an_hour_are_56_a_million() -> None:
    assert per_million_tokens(0.20, 10) == pytest.approx(5.56, abs=0.005)
    wrong = contradiction(0.20, 10, 0.50)
    assert "10 tokens/s at 0.20 an hour are 5.56 a million tokens, not 0.50" in wrong
    assert contradiction(0.20, 10, 5.6) == ""


def test_the_price_of_a_fleet_is_paid_whether_it_works_or_not() -> None:
    idle = fleet_price([PricedPart(NodePrice(0.2), 2, 0.0)], 0.0)
    busy = fleet_price([PricedPart(NodePrice(0.2), 2, 1.0, 9e5, 1e5)], 0.0)
    assert idle.per_hour == busy.per_hour == pytest.approx(0.4)
    assert idle.per_million is None
    assert busy.per_million == pytest.approx(0.4)


def test_tokens_are_paid_where_they_are_served() -> None:
    price = NodePrice(0.0, per_million_prompt=0.1, per_million_completion=0.4)
    found = fleet_price([PricedPart(price, 1, 0.1, 2e6, 1e6)], 0.0)
    assert found.per_hour == pytest.approx(0.6)
    assert found.per_million == pytest.approx(0.2)


def test_electricity_lies_between_idle_and_busy() -> None:
    price = NodePrice(0.1, watts=300, idle_watts=100)
    assert price.electricity(0.0, 0.30) == pytest.approx(0.03)
    assert price.electricity(0.5, 0.30) == pytest.approx(0.06)
    assert price.electricity(7.0, 0.30) == pytest.approx(0.09)
    found = fleet_price([PricedPart(price, 2, 0.5)], 0.30)
    assert found.electricity_per_hour == pytest.approx(0.12)
    assert found.per_hour == pytest.approx(0.32)


def test_one_unknown_price_makes_that_of_the_fleet_unknown() -> None:
    parts = [PricedPart(NodePrice(0.1), 1, 0.5), PricedPart(NodePrice(None), 1, 0.5)]
    found = fleet_price(parts, 0.0)
    assert (found.per_hour, found.month, found.per_million) == (None, None, None)
    assert not math.isnan(found.electricity_per_hour)
