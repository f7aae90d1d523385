from __future__ import annotations

from gateway.tools.simulate.server import SimulatedPromptCache
from gateway.tools.simulate.trace import TracePrompt, common_tokens


def serve(
    cache: SimulatedPromptCache, prompt: TracePrompt, now: float, slots: int = 2
) -> tuple[int, int]:
    """Send a single request: its slot, and the tokens that the slot had cached."""
    slot, cached = cache.choose_slot(prompt, list(range(slots)))
    cache.save_idle([number == slot for number in range(slots)])
    cache.store(slot, prompt, now)
    return slot, cached


def test_prompts_of_one_stream_have_the_shorter_in_common() -> None:
    assert common_tokens(TracePrompt(1, 300), TracePrompt(1, 200)) == 200
    assert common_tokens(TracePrompt(1, 300), TracePrompt(2, 300)) == 0


def test_prompts_with_one_prefix_have_that_in_common() -> None:
    assert common_tokens(TracePrompt(1, 300, 7, 100), TracePrompt(2, 200, 7, 100)) == 100
    assert common_tokens(TracePrompt(1, 300, 7, 100), TracePrompt(2, 200, 8, 100)) == 0
    assert common_tokens(TracePrompt(1, 300, 0, 0), TracePrompt(2, 200, 0, 0)) == 0


def test_one_token_is_always_read() -> None:
    cache = SimulatedPromptCache(1, 0)
    serve(cache, TracePrompt(1, 100), 0.0, 1)
    assert serve(cache, TracePrompt(1, 100), 1.0, 1) == (0, 99)


def test_the_slot_with_most_of_the_prompt_takes_it() -> None:
    cache = SimulatedPromptCache(2, 0)
    serve(cache, TracePrompt(1, 100), 0.0)
    other, _ = serve(cache, TracePrompt(2, 100), 1.0)
    assert serve(cache, TracePrompt(2, 200), 2.0) == (other, 100)
    assert serve(cache, TracePrompt(1, 200), 3.0) == (1 - other, 100)


def test_with_a_tenth_in_common_the_slot_idle_longest_takes_the_prompt() -> None:
    cache = SimulatedPromptCache(2, 0)
    first, _ = serve(cache, TracePrompt(1, 500, 7, 50), 0.0)
    serve(cache, TracePrompt(2, 500), 1.0)
    assert serve(cache, TracePrompt(3, 500, 7, 50), 2.0) == (first, 50)
    assert serve(cache, TracePrompt(4, 501, 7, 50), 3.0)[1] == 0


def test_a_prompt_that_lost_its_slot_comes_back_from_host_memory() -> None:
    cache = SimulatedPromptCache(1, 10_000)
    serve(cache, TracePrompt(1, 1000), 0.0, 1)
    serve(cache, TracePrompt(2, 1000), 1.0, 1)
    assert cache.host_prompts == [TracePrompt(1, 1000)]
    assert serve(cache, TracePrompt(1, 1200), 2.0, 1) == (0, 1000)
    assert TracePrompt(1, 1000) not in cache.host_prompts


def test_without_host_memory_an_evicted_prompt_is_lost() -> None:
    cache = SimulatedPromptCache(1, 0)
    serve(cache, TracePrompt(1, 1000), 0.0, 1)
    serve(cache, TracePrompt(2, 1000), 1.0, 1)
    assert serve(cache, TracePrompt(1, 1200), 2.0, 1) == (0, 0)


def test_host_memory_drops_the_oldest_and_takes_no_prompt_that_is_too_large() -> None:
    cache = SimulatedPromptCache(1, 2000)
    for stream, tokens in enumerate((900, 900, 900, 2500, 10), start=1):
        serve(cache, TracePrompt(stream, tokens), float(stream), 1)
    assert cache.host_prompts == [TracePrompt(2, 900), TracePrompt(3, 900)]


def test_a_longer_prompt_replaces_its_own_beginning() -> None:
    cache = SimulatedPromptCache(2, 10_000)
    serve(cache, TracePrompt(1, 500), 0.0)
    serve(cache, TracePrompt(2, 500), 1.0)
    serve(cache, TracePrompt(1, 800), 2.0)
    serve(cache, TracePrompt(2, 600), 3.0)
    assert cache.host_prompts == [TracePrompt(2, 500), TracePrompt(1, 800)]


def test_a_large_prompt_is_not_loaded_for_a_small_part() -> None:
    cache = SimulatedPromptCache(1, 10_000)
    serve(cache, TracePrompt(1, 1000, 7, 200), 0.0, 1)
    serve(cache, TracePrompt(2, 1000), 1.0, 1)
    assert serve(cache, TracePrompt(3, 1000, 7, 200), 2.0, 1) == (0, 0)
    assert serve(SimulatedPromptCache(1, 0), TracePrompt(1, 10), 0.0, 1) == (0, 0)
