from __future__ import annotations

import pytest

from tests.bench.scheduling.fronts import FAST, SLOTS, SLOW, Speed
from tests.bench.scheduling.trace import Least, Shape, make, mean_queued, session_rate


def test_another_rate_has_the_same_conversations_at_other_times() -> None:
    slow, fast = make("1", 0.5), make("1", 1.0)
    assert [s.turns for s in slow.sessions] == [s.turns for s in fast.sessions]
    assert [s.at for s in slow.sessions] == pytest.approx([2 * s.at for s in fast.sessions])


ONE = Speed(prefill=100, decode=10, step=0.1)  # a second for ten tokens at any number of slots
ALIKE = [ONE]


def test_a_short_job_interrupts_a_long_one() -> None:
    jobs = [(0.0, Least(1000, 0)), (2.0, Least(100, 0)), (50.0, Least(100, 0))]
    assert mean_queued(jobs, ALIKE) == pytest.approx((11 + 1 + 1) / 3)


@pytest.mark.parametrize("speed", [FAST, SLOW])
def test_a_node_counts_in_the_queue_at_least_as_much_as_it_can_do(speed: Speed) -> None:
    for job in (Least(1000, 0), Least(0, 100), Least(500, 50)):
        assert mean_queued([(0.0, job)], [FAST, speed]) <= 1 / (
            1 / job.work(FAST) + 1 / job.work(speed)
        ) * (1 + 1e-9)


def test_one_node_reads_everything_once() -> None:
    shape = Shape(sessions=1, turns=2, tenants=1)
    trace = make("1", 1.0, shape)
    [session] = trace.sessions
    read = 1500 + sum(turn.question_tokens for turn in session.turns)
    write = sum(turn.answer_tokens for turn in session.turns)
    work = read / ONE.prefill + write * ONE.token(SLOTS) / SLOTS
    assert session_rate(trace, ALIKE) == pytest.approx(1 / work)
