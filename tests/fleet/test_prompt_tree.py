"""The tree gives the same result as comparing every prompt with every other."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.prompt_cache import CachedPrompt, PromptTree
from gateway.lease import PromptKey


def chained(*words: int) -> tuple[int, ...]:
    last, blocks = 0, []
    for word in words:
        last = hash((last, word))
        blocks.append(last)
    return tuple(blocks)


def in_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def agreed(tree: PromptTree, blocks: tuple[int, ...], row: int, *, idle: bool) -> int:
    found = tree.match(blocks)
    return max(
        (
            at
            for edge, at in found.items()
            if row in (edge.slot_counts if idle else edge.host_counts)
        ),
        default=0,
    )


# Few words and lengths, so that prompts share prefixes, branch, and are prefixes of others.
PROMPTS = st.lists(st.integers(0, 2), max_size=6).map(lambda words: chained(*words))
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "move", "remove"]), st.integers(0, 2), PROMPTS), max_size=40
)


@given(STEPS, PROMPTS)
@settings(max_examples=300)
def test_the_tree_finds_how_far_each_row_agrees(
    steps: list[tuple[str, int, tuple[int, ...]]], asked: tuple[int, ...]
) -> None:
    tree = PromptTree()
    kept: list[tuple[CachedPrompt, tuple[int, ...]]] = []
    for what, row, blocks in steps:
        if what == "add":
            held = CachedPrompt(row, None, 1.0, 0.0, ends_on_block=True)
            tree.add(held, blocks)
            kept.append((held, blocks))
        elif kept and what == "move":
            held = kept[row % len(kept)][0]
            if held.in_slot:
                tree.move_to_host(held)
        elif kept:
            tree.remove(kept.pop(row % len(kept))[0])
    for row in range(3):
        for idle in (True, False):
            best = max(
                (in_common(b, asked) for h, b in kept if h.row == row and h.in_slot is idle),
                default=0,
            )
            assert agreed(tree, asked, row, idle=idle) == best
    for held, _ in kept:
        tree.remove(held)
    assert len(tree) == 0


def test_a_long_prompt_is_one_edge() -> None:
    tree = PromptTree()
    tree.add(CachedPrompt(0, None, 1.0, 0.0, ends_on_block=True), chained(*range(500)))
    tree.add(CachedPrompt(1, None, 1.0, 0.0, ends_on_block=True), chained(*range(500)))
    assert len(tree) == 1
    tree.add(CachedPrompt(1, None, 1.0, 0.0, ends_on_block=True), chained(*range(300), 7))
    assert len(tree) == 3


def test_a_prompt_without_ends_has_blocks_of_one_size() -> None:
    prompt = PromptKey(chained(1, 2, 3, 4), 100.0)
    assert [prompt.share_of(i) for i in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    assert prompt.ends_on_block


def test_a_prompt_that_goes_on_after_its_last_block_does_not_end_on_a_block() -> None:
    prompt = PromptKey(chained(1, 2), 100.0, (300, 400), 500)
    assert [prompt.share_of(i) for i in range(3)] == [0, 0.6, 0.8]
    assert not prompt.ends_on_block
    assert PromptKey(chained(1, 2), 100.0, (300, 400), 400).ends_on_block
