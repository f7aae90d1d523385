from __future__ import annotations

from gateway.workshop.plan.answer import contradiction, explain, headline
from gateway.workshop.plan.search import Workload
from tests.known import known
from tests.workshop.plan.build import CPU, a_type, planned


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
