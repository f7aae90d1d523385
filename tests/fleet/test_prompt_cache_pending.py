from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.prompt_cache import MOST_COMPARED_PROMPTS, PendingPrefixes, common_blocks
from gateway.lease import PromptKey


@given(st.integers(0, 40), st.integers(0, 20), st.integers(0, 20))
def test_the_common_blocks_of_two_prompts_are_counted(same: int, one: int, two: int) -> None:
    shared = list(range(same))
    first = [*shared, *range(100, 100 + one)]
    second = [*shared, *range(200, 200 + two)]
    assert common_blocks(first, second) == same


def test_of_several_running_prompts_on_a_node_the_longest_match_counts() -> None:
    running = PendingPrefixes()
    running.add(0, PromptKey((1, 2, 70), 300.0))
    running.add(0, PromptKey((1, 2, 3, 60), 400.0))
    assert running.pending_tokens(PromptKey((1, 2, 3, 4), 400.0), 400.0) == {0: 300.0}


def test_a_prompt_with_another_first_block_is_not_compared() -> None:
    running = PendingPrefixes()
    running.add(0, PromptKey((1, 2), 200.0))
    assert running.pending_tokens(PromptKey((7, 2), 200.0), 200.0) == {}
    assert running.pending_tokens(PromptKey((), 10.0), 10.0) == {}


def test_a_prompt_that_thousands_share_is_compared_with_a_few() -> None:
    running = PendingPrefixes()
    prompts = [PromptKey((1, 2), 200.0) for _ in range(2000)]
    for row, prompt in enumerate(prompts):
        running.add(row, prompt)
    assert len(running.pending_tokens(PromptKey((1, 2), 200.0), 200.0)) == MOST_COMPARED_PROMPTS
    for row, prompt in enumerate(prompts):
        running.remove(row, prompt)
    assert running.pending_tokens(PromptKey((1, 2), 200.0), 200.0) == {}
