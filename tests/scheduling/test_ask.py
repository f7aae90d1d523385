from __future__ import annotations

import math

import pytest

from gateway.scheduling.ask import MOST_TOKENS, USUAL_COMPLETION
from tests.scheduling.rows import Desk


@pytest.mark.parametrize(
    ("given", "kept"),
    [(1e18, MOST_TOKENS), (math.inf, MOST_TOKENS), (-3.0, 1.0), (math.nan, USUAL_COMPLETION)],
)
def test_absurd_lengths_of_an_answer_are_bounded(given: float, kept: float) -> None:
    assert Desk().ask(completion=given).completion == kept


@pytest.mark.parametrize("given", [-1.0, math.nan])
def test_a_prompt_that_is_no_number_counts_as_none(given: float) -> None:
    assert Desk().ask(prompt=given).prompt == 0.0


def test_a_prompt_of_endless_tokens_is_bounded() -> None:
    assert Desk().ask(prompt=math.inf).prompt == MOST_TOKENS
