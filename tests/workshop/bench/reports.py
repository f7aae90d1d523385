"""Reports for tests of how they are shown."""

from __future__ import annotations

from dataclasses import replace

from gateway.workshop.bench.exchange import Baseline, RequestResult, ServerDescription
from gateway.workshop.bench.load import ClientFigures, LoadRun, Loop, RequestGoal, parse_loads
from gateway.workshop.bench.report import BenchReport, figures_of, judge
from gateway.workshop.simulate.report import Percentiles


def sample_runs(*, fails: bool = False) -> list[LoadRun]:
    """Runs of two loads of five requests, all of which failed or none."""
    runs = []
    for load in parse_loads(Loop.CLOSED, "1,4", 5, None):
        results = []
        for number in range(5):
            start, ttft = 10.0 + number, 0.1 * load.level * (1 + number / 10)
            result = RequestResult(number, start, started=start, ended=start + ttft + 0.9)
            if fails:
                result.error, result.detail = "http_500", "full"
            else:
                result.first, result.last = start + ttft, start + ttft + 0.9
                result.events = 10
            results.append(result)
        client = ClientFigures(Percentiles.of([0.001]), Percentiles.of([]), 0.1)
        runs.append(LoadRun(load, results, client, is_whole=True))
    return runs


def sample_report(*, fails: bool = False, goal: RequestGoal | None = None) -> BenchReport:
    """A report of `sample_runs`."""
    server, baseline = ServerDescription(model="demo", slots=4), Baseline(0.1, 0.1, 1)
    found = [figures_of(run, goal or RequestGoal(), 0.0, 0.1) for run in sample_runs(fails=fails)]
    return BenchReport(
        "http://127.0.0.1:8000",
        "chat",
        "2026-01-02T03:04:05+00:00",
        server,
        {"prompt_tokens": 64, "seed": 1},
        {"python": "3.11.2"},
        goal or RequestGoal(),
        baseline,
        [replace(one, verdict=judge(one, server, baseline)) for one in found],
    )
