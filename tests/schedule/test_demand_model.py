"""What the demand model predicts, and what it learns."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.lease import LeaseRequest, PromptKey, Usage, UsageReport
from gateway.schedule.core.demand_model import DEFAULT_ANSWER_TOKENS, MOST_TOKENS, TokenEstimates
from tests.each_case import each_case
from tests.lease_requests import expected, learn
from tests.schedule.build import a_request, a_scheduler, lease_at_once, node


def prompt_request(*blocks: int) -> LeaseRequest:
    prompt = PromptKey(blocks, 1000.0, size=4000)
    return a_request(prompt_key=prompt, text_bytes=4000, max_tokens=100)


def test_lengths_are_learnt_from_reported_tokens() -> None:
    scheduler = a_scheduler(node("a"), node("b"))
    request, used = a_request(text_bytes=1000, max_tokens=4000), Usage(500, 0, 20)
    for _ in range(30):
        record = lease_at_once(scheduler, request)
        record.release()
        scheduler.demand_model.learn(record.placement, request, UsageReport(0, used, used, 30))
    expected = lease_at_once(scheduler, request).placement
    assert expected.prompt_tokens == pytest.approx(500.0, rel=0.1)
    assert expected.completion_tokens == pytest.approx(20.0, rel=0.5)


async def test_ended_answers_are_learnt_before_their_slots_are_given_out() -> None:
    moments, used = itertools.count(), Usage(1000, 0, 5)
    scheduler = a_scheduler(node(slots=1), clock=lambda: float(next(moments)))
    demand_model, first = scheduler.demand_model, prompt_request(1, 2, 3)
    record = lease_at_once(scheduler, first)
    scheduler.learn_pending = lambda: demand_model.learn(
        record.placement, first, UsageReport(0, used, used, 5)
    )
    waiting = asyncio.create_task(scheduler.wait_for_lease(prompt_request(1, 2, 3, 4)))
    await asyncio.sleep(0)
    record.release()
    demand_model.answer_ended(first)
    async with asyncio.timeout(30.0):
        granted = await waiting
    assert sum(scheduler.records[granted.id].placement.cached.values()) > 900


# Token estimates, and how answers correct them.


HUGE = 32_768


def prompt_of(estimates: TokenEstimates, text: float, model: str = "m", caller: str = "a") -> float:
    return expected(estimates, model, caller, text, 0)[0]


def answer_of(
    estimates: TokenEstimates, max_tokens: float | None = HUGE, model: str = "m", caller: str = "a"
) -> float:
    return expected(estimates, model, caller, 100, max_tokens)[1]


def learn_answers(
    estimates: TokenEstimates,
    *lengths: float,
    max_tokens: float | None = HUGE,
    caller: str = "a",
    complete: bool = True,
) -> None:
    for length in lengths:
        learn(estimates, "m", caller, 400, 100, length, max_tokens, complete=complete)


def test_the_bytes_of_a_models_tokens_are_learnt_from_four_at_first() -> None:
    estimates = TokenEstimates()
    assert prompt_of(estimates, 4000) == pytest.approx(1000)
    for size in (3000, 300, 30_000, 900):
        learn(estimates, "m", "a", size, size / 3, 50, None)
    assert prompt_of(estimates, 6000) == pytest.approx(2000, rel=0.05)
    assert prompt_of(estimates, 6000, caller="b") == pytest.approx(2000, rel=0.05)
    assert prompt_of(estimates, 6000, model="n") == pytest.approx(1500)


def test_a_callers_own_ratio_replaces_the_models() -> None:
    """One caller writes Chinese (two bytes a token), ten others English."""
    estimates = TokenEstimates()
    for turn in range(200):
        learn(estimates, "m", f"english {turn % 10}", 2000, 500, 50, None)
        if turn % 10 == 0:
            learn(estimates, "m", "chinese", 2000, 1000, 50, None)
    assert prompt_of(estimates, 3000, caller="chinese") == pytest.approx(1500, rel=0.06)
    assert prompt_of(estimates, 3000, caller="english 3") == pytest.approx(750, rel=0.06)
    assert prompt_of(estimates, 3000, caller="new") == pytest.approx(800, rel=0.1)


def test_the_tokens_of_images_are_learnt_apart_from_text() -> None:
    """A model that makes 256 tokens of any image, each guessed as 1,000."""
    estimates = TokenEstimates()
    for count in (1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3):
        learn(estimates, "m", "a", 2000, 500 + 256 * count, 50, None, media=1000 * count)
    assert expected(estimates, "m", "b", 400, 0, 0, 2000)[0] == pytest.approx(612, rel=0.15)
    assert prompt_of(estimates, 4000) == pytest.approx(1000)


@each_case(
    ("max_tokens", "expected"),
    [
        *((one, DEFAULT_ANSWER_TOKENS) for one in (None, 10**18, 1e300, math.inf, math.nan)),
        (HUGE, pytest.approx(DEFAULT_ANSWER_TOKENS, rel=0.01)),
        (16, pytest.approx(16, rel=0.01)),
        (0, 0),
        (-1, 0),
    ],
)
def test_an_unknown_answer_has_the_default_length_within_a_limit_that_is_not_absurd(
    max_tokens: float | None, expected: object
) -> None:
    assert answer_of(TokenEstimates(), max_tokens) == expected


def test_answers_that_always_reach_their_limit_are_expected_at_the_limit() -> None:
    estimates = TokenEstimates()
    for _ in range(10):
        for length in (20, 80, 200):
            learn_answers(estimates, length, max_tokens=length)
    for limit in (20, 80, 200):
        assert answer_of(estimates, limit) == pytest.approx(limit, rel=0.05)


def test_answers_cut_short_teach_no_short_lengths() -> None:
    estimates = TokenEstimates()
    learn_answers(estimates, *20 * [300])
    before = answer_of(estimates)
    learn_answers(estimates, *20 * [3], complete=False)
    assert answer_of(estimates) >= before * 0.95


@each_case(
    ("lengths", "expected", "within"),
    [([40] * 100 + [400] * 100, 400, 0.15), ([50] * 60 + [30_000], 50, 0.3)],
)
def test_a_change_of_lengths_is_followed_but_no_runaway_answer(
    lengths: list[float], expected: float, within: float
) -> None:
    estimates = TokenEstimates()
    learn_answers(estimates, *lengths)
    assert answer_of(estimates) == pytest.approx(expected, rel=within)


def test_memory_is_bounded_and_active_callers_stay() -> None:
    estimates = TokenEstimates(most_models=10, most_callers=100)
    for number in range(1000):
        learn_answers(estimates, 50)
        learn(estimates, f"m{number}", f"c{number}", 1000, 500, 9, None)

    def known(model: str, caller: str) -> bool:
        found = expected(estimates, model, caller, 1000, None)
        return found != expected(estimates, "never seen", "never seen", 1000, None)

    # "m" is the tenth model, and its caller one of the hundred.
    assert [number for number in range(1000) if known(f"m{number}", "")] == [*range(991, 1000)]
    callers = [number for number in range(991) if known(f"m{number}", f"c{number}")]
    assert callers == [*range(901, 991)]
    assert answer_of(estimates) == pytest.approx(50, rel=0.1)


numbers: Any = st.floats() | st.integers(-(10**30), 10**30)


@given(st.lists(st.tuples(numbers, numbers, numbers, st.none() | numbers, numbers, numbers)))
def test_estimates_are_sane_whatever_is_reported(told: list[tuple[Any, ...]]) -> None:
    estimates = TokenEstimates()
    for text, prompt, completion, limit, ids, media in told:
        learn(estimates, "m", "a", text, prompt, completion, limit, ids, media)
        for size in (*expected(estimates, "m", "a", text, limit, ids, media), answer_of(estimates)):
            assert 0 <= size <= MOST_TOKENS
        assert 0 < prompt_of(estimates, 1000) < 10_000
        assert 0 <= answer_of(estimates, 100) <= 100


@pytest.mark.parametrize(("times", "stays"), [(1.4, True), (1.6, False)])
def test_a_session_stays_at_its_node_unless_another_is_much_faster(
    times: float, stays: bool
) -> None:
    scheduler = a_scheduler(node("a"), node("b"))

    def served_by(number: int) -> str:
        """The node of a request of the session, whose prompt no node has cached."""
        prompt = PromptKey((number,), 100.0, size=400)
        lease = lease_at_once(scheduler, a_request(prompt_key=prompt, text_bytes=400, session="s"))
        lease.release()
        return lease.node.name

    last_node = served_by(1)
    assert [served_by(number) for number in range(2, 12)] == [last_node] * 10
    for row in scheduler.dispatcher.placement_state.by_name.values():
        factor = 1.0 if row.name == last_node else times
        row.set_speed(100.0 * factor, 0.1 / factor, 0.0)
    assert (served_by(12) == last_node) is stays
