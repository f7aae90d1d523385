from __future__ import annotations

import pytest

from tests.bench.scheduling import trace
from tests.bench.scheduling.fleet import answer_tokens
from tests.bench.scheduling.trace import Shape, make
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
