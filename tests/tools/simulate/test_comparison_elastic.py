from __future__ import annotations

import pytest

from gateway.scheduling.autoscaling_policy import AutoscalingRules
from gateway.tools.simulate.comparison import compare_elastic
from gateway.tools.simulate.trace import Trace
from gateway.tools.simulate.traffic import Traffic, generate
from tests.tools.simulate.build import job, machine, trace

RULES = AutoscalingRules(start_above=2, start_after=1, stop_after=60, cooldown=10)


def bursts() -> Trace:
    """A request now and then, and forty at once after five minutes."""
    quiet = [job(time=30.0 * number) for number in range(40)]
    return trace([*quiet, *(job(time=300.0 + number / 10, output=60) for number in range(40))])


def test_a_burst_is_served_with_fewer_machine_hours_than_always_on() -> None:
    base, standby = [machine()], [machine(), machine(), machine()]
    always, elastic, alone = compare_elastic(bursts(), base, standby, RULES, startup=20)
    assert (always.starts, alone.starts) == (0, 0)
    assert 1 <= elastic.starts <= 3
    assert alone.machine_hours < elastic.machine_hours < 0.6 * always.machine_hours
    assert always.report.wait.mean < elastic.report.wait.mean < alone.report.wait.mean


def test_a_machine_is_paid_from_its_start_to_its_stop() -> None:
    work = trace([job(time=0.0, output=10), job(time=600.0, output=10)])
    always, elastic = compare_elastic(work, [], [machine()], RULES, startup=20)
    assert always.machine_hours == pytest.approx(always.report.seconds / 3600)
    assert elastic.starts == 2
    # Twice: 20 s to start, a second of work, 60 s until it is stopped.
    assert elastic.machine_hours * 3600 == pytest.approx(2 * 81, abs=4)
    assert elastic.report.wait.mean == pytest.approx(20, abs=3)


def test_a_machine_that_was_stopped_has_lost_its_caches() -> None:
    turns = [job(time=0.0, prompt=1000, stream=1), job(time=600.0, prompt=1200, stream=1)]
    always, elastic = compare_elastic(trace(turns), [], [machine()], RULES, startup=20)
    assert always.report.cached_share > 0.4
    assert elastic.report.cached_share == 0


def test_bursts_raise_the_rate_for_a_time_and_keep_the_mean() -> None:
    traffic = Traffic(requests=20_000, rate=2.0, turns=1, burst=8.0, every=1000.0, lasting=200.0)
    jobs = generate(traffic, 3).jobs
    assert len(jobs) / jobs[-1].time == pytest.approx(2.0, rel=0.1)
    inside = sum(0.5 <= (one.time / 1000.0) % 1.0 < 0.7 for one in jobs)
    assert inside / len(jobs) == pytest.approx(8 * 0.2 / (0.8 + 8 * 0.2), abs=0.05)


@pytest.mark.parametrize("text", ["burst=0.5", "lasting=4000", "lasting=0"])
def test_impossible_bursts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="burst must be"):
        Traffic.from_text(text)
