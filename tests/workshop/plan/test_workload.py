from __future__ import annotations

from statistics import fmean

import pytest

from gateway.workshop.plan.search import Workload, from_trace, make_trace
from gateway.workshop.simulate.simulation import Job, Trace, TracePrompt, build_trace


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


def test_the_repeated_share_is_a_beginning_that_all_have() -> None:
    jobs = make_trace(Workload(360, 1000, 10, repeat=0.7), 200, seed=1).jobs
    assert {job.prompt.prefix_tokens for job in jobs} == {700}
    assert len({job.prompt.prefix for job in jobs}) == 1
    assert min(job.prompt.tokens for job in jobs) > 700


def test_a_backlog_waits_from_the_start() -> None:
    workload = Workload(50_000, 600, 80, backlog_hours=8.0)
    assert workload.arrivals == pytest.approx(50_000 / 8 / 3600)
    assert {job.time for job in make_trace(workload, 50, seed=1).jobs} == {0.0}


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


def test_what_a_cache_could_know_repeats() -> None:
    jobs = [Job(0, float(n), TracePrompt(-1 - n, 100, 1, 80), 10) for n in range(101)]
    assert from_trace(build_trace(jobs)).repeat == pytest.approx(0.8, abs=0.01)
    turns = [Job(0, 0.0, TracePrompt(5, 100), 50), Job(0, 9.0, TracePrompt(5, 200), 50)]
    assert from_trace(build_trace(turns)).repeat == pytest.approx(149 / 300)


def test_a_trace_of_one_moment_has_no_rate() -> None:
    with pytest.raises(ValueError, match="two requests at different times"):
        from_trace(trace_of(1.0, 1.0))
