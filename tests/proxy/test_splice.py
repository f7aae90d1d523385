"""Where the next node takes over: at a place that reads as it was written."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.splice import (
    OverlapFilter,
    OverlapMismatch,
    find_splice_point,
    step_back_offsets,
    tokenizes_as_sent,
)
from gateway.proxy.transcript import Transcript

WORD = re.compile(r" ?[a-z]+|[^a-z]")


async def words(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer of whole words."""
    assert path == "/tokenize"
    pieces = WORD.findall(body["content"])
    return {"tokens": [{"id": 1, "piece": piece} for piece in pieces]}


def said_in(*texts: str) -> Transcript:
    return Transcript(content_pieces=list(texts), token_count=len(texts))


async def test_a_text_that_reads_as_it_was_written_goes_on_at_its_end() -> None:
    seam = await find_splice_point(words, "tell me", said_in(" of", " the", " sea"), greedy=True)
    assert (seam.prefix, seam.overlap) == (" of the sea", "")
    assert (seam.prompt_tokens, seam.sent_tokens, seam.prefix_tokens) == (2, 3, 3)


async def test_a_word_in_two_tokens_is_stepped_back_over() -> None:
    seam = await find_splice_point(
        words, "tell me", said_in(" of", " the", " se", "a"), greedy=True
    )
    assert (seam.prefix, seam.overlap) == (" of the", " sea")
    assert (seam.sent_tokens, seam.prefix_tokens) == (4, 2)


async def test_a_sampled_text_goes_on_from_exactly_what_was_sent() -> None:
    seam = await find_splice_point(
        words, "tell me", said_in(" of", " the", " se", "a"), greedy=False
    )
    assert (seam.prefix, seam.overlap, seam.prefix_tokens) == (" of the sea", "", 4)


async def test_a_token_of_which_a_part_was_sent_is_stepped_back_over() -> None:
    async def letters(_: str, body: dict[str, Any]) -> dict[str, Any]:
        pieces = re.findall(r" of| the| se|a|.", body["content"])
        return {"tokens": [{"id": 1, "piece": piece} for piece in pieces]}

    # " sea" was one token, and its end could have begun a stop sequence; likewise all of " sky".
    seam = await find_splice_point(letters, "", said_in(" of", " the", " sea"), greedy=True)
    assert (seam.prefix, seam.overlap) == (" of the", " sea")
    for stops, again in ((False, ""), (True, " ")):
        said = said_in(" of", " the", " ")
        seam = await find_splice_point(letters, "", said, greedy=True, has_stop_words=stops)
        assert seam.overlap == again
    said = said_in(" of", " the")
    assert (
        await find_splice_point(letters, "", said, greedy=False, has_stop_words=True)
    ).overlap == ""


async def test_where_no_place_agrees_it_goes_on_at_the_end() -> None:
    seam = await find_splice_point(words, "", said_in(*"abcdefghijklm"), greedy=True)
    assert (seam.prefix + seam.overlap) == "abcdefghijklm"


@given(st.lists(st.text("ab é", min_size=1, max_size=3), max_size=8), st.integers(1, 4))
def test_places_are_ends_of_tokens_on_both_sides(sent: list[str], width: int) -> None:
    text = "".join(sent)
    whole = [text[i : i + width] for i in range(0, len(text), width)]
    places = step_back_offsets(sent, whole)
    ends, size = {0}, 0
    for piece in reversed(sent):
        size += len(piece)
        ends.add(size)
    assert places == sorted(set(places))
    assert set(places) <= ends


def test_pieces_agree_from_their_end_the_oldest_perhaps_several_in_one() -> None:
    assert tokenizes_as_sent([" a", " b", " c"], [" b", " c"])
    assert tokenizes_as_sent([" a", " b", " c"], [" a b", " c"], packed=True)
    assert not tokenizes_as_sent([" a", " b", " c"], [" a b", " c"])
    assert not tokenizes_as_sent([" a", "b", "c"], [" a", "bc"], packed=True)
    assert not tokenizes_as_sent([" a", " bc"], [" b", "c"])
    assert not tokenizes_as_sent([" a", " x"], [" a", " y"])


@given(st.text(max_size=12), st.text(max_size=12), st.lists(st.integers(1, 5), max_size=20))
def test_what_comes_again_is_held_back_and_the_rest_is_not(
    expected: str, rest: str, cuts: list[int]
) -> None:
    again, text, out = OverlapFilter(expected), expected + rest, ""
    for cut in [*cuts, len(text)]:
        out += again.feed(text[:cut])
        text = text[cut:]
    assert out == rest
    assert again.done


def test_another_text_is_a_mismatch() -> None:
    again = OverlapFilter(" sea")
    assert again.feed(" s") == ""
    with pytest.raises(OverlapMismatch):
        again.feed("ky")
