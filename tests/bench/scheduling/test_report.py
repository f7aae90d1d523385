from __future__ import annotations

import pytest

from tests.bench.scheduling import report
from tests.bench.scheduling.play import Record
from tests.bench.scheduling.report import FIGURES, Played, Results

MEAN, P50, P95, RATE, CACHED = FIGURES


def record(took: float, ttft: float = 1.0, sent: float = 0.0, problem: str = "") -> Record:
    return Record(0, 0, sent, ttft, took, 100, 25, 10, problem)


def played(front: str, *tooks: float, load: str = "capacity", **more: float) -> Played:
    records = [record(took, ttft=took / 2) for took in tooks]
    return Played(front, load, 1, records, {"alone": 1.0, "queued": 0.5}, **more)


def test_figures_are_over_all_seeds() -> None:
    runs = [played("nginx", 1.0, 2.0), played("nginx", 6.0)]
    results = Results(runs)
    assert results.value("nginx", "capacity", MEAN) == 3
    assert results.value("nginx", "capacity", P50) == 1
    assert results.value("nginx", "capacity", P95) == 3
    assert results.value("nginx", "capacity", RATE) == pytest.approx(30 / (2 + 6))
    assert results.value("nginx", "capacity", CACHED) == 0.25


def test_a_failed_request_takes_its_front_out_of_all_figures() -> None:
    bad = Played("nginx", "capacity", 1, [record(1), record(1, problem="status 502")])
    results = Results([bad, played("gateway", 1.0)])
    assert results.value("nginx", "capacity", MEAN) is None
    assert results.verdicts() == []
    assert "nginx, capacity, seed 1: 1, the first: status 502" in report.tables(results)
