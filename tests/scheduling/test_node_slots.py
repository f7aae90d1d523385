from __future__ import annotations

import math

import pytest

from gateway.scheduling.placement_state import DEFAULT_COMPLETION_TOKENS, MOST_TOKENS_PER_REQUEST
from tests.each_case import each_case
from tests.scheduling.queue_simulation import QueueSimulation


@each_case(
    ("given", "kept"),
    [
        (1e18, MOST_TOKENS_PER_REQUEST),
        (math.inf, MOST_TOKENS_PER_REQUEST),
        (-3.0, 1.0),
        (math.nan, DEFAULT_COMPLETION_TOKENS),
    ],
)
def test_absurd_completion_tokens_are_clamped(given: float, kept: float) -> None:
    assert QueueSimulation().request(completion_tokens=given).completion_tokens == kept


@pytest.mark.parametrize("given", [-1.0, math.nan])
def test_an_invalid_prompt_size_counts_as_zero(given: float) -> None:
    assert QueueSimulation().request(prompt_tokens=given).prompt_tokens == 0.0


def test_an_infinite_prompt_is_clamped() -> None:
    assert (
        QueueSimulation().request(prompt_tokens=math.inf).prompt_tokens == MOST_TOKENS_PER_REQUEST
    )
