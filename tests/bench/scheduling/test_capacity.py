from __future__ import annotations

import pytest

from tests.bench.scheduling import capacity
from tests.bench.scheduling.capacity import Least
from tests.bench.scheduling.fleet import FAST, FLEET, SLOTS, SLOW, Speed
from tests.bench.scheduling.trace import Shape, make

ONE = Speed(prefill=100, decode=10, step=0.1)  # a second for ten tokens at any number of slots
ALIKE = [ONE]


def test_a_single_job_takes_its_time_on_the_fastest_node() -> None:
    job = Least(read=600, write=41)
    assert capacity.alone([job], [SLOW, FAST]) == pytest.approx(1 + 1)
    assert capacity.alone([job, job], [SLOW]) == pytest.approx(600 / 250 + 40 / 16)


def test_only_the_first_request_of_a_tenant_has_to_read_its_system_prompt() -> None:
    trace = make("1", 1.0)
    jobs = capacity.least(trace)
    whole = [
        (which, i)
        for which, session in enumerate(jobs)
        for i, job in enumerate(session)
        if job.read >= 1500
    ]
    assert len(whole) == 6
    assert all(i == 0 for _, i in whole)
    assert len({trace.sessions[which].tenant for which, _ in whole}) == 6
    assert all(
        job.read < 1500 for session in capacity.least(trace, systems=False) for job in session
    )


def test_jobs_that_arrive_together_end_one_after_the_other_the_short_one_first() -> None:
    jobs = [(0.0, Least(300, 0)), (0.0, Least(100, 0)), (0.0, Least(200, 0))]
    assert capacity.queued(jobs, ALIKE) == pytest.approx((1 + 3 + 6) / 3)


def test_a_short_job_interrupts_a_long_one() -> None:
    jobs = [(0.0, Least(1000, 0)), (2.0, Least(100, 0)), (50.0, Least(100, 0))]
    assert capacity.queued(jobs, ALIKE) == pytest.approx((11 + 1 + 1) / 3)


def test_a_fleet_of_two_nodes_is_one_machine_of_twice_the_speed() -> None:
    jobs = [(0.0, Least(100, 10))]
    one = capacity.queued(jobs, ALIKE)
    assert capacity.queued(jobs, [ONE, ONE]) == pytest.approx(one / 2)


@pytest.mark.parametrize("speed", [FAST, SLOW])
def test_a_node_counts_in_the_queue_at_least_as_much_as_it_can_do(speed: Speed) -> None:
    for job in (Least(1000, 0), Least(0, 100), Least(500, 50)):
        assert capacity.queued([(0.0, job)], [FAST, speed]) <= 1 / (
            1 / job.work(FAST) + 1 / job.work(speed)
        ) * (1 + 1e-9)


def test_the_sessions_of_a_saturated_fleet_are_what_its_nodes_do_together() -> None:
    trace = make("1", 1.0)
    fast, slow = capacity.session_rate(trace, [FAST] * 6), capacity.session_rate(trace, [SLOW] * 6)
    mixed = capacity.session_rate(trace, FLEET)
    assert slow < mixed < fast
    assert mixed == pytest.approx(4 / 6 * fast + 2 / 6 * slow)


def test_one_node_reads_everything_once() -> None:
    shape = Shape(sessions=1, turns=2, tenants=1)
    trace = make("1", 1.0, shape)
    [session] = trace.sessions
    read = 1500 + sum(turn.question_tokens for turn in session.turns)
    write = sum(turn.answer_tokens for turn in session.turns)
    work = read / ONE.prefill + write * ONE.token(SLOTS) / SLOTS
    assert capacity.session_rate(trace, ALIKE) == pytest.approx(1 / work)


def test_without_cache_hits_nearly_everything_is_read_again() -> None:
    shape = Shape(sessions=1, turns=4, tenants=1, system_tokens=1)
    trace = make("1", 1.0, shape)
    few, many = (capacity.session_rate(trace, [ONE] * count) / count for count in (1, 1000))
    assert many < few
