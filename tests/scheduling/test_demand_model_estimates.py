"""Token estimates, and how answers correct them."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.scheduling.demand_model import DEFAULT_ANSWER_TOKENS, MOST_TOKENS, TokenEstimates
from tests.each_case import each_case

HUGE = 32_768


def prompt_of(estimates: TokenEstimates, text: float, model: str = "m", caller: str = "a") -> float:
    return estimates.expected_tokens(model, caller, text, 0)[0]


def answer_of(
    estimates: TokenEstimates, max_tokens: float | None = HUGE, model: str = "m", caller: str = "a"
) -> float:
    return estimates.expected_tokens(model, caller, 100, max_tokens)[1]


def learn_answers(
    estimates: TokenEstimates,
    *lengths: float,
    max_tokens: float | None = HUGE,
    caller: str = "a",
    complete: bool = True,
) -> None:
    for length in lengths:
        estimates.learn("m", caller, 400, 100, length, max_tokens, complete=complete)


def test_four_bytes_are_a_token_at_first() -> None:
    assert prompt_of(TokenEstimates(), 4000) == pytest.approx(1000)


def test_the_bytes_of_a_models_tokens_are_learnt() -> None:
    estimates = TokenEstimates()
    for size in (3000, 300, 30_000, 900):
        estimates.learn("m", "a", size, size / 3, 50, None)
    assert prompt_of(estimates, 6000) == pytest.approx(2000, rel=0.05)
    assert prompt_of(estimates, 6000, caller="b") == pytest.approx(2000, rel=0.05)
    assert prompt_of(estimates, 6000, model="n") == pytest.approx(1500)


def test_a_callers_own_ratio_replaces_the_models() -> None:
    """One caller writes Chinese (two bytes a token), ten others English."""
    estimates = TokenEstimates()
    for turn in range(200):
        estimates.learn("m", f"english {turn % 10}", 2000, 500, 50, None)
        if turn % 10 == 0:
            estimates.learn("m", "chinese", 2000, 1000, 50, None)
    assert prompt_of(estimates, 3000, caller="chinese") == pytest.approx(1500, rel=0.06)
    assert prompt_of(estimates, 3000, caller="english 3") == pytest.approx(750, rel=0.06)
    assert prompt_of(estimates, 3000, caller="new") == pytest.approx(800, rel=0.1)


def test_long_prompts_teach_more_than_short_ones() -> None:
    estimates = TokenEstimates()
    for _ in range(20):
        estimates.learn("m", "a", 40, 20, 50, None)
        estimates.learn("m", "a", 20_000, 5000, 50, None)
    assert prompt_of(estimates, 20_000) == pytest.approx(5000, rel=0.03)


def test_one_wrong_usage_moves_the_ratio_little() -> None:
    estimates = TokenEstimates()
    for _ in range(30):
        estimates.learn("m", "a", 4000, 1000, 50, None)
    estimates.learn("m", "a", 4000, 10**9, 50, None)
    assert prompt_of(estimates, 4000) == pytest.approx(1000, rel=0.1)


def test_token_ids_count_exactly() -> None:
    estimates = TokenEstimates()
    for _ in range(20):
        estimates.learn("m", "a", 0, 777, 50, None, exact_tokens=777)
    assert estimates.expected_tokens("m", "a", 0, 10, exact_tokens=777)[0] == 777
    assert prompt_of(estimates, 4000) == pytest.approx(1000)


def test_the_tokens_of_images_are_learnt_apart_from_text() -> None:
    """A model that makes 256 tokens of any image, each guessed as 1,000."""
    estimates = TokenEstimates()
    for count in (1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3):
        estimates.learn("m", "a", 2000, 500 + 256 * count, 50, None, media_tokens=1000 * count)
    assert estimates.expected_tokens("m", "b", 400, 0, media_tokens=2000)[0] == pytest.approx(
        612, rel=0.15
    )
    assert prompt_of(estimates, 4000) == pytest.approx(1000)


def test_an_unknown_answer_has_the_default_length_within_its_limit() -> None:
    assert answer_of(TokenEstimates(), None) == DEFAULT_ANSWER_TOKENS
    assert answer_of(TokenEstimates(), HUGE) == pytest.approx(DEFAULT_ANSWER_TOKENS, rel=0.01)
    assert answer_of(TokenEstimates(), 16) == pytest.approx(16, rel=0.01)


def test_lengths_far_below_max_tokens_are_learnt() -> None:
    estimates, rng = TokenEstimates(), random.Random(7)
    for caller, mean in (("short", 20), ("long", 600)):
        for _ in range(80):
            learn_answers(estimates, rng.lognormvariate(math.log(mean), 0.4), caller=caller)
    assert answer_of(estimates, caller="short") == pytest.approx(21, rel=0.25)
    assert answer_of(estimates, caller="long") == pytest.approx(650, rel=0.25)
    assert 21 < answer_of(estimates, caller="new") < 650


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


def test_a_change_of_lengths_is_followed() -> None:
    estimates = TokenEstimates()
    learn_answers(estimates, *100 * [40])
    learn_answers(estimates, *100 * [400])
    assert answer_of(estimates) == pytest.approx(400, rel=0.15)


def test_one_runaway_answer_moves_it_little() -> None:
    estimates = TokenEstimates()
    learn_answers(estimates, *60 * [50], 30_000)
    assert answer_of(estimates) == pytest.approx(50, rel=0.3)


def test_max_tokens_of_zero_means_no_answer() -> None:
    assert answer_of(TokenEstimates(), 0) == 0
    assert answer_of(TokenEstimates(), -1) == 0


@each_case("absurd", [10**18, 1e300, math.inf, math.nan, None])
def test_an_absurd_max_tokens_counts_as_none(absurd: float | None) -> None:
    assert answer_of(TokenEstimates(), absurd) == DEFAULT_ANSWER_TOKENS


def test_memory_is_bounded_and_active_callers_stay() -> None:
    estimates = TokenEstimates(most_models=10, most_callers=100)
    for number in range(1000):
        learn_answers(estimates, 50)
        estimates.learn(f"m{number}", f"c{number}", 1000, 500, 9, None)

    def known(model: str, caller: str) -> bool:
        expected = estimates.expected_tokens(model, caller, 1000, None)
        return expected != estimates.expected_tokens("never seen", "never seen", 1000, None)

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
        estimates.learn("m", "a", text, prompt, completion, limit, ids, media)
        for size in (
            *estimates.expected_tokens("m", "a", text, limit, ids, media),
            answer_of(estimates),
        ):
            assert 0 <= size <= MOST_TOKENS
        assert 0 < prompt_of(estimates, 1000) < 10_000
        assert 0 <= answer_of(estimates, 100) <= 100
