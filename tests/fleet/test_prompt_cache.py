"""What is believed of the nodes' prompt caches."""

from __future__ import annotations

import math
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.prompt_cache import (
    DEFAULT_HOST_TOKENS,
    LEAST_HOST_TOKENS,
    MOST_HOST_BLOCKS,
    MOST_HOST_PROMPTS,
    FleetPromptCache,
    PromptKey,
)
from tests.calls import count_calls

BLOCK = 100.0
FEW = 4
"""Tokens of a block here."""


def chain(words: str) -> tuple[int, ...]:
    """One block for each letter."""
    last, blocks = 0, []
    for word in words:
        last = hash((last, word))
        blocks.append(last)
    return tuple(blocks)


def a_prompt(words: str) -> PromptKey:
    return PromptKey(chain(words), BLOCK * len(words))


class Told:
    """A memory, told of requests that a server would answer as predicted, unless said."""

    def __init__(self, rows: int = 1, slots: int = 1, host: float | None = None) -> None:
        self.memory = FleetPromptCache()
        for row in range(rows):
            self.memory.resize(row, slots, host)

    def cached(self, words: str, row: int = 0) -> float:
        return self.memory.cached_tokens(a_prompt(words)).get(row, 0.0)

    def ran(
        self, words: str, row: int = 0, *, cached: float | None = None, answer: float = 0
    ) -> None:
        prompt = a_prompt(words)
        if cached is None:
            cached = self.memory.cached_tokens(prompt).get(row, 0.0)
        self.memory.request_placed(row, prompt)
        self.memory.request_finished(row, prompt, prompt.tokens, cached, answer)

    def begun(self, words: str, row: int = 0) -> PromptKey:
        prompt = a_prompt(words)
        self.memory.request_placed(row, prompt)
        return prompt


def test_a_node_remembers_what_it_read() -> None:
    told = Told(rows=2)
    told.ran("sabc", row=1)
    assert told.memory.cached_tokens(a_prompt("sabcd")) == {1: 400}
    assert told.memory.cached_tokens(a_prompt("sabx")) == {1: 300}
    assert told.memory.cached_tokens(a_prompt("xabc")) == {}


def test_the_last_token_of_a_prompt_is_always_read() -> None:
    told = Told()
    told.ran("sabc")
    assert told.cached("sabc") == 399


def test_the_next_turn_finds_the_answer_too() -> None:
    told = Told()
    told.ran("sab", answer=150)
    assert told.cached("sabcd") == 450
    assert told.cached("saxyz") == 200, "another way of going on does not"


def test_what_a_node_told_of_a_prompt_corrects_the_estimate() -> None:
    told = Told()
    prompt = a_prompt("sab")
    told.memory.request_placed(0, prompt)
    told.memory.request_finished(0, prompt, 360, 0, 0)
    recall = told.memory.lookup(a_prompt("sabcd"))
    assert recall.cached == {0: 360}
    assert recall.tokens == 360 + 200


def test_an_answer_that_prompts_do_not_come_back_with_counts_less_and_less() -> None:
    told = Told()
    talk = "s"
    for _ in range(20):
        expected = 100.0 * len(talk)
        told.ran(talk + "ab", cached=expected if len(talk) > 1 else 0, answer=1000)
        talk += "ab"
    assert told.cached(talk + "ab") < 100 * len(talk) + 50


def test_a_running_request_is_no_cache_for_another() -> None:
    told = Told(slots=2)
    told.ran("sab")
    running = told.begun("sabc")
    assert told.cached("sabd") == 0
    told.memory.request_finished(0, running, 400, 300, 0)
    assert told.cached("sabd") == 300


def test_a_request_that_ended_without_figures_leaves_nothing() -> None:
    told = Told()
    told.ran("sab")
    told.memory.request_dropped(0, told.begun("sabc"))
    assert told.cached("sabc") == 0


def test_an_answer_that_was_cut_short_leaves_what_was_read_and_written() -> None:
    told = Told()
    told.memory.request_dropped(0, told.begun("sab"), 40)
    assert told.cached("sabc") == 340


def test_lines_that_a_server_does_not_ignore_lower_what_is_believed_of_such_prompts_alone() -> None:
    told = Told(slots=2)
    told.ran("wxyz")
    for _ in range(8):
        prompt = PromptKey(chain("sabc"), 400, omits_volatile=True)
        told.memory.request_placed(0, prompt)
        told.memory.request_finished(0, prompt, 400, 0, 0)
    assert told.memory.cached_tokens(PromptKey(chain("sabcd"), 500, omits_volatile=True))[0] < 20
    assert told.cached("sabcd") == 400
    assert told.cached("wxyza") == 400


def test_a_hot_beginning_is_known_of_every_node_that_has_it() -> None:
    told = Told(rows=5)
    for row in range(4):
        told.ran(f"sys{row}", row)
    assert told.memory.cached_tokens(a_prompt("sysx")) == dict.fromkeys(range(4), 300)


class TestLikeLlamaCpp:
    def test_an_unlike_prompt_goes_to_host_memory_and_comes_back(self) -> None:
        told = Told(slots=1)
        told.ran("abcd")
        told.ran("wxyz")
        assert told.cached("abcde") == 400
        told.ran("abcde")
        assert told.cached("abcdef") == 500
        assert told.cached("wxyzw") == 400

    def test_an_empty_slot_goes_first(self) -> None:
        told = Told(slots=2, host=0)
        told.ran("abcd")
        told.ran("wxyz")
        assert (told.cached("abcde"), told.cached("wxyza")) == (400, 400)

    def test_without_host_memory_the_slot_used_longest_ago_loses_its_prompt(self) -> None:
        told = Told(slots=2, host=0)
        told.ran("abcd")
        told.ran("wxyz")
        told.ran("abcde")
        told.ran("klmn")
        assert (told.cached("abcdef"), told.cached("wxyza")) == (500, 0)

    def test_a_prompt_that_keeps_half_of_a_slot_overwrites_the_rest(self) -> None:
        told = Told(slots=1)
        told.ran("sysabc")
        told.ran("sysxyz")
        assert told.cached("sysabcd") == 300

    def test_a_slot_alike_hides_what_host_memory_has(self) -> None:
        told = Told(slots=1)
        told.ran("sysabcdefghijklm")
        told.ran("zzzzzzzz")
        told.ran("syst")
        # Three quarters of the slot's prompt would be kept, so nothing is loaded.
        assert told.cached("sysabcdefghijklmn") == 300

    def test_a_prompt_of_which_little_would_be_left_is_not_loaded(self) -> None:
        told = Told(slots=1)
        told.ran("sabcdefghi")
        told.ran("zzzz")
        assert told.cached("sx") == 0

    def test_host_memory_keeps_no_beginning_of_what_it_keeps(self) -> None:
        told = Told(slots=2)
        told.ran("abcd")
        told.ran("wxyz")
        one, other = told.begun("abcde"), told.begun("wxyzw")
        told.memory.request_finished(0, one, 500, 400, 0)
        told.memory.request_finished(0, other, 500, 400, 0)
        for words in ("1111", "2222"):
            told.ran(words)
        # Each grown conversation once, and a copy of the first stranger, which idles.
        assert sum(len(node.kept.host_prompts) for node in told.memory._nodes.values()) == 3

    def test_what_an_idle_slot_holds_is_copied_when_work_begins_in_another(self) -> None:
        told = Told(slots=2)
        told.ran("sysa")
        told.ran("zzzz")
        told.begun("sysb")
        assert told.cached("sysc") == 300

    def test_without_host_memory_nothing_is_copied(self) -> None:
        told = Told(slots=2, host=0)
        told.ran("sysa")
        told.ran("zzzz")
        told.begun("sysb")
        assert told.cached("sysc") == 0

    def test_a_copy_outlives_the_slot_and_the_slot_the_copy(self) -> None:
        told = Told(slots=2)
        told.ran("sysa")
        told.ran("zzzz")
        told.memory.request_dropped(0, told.begun("sysab"))
        assert told.cached("sysabc") == 400
        for number in range(3):
            told.ran(f"zzzz{number}")
        assert told.cached("zzzz2z") == 500


class TestLearning:
    def test_what_is_older_than_a_prompt_that_is_gone_is_gone_too(self) -> None:
        told = Told(slots=1)
        for letter in "abcdefghij":
            told.ran(letter * 60)
        assert told.cached("a" * 61) > 0
        told.ran("d" * 61, cached=0)
        assert told.cached("a" * 61) == 0
        assert told.cached("h" * 61) > 0
        assert told.memory._nodes[0].kept.host_capacity < DEFAULT_HOST_TOKENS

    def test_host_memory_that_keeps_more_is_believed_more(self) -> None:
        told = Told(slots=1)
        for turn in range(12):
            for letter in "abcdefghijklmnop":
                told.ran(letter * 60, cached=5999 if turn else 0)
        assert told.memory._nodes[0].kept.host_capacity > DEFAULT_HOST_TOKENS
        for letter in "abcdefghijklmnop":
            assert told.cached(letter * 61) > 0

    def test_predictions_that_fail_one_after_another_are_a_restart_unseen(self) -> None:
        told = Told(slots=4)
        for words in ("aaaa", "bbbb", "cccc", "dddd"):
            told.ran(words)
        told.ran("aaaaa", cached=0)
        assert told.cached("ccccc") == 400
        told.ran("bbbbb", cached=0)
        assert told.cached("ccccc") == 0
        assert told.cached("bbbbbb") == 500

    def test_the_guess_never_falls_so_low_that_it_can_not_recover(self) -> None:
        told = Told(slots=1)
        for i in range(200):
            told.ran(chr(97 + i % 4) * 10, cached=0)
        assert told.memory._nodes[0].kept.host_capacity >= LEAST_HOST_TOKENS


def test_a_forgotten_row_may_be_used_again() -> None:
    told = Told(rows=2, slots=1)
    told.ran("abcd", row=0)
    told.ran("abcd", row=1)
    running = told.begun("wxyz", row=0)
    told.memory.forget_node(0)
    assert told.memory.cached_tokens(a_prompt("abcde")) == {1: 400}
    told.memory.resize(0, 1)
    told.memory.request_finished(0, running, 400, 0, 0)
    assert told.memory.cached_tokens(a_prompt("wxyza")) == {}, "it ran on the node before"
    told.memory.forget_node(1)
    assert len(told.memory._tree) == 0


def test_a_row_that_was_never_sized_is_left_alone() -> None:
    memory = FleetPromptCache()
    prompt = a_prompt("abcd")
    memory.request_placed(7, prompt)
    memory.request_finished(7, prompt, 400, 0, 0)
    memory.request_dropped(7, prompt)
    memory.forget_node(7)
    assert memory.cached_tokens(prompt) == {}


def test_fewer_slots_send_the_rest_to_host_memory() -> None:
    told = Told(slots=3)
    for words in ("aaaa", "bbbb", "cccc"):
        told.ran(words)
    told.memory.resize(0, 1)
    node = told.memory._nodes[0]
    assert (len(node.kept.slot_prompts), len(node.kept.host_prompts)) == (1, 2)


@pytest.mark.parametrize("lie", [math.nan, -1.0, 0.0, math.inf])
def test_figures_that_can_not_be_are_ignored(lie: float) -> None:
    told = Told(slots=2)
    told.ran("abcd")
    for figures in ((lie, 0, 0), (400, lie, 0), (400, 0, lie), (lie, lie, lie)):
        prompt = told.begun("wxyz")
        told.memory.request_finished(0, prompt, *figures)
    recall = told.memory.lookup(PromptKey(chain("abcde"), lie))
    assert all(0 <= tokens < 1e6 for tokens in recall.cached.values())
    assert told.cached("abcde") == 400


def test_requests_that_never_end_are_let_go_of() -> None:
    told = Told(slots=2)
    for i in range(500):
        told.begun(f"x{i}")
    assert len(told.memory._nodes[0].running) < 50


ROWS, SLOTS = 3, 2
WORDS = st.text("ab", min_size=1, max_size=8)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["place", "finish", "fail", "drop", "forget", "resize"]),
        st.integers(0, ROWS - 1),
        WORDS,
    ),
    max_size=60,
)


@given(STEPS, WORDS)
@settings(max_examples=200)
def test_whatever_happens_the_books_balance(steps: list[tuple[str, int, str]], asked: str) -> None:
    told = Told(rows=ROWS, slots=SLOTS, host=2000)
    memory = told.memory
    running: list[tuple[int, PromptKey]] = []
    for what, row, words in steps:
        if what == "place":
            running.append((row, told.begun(words, row)))
        elif what == "forget":
            memory.forget_node(row)
        elif what == "resize":
            memory.resize(row, 1 + len(words) % 3)
        elif running:
            on, prompt = running.pop(0)
            if what == "drop":
                memory.request_dropped(on, prompt)
            else:
                cached = 0 if what == "fail" else memory.cached_tokens(prompt).get(on, 0.0)
                memory.request_finished(on, prompt, prompt.tokens, cached, len(words))
        for node in memory._nodes.values():
            assert node.kept.host_used == pytest.approx(
                sum(held.tokens for held in node.kept.host_prompts)
            )
            assert node.kept.host_used <= node.kept.host_capacity
            assert len(node.kept.slot_prompts) <= node.slots
    recall = memory.lookup(a_prompt(asked))
    assert all(0 < tokens < max(recall.tokens, 1.1) for tokens in recall.cached.values())
    for row in range(ROWS):
        memory.forget_node(row)
    assert len(memory._tree) == 0


def a_full_fleet(
    rows: int, conversations: int, rng: random.Random
) -> tuple[FleetPromptCache, PromptKey]:
    """Conversations of some turns behind shared system prompts; the prompt of one of them."""
    memory = FleetPromptCache()
    systems = [chain(f"{i} system") for i in range(200)]
    prompt = a_prompt("")
    for row in range(rows):
        memory.resize(row, 2, 1e9)
        for i in range(conversations):
            blocks = list(rng.choice(systems))
            for turn in range(rng.choice((1, 3, 5))):
                for part in range(rng.randrange(2, 6)):
                    blocks.append(hash((blocks[-1], row, i, turn, part)))
                prompt = PromptKey(tuple(blocks), BLOCK * len(blocks))
                cached = memory.cached_tokens(prompt).get(row, 0.0)
                memory.request_placed(row, prompt)
                memory.request_finished(row, prompt, prompt.tokens, cached, 150)
    return memory, prompt


@pytest.mark.slow
def test_a_thousand_full_nodes_fit_200_megabytes() -> None:
    rng = random.Random(1)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    # A few nodes, as full as they get; they share less than a thousand would.
    memory, _ = a_full_fleet(FEW, MOST_HOST_PROMPTS + 30, rng)
    used = (tracemalloc.get_traced_memory()[0] - before) / FEW
    tracemalloc.stop()
    assert (
        sum(len(node.kept.host_prompts) for node in memory._nodes.values())
        > FEW * 0.9 * MOST_HOST_PROMPTS
    )
    # Besides, the blocks of prompts as long as they may be.
    used += 8 * MOST_HOST_BLOCKS
    assert used * 1000 < 200e6, f"{used / 1e3:.0f} MB"


@pytest.mark.slow
def test_asking_a_thousand_nodes_is_quick() -> None:
    memory, prompt = a_full_fleet(1000, 3, random.Random(2))
    longer = PromptKey((*prompt.blocks, *range(12)), prompt.tokens + 12 * BLOCK)
    assert len(memory.cached_tokens(longer)) > 100
    # Some 90: they must grow with the prompt's blocks, and never with the nodes.
    assert count_calls(lambda: memory.lookup(longer)) < 300


def test_what_a_node_reads_now_is_coming_and_not_cached_yet() -> None:
    memory = FleetPromptCache()
    for row in (0, 1):
        memory.resize(row, 2)
    system = PromptKey((1, 2, 3, 4), 400.0)
    memory.request_placed(0, PromptKey((1, 2, 3, 4, 50, 51), 600.0))
    memory.request_placed(1, PromptKey((1, 2, 70), 300.0))
    recall = memory.lookup(system)
    assert recall.cached == {}
    assert recall.pending == {0: 400.0, 1: 200.0}
    assert memory.lookup(PromptKey((9, 10), 200.0)).pending == {}


@pytest.mark.parametrize("how", ["finished", "dropped", "forgotten"])
def test_nothing_is_coming_from_what_has_ended(how: str) -> None:
    memory = FleetPromptCache()
    memory.resize(0, 2)
    running = PromptKey((1, 2), 200.0)
    memory.request_placed(0, running)
    if how == "finished":
        memory.request_finished(0, running, 200.0, 0.0, 10.0)
    elif how == "dropped":
        memory.request_dropped(0, running)
    else:
        memory.forget_node(0)
    recall = memory.lookup(PromptKey((1, 2, 3), 300.0))
    assert recall.pending == {}
    assert bool(recall.cached) == (how == "finished")
