"""Splice points: where the text tokenizes as it was written."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.transcript import (
    OverlapFilter,
    OverlapMismatch,
    Transcript,
    find_splice_point,
    step_back_offsets,
    tokenizes_as_sent,
)

WORD = re.compile(r" ?[a-z]+|[^a-z]")


async def words(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer of whole words."""
    assert path == "/tokenize"
    pieces = WORD.findall(body["content"])
    return {"tokens": [{"id": 1, "piece": piece} for piece in pieces]}


def transcript_of(*texts: str) -> Transcript:
    return Transcript(content_pieces=list(texts), token_count=len(texts))


async def test_a_text_that_tokenizes_as_written_continues_at_its_end() -> None:
    splice = await find_splice_point(
        words, "tell me", transcript_of(" of", " the", " sea"), greedy=True
    )
    assert (splice.prefix, splice.overlap) == (" of the sea", "")
    assert (splice.prompt_tokens, splice.sent_tokens, splice.prefix_tokens) == (2, 3, 3)


async def test_a_word_in_two_tokens_is_stepped_back_over() -> None:
    splice = await find_splice_point(
        words, "tell me", transcript_of(" of", " the", " se", "a"), greedy=True
    )
    assert (splice.prefix, splice.overlap) == (" of the", " sea")
    assert (splice.sent_tokens, splice.prefix_tokens) == (4, 2)


async def test_a_sampled_text_continues_exactly_where_it_was_cut() -> None:
    splice = await find_splice_point(
        words, "tell me", transcript_of(" of", " the", " se", "a"), greedy=False
    )
    assert (splice.prefix, splice.overlap, splice.prefix_tokens) == (" of the sea", "", 4)


async def test_a_token_that_was_sent_in_part_is_stepped_back_over() -> None:
    async def letters(_: str, body: dict[str, Any]) -> dict[str, Any]:
        pieces = re.findall(r" of| the| se|a|.", body["content"])
        return {"tokens": [{"id": 1, "piece": piece} for piece in pieces]}

    # " sea" was one token, and its end could have begun a stop sequence; likewise all of " sky".
    splice = await find_splice_point(letters, "", transcript_of(" of", " the", " sea"), greedy=True)
    assert (splice.prefix, splice.overlap) == (" of the", " sea")
    for stops, repeated in ((False, ""), (True, " ")):
        transcript = transcript_of(" of", " the", " ")
        splice = await find_splice_point(letters, "", transcript, greedy=True, has_stop_words=stops)
        assert splice.overlap == repeated
    transcript = transcript_of(" of", " the")
    assert (
        await find_splice_point(letters, "", transcript, greedy=False, has_stop_words=True)
    ).overlap == ""


async def test_without_an_agreeing_offset_the_splice_point_is_the_end() -> None:
    splice = await find_splice_point(words, "", transcript_of(*"abcdefghijklm"), greedy=True)
    assert (splice.prefix + splice.overlap) == "abcdefghijklm"


@given(st.lists(st.text("ab é", min_size=1, max_size=3), max_size=8), st.integers(1, 4))
def test_offsets_are_ends_of_tokens_on_both_sides(sent: list[str], width: int) -> None:
    text = "".join(sent)
    whole = [text[i : i + width] for i in range(0, len(text), width)]
    offsets = step_back_offsets(sent, whole)
    ends, size = {0}, 0
    for piece in reversed(sent):
        size += len(piece)
        ends.add(size)
    assert offsets == sorted(set(offsets))
    assert set(offsets) <= ends


def test_pieces_agree_from_their_end_and_the_oldest_may_join_several() -> None:
    assert tokenizes_as_sent([" a", " b", " c"], [" b", " c"])
    assert tokenizes_as_sent([" a", " b", " c"], [" a b", " c"], packed=True)
    assert not tokenizes_as_sent([" a", " b", " c"], [" a b", " c"])
    assert not tokenizes_as_sent([" a", "b", "c"], [" a", "bc"], packed=True)
    assert not tokenizes_as_sent([" a", " bc"], [" b", "c"])
    assert not tokenizes_as_sent([" a", " x"], [" a", " y"])


@given(st.text(max_size=12), st.text(max_size=12), st.lists(st.integers(1, 5), max_size=20))
def test_the_overlap_is_dropped_and_the_rest_is_not(
    expected: str, rest: str, cuts: list[int]
) -> None:
    overlap, text, out = OverlapFilter(expected), expected + rest, ""
    for cut in [*cuts, len(text)]:
        out += overlap.feed(text[:cut])
        text = text[cut:]
    assert out == rest
    assert overlap.done


def test_another_text_is_a_mismatch() -> None:
    overlap = OverlapFilter(" sea")
    assert overlap.feed(" s") == ""
    with pytest.raises(OverlapMismatch):
        overlap.feed("ky")
