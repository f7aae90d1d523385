from __future__ import annotations

import pytest

from tests.bench.scheduling import trace
from tests.bench.scheduling.fronts import FAST, FLEET, SLOTS, SLOW, Speed, answer_tokens
from tests.bench.scheduling.trace import (
    Least,
    Shape,
    least_work,
    make,
    mean_alone,
    mean_queued,
    session_rate,
)
from tests.emulator import render_chat
from tests.emulator.language_model import count_tokens


def test_a_seed_gives_the_same_trace_and_another_gives_another() -> None:
    assert make("1", 0.5) == make("1", 0.5)
    assert make("1", 0.5).systems[0] != make("2", 0.5).systems[0]


def test_another_rate_has_the_same_conversations_at_other_times() -> None:
    slow, fast = make("1", 0.5), make("1", 1.0)
    assert [s.turns for s in slow.sessions] == [s.turns for s in fast.sessions]
    assert [s.at for s in slow.sessions] == pytest.approx([2 * s.at for s in fast.sessions])


def test_there_are_24_sessions_of_4_turns_in_6_tenants_of_1500_tokens() -> None:
    found = make("1", 0.5)
    assert (len(found.sessions), found.requests, len(set(found.systems))) == (24, 96, 6)
    tenants = [session.tenant for session in found.sessions]
    assert {tenants.count(tenant) for tenant in range(6)} == {4}
    assert {count_tokens(system) for system in found.systems} == {1501}


def test_sessions_begin_at_the_requested_rate() -> None:
    shape = Shape(sessions=2000, turns=1, system_tokens=1)
    assert make("1", 2.0, shape).sessions[-1].at == pytest.approx(1000, rel=0.1)


def test_lengths_vary_within_their_bounds() -> None:
    turns = [turn for s in make("1", 1.0, Shape(sessions=200)).sessions for turn in s.turns]
    _, _, least, most = trace.ANSWER
    answers = [turn.answer_tokens for turn in turns]
    assert least <= min(answers) < trace.ANSWER[0] < max(answers) <= most
    assert turns[0].think == 0
    assert all(turn.think >= trace.THINK[2] for i, turn in enumerate(turns) if i % 4)


def test_the_emulated_model_ends_where_the_last_question_asks() -> None:
    first, second = make("1", 1.0).sessions[0].turns[:2]
    talk = [
        {"role": "user", "content": first.question},
        {"role": "assistant", "content": "and so on"},
        {"role": "user", "content": second.question},
    ]
    assert answer_tokens(render_chat(talk)) == second.answer_tokens


ONE = Speed(prefill=100, decode=10, step=0.1)  # a second for ten tokens at any number of slots
ALIKE = [ONE]


def test_a_single_job_takes_its_time_on_the_fastest_node() -> None:
    job = Least(read=600, write=41)
    assert mean_alone([job], [SLOW, FAST]) == pytest.approx(1 + 1)
    assert mean_alone([job, job], [SLOW]) == pytest.approx(600 / 250 + 40 / 16)


def test_only_the_first_request_of_a_tenant_has_to_read_its_system_prompt() -> None:
    trace = make("1", 1.0)
    jobs = least_work(trace)
    whole = [
        (which, i)
        for which, session in enumerate(jobs)
        for i, job in enumerate(session)
        if job.read >= 1500
    ]
    assert len(whole) == 6
    assert all(i == 0 for _, i in whole)
    assert len({trace.sessions[which].tenant for which, _ in whole}) == 6
    assert all(job.read < 1500 for session in least_work(trace, systems=False) for job in session)


def test_jobs_that_arrive_together_end_one_after_the_other_the_short_one_first() -> None:
    jobs = [(0.0, Least(300, 0)), (0.0, Least(100, 0)), (0.0, Least(200, 0))]
    assert mean_queued(jobs, ALIKE) == pytest.approx((1 + 3 + 6) / 3)


def test_a_short_job_interrupts_a_long_one() -> None:
    jobs = [(0.0, Least(1000, 0)), (2.0, Least(100, 0)), (50.0, Least(100, 0))]
    assert mean_queued(jobs, ALIKE) == pytest.approx((11 + 1 + 1) / 3)


def test_a_fleet_of_two_nodes_is_one_machine_of_twice_the_speed() -> None:
    jobs = [(0.0, Least(100, 10))]
    one = mean_queued(jobs, ALIKE)
    assert mean_queued(jobs, [ONE, ONE]) == pytest.approx(one / 2)


@pytest.mark.parametrize("speed", [FAST, SLOW])
def test_a_node_counts_in_the_queue_at_least_as_much_as_it_can_do(speed: Speed) -> None:
    for job in (Least(1000, 0), Least(0, 100), Least(500, 50)):
        assert mean_queued([(0.0, job)], [FAST, speed]) <= 1 / (
            1 / job.work(FAST) + 1 / job.work(speed)
        ) * (1 + 1e-9)


def test_the_sessions_of_a_saturated_fleet_are_what_its_nodes_do_together() -> None:
    trace = make("1", 1.0)
    fast, slow = session_rate(trace, [FAST] * 6), session_rate(trace, [SLOW] * 6)
    mixed = session_rate(trace, FLEET)
    assert slow < mixed < fast
    assert mixed == pytest.approx(4 / 6 * fast + 2 / 6 * slow)


def test_one_node_reads_everything_once() -> None:
    shape = Shape(sessions=1, turns=2, tenants=1)
    trace = make("1", 1.0, shape)
    [session] = trace.sessions
    read = 1500 + sum(turn.question_tokens for turn in session.turns)
    write = sum(turn.answer_tokens for turn in session.turns)
    work = read / ONE.prefill + write * ONE.token(SLOTS) / SLOTS
    assert session_rate(trace, ALIKE) == pytest.approx(1 / work)


def test_without_cache_hits_nearly_everything_is_read_again() -> None:
    shape = Shape(sessions=1, turns=4, tenants=1, system_tokens=1)
    trace = make("1", 1.0, shape)
    few, many = (session_rate(trace, [ONE] * count) / count for count in (1, 1000))
    assert many < few
