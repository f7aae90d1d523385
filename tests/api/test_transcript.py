"""The transcript of a stream is kept in few bytes and parsed when the node has failed."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.chat import read_chat
from gateway.api.completions import read_completion
from gateway.api.messages import read_message
from gateway.api.native import read_native
from gateway.api.transcript import (
    MOST_RAW_BYTES,
    OverlapFilter,
    Transcript,
    TranscriptRecorder,
    find_splice_point,
)
from tests.api.events import chat_choice, event
from tests.each_case import each_case

MIB = 1 << 20
READERS = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/v1/messages": read_message,
    "/completion": read_native,
}


def chunk(path: str, text: str) -> bytes:
    """One event with a token's text, as llama.cpp writes it on this path."""
    if path == "/v1/messages":
        delta = {"type": "text_delta", "text": text}
        value = {"type": "content_block_delta", "index": 0, "delta": delta}
        return event(value, "content_block_delta")
    if path == "/completion":
        return event({"index": 0, "content": text, "tokens": [len(text)], "stop": False})
    if path == "/v1/completions":
        return event({"choices": [{"text": text, "index": 0, "logprobs": None}], "id": "x"})
    return chat_chunk({"content": text})


def chat_chunk(delta: dict[str, Any], **more: Any) -> bytes:
    return event({"choices": [chat_choice(delta)], "id": "x", **more})


@pytest.mark.parametrize("path", READERS)
@pytest.mark.parametrize(("tokens", "together"), [(1, 1), (50, 7), (2000, 1)])
def test_the_transcript_holds_the_text_that_was_sent(path: str, tokens: int, together: int) -> None:
    rng = random.Random(tokens)
    texts = [rng.choice([" a", '"', "\n\n", "é", " data: x", "\\"]) for _ in range(tokens)]
    recorder = TranscriptRecorder(READERS[path], MIB)
    for start in range(0, tokens, together):
        recorder.add(b"".join(chunk(path, text) for text in texts[start : start + together]))
    transcript = recorder.transcript()
    assert transcript.unresumable is None
    assert transcript.text == "".join(texts)
    assert transcript.token_count == tokens
    newest = transcript.content_pieces[-max(1, min(20, tokens - 1)) :]
    assert newest == texts[-len(newest) :]
    assert transcript.token_ids == ([len(text) for text in texts] if path == "/completion" else [])
    # More may be sent afterwards.
    recorder.add(chunk(path, " more"))
    assert recorder.transcript().text == "".join(texts) + " more"


def test_a_response_longer_than_the_limit_can_not_be_resumed() -> None:
    recorder = TranscriptRecorder(read_chat, 1000)
    for _ in range(3000):
        recorder.add(chunk("/v1/chat/completions", " word"))
        assert recorder.raw_bytes <= MOST_RAW_BYTES + 200
    transcript = recorder.transcript()
    assert transcript.unresumable is not None
    assert len(transcript.text) < MOST_RAW_BYTES


@each_case(
    "event", [b"data: {oops\n\n", b"data: [1]\n\n", b'data: {"choices":[{"delta":"text"}]}\n\n']
)
def test_an_unreadable_event_makes_a_stream_unresumable(event: bytes) -> None:
    recorder = TranscriptRecorder(read_chat, MIB)
    recorder.add(chunk("/v1/chat/completions", "a"))
    recorder.add(event)
    assert recorder.transcript().unresumable == "an event that was sent can't be read"


def test_open_content_blocks_are_known() -> None:
    """llama.cpp ends all of a message's blocks at its end."""
    recorder = TranscriptRecorder(read_message, MIB)

    def opened_after(kind: str, index: int, **more: Any) -> dict[int, str]:
        value = {"type": f"content_block_{kind}", "index": index, **more}
        recorder.add(event(value))
        return recorder.transcript().open_blocks

    assert opened_after("start", 0, content_block={"type": "thinking"}) == {0: "thinking"}
    opened = opened_after("start", 1, content_block={"type": "text"})
    assert opened == {0: "thinking", 1: "text"}
    signature = {"type": "signature_delta", "signature": ""}
    assert opened_after("delta", 0, delta=signature) == {0: "signed", 1: "text"}
    assert opened_after("stop", 0) == {1: "text"}
    transcript = recorder.transcript()
    assert (transcript.block_index, transcript.block_is_open) == (1, True)
    assert transcript.unresumable is None


@each_case(
    "between",
    [
        b"",
        b":\n",
        b"data: null\n\n",
        chat_chunk({}, usage={"completion_tokens": 3}),
        chat_chunk({}),
    ],
)
def test_text_is_read_wherever_events_of_another_form_stand(between: bytes) -> None:
    recorder = TranscriptRecorder(read_chat, MIB)
    events = [chat_chunk({"role": "assistant", "content": None})]
    thoughts = [f' th"{i}' for i in range(700)]
    texts = [f" wörd\\{i}" for i in range(700)]
    events += [chat_chunk({"reasoning_content": thought}) for thought in thoughts]
    events += [chat_chunk({"content": text}) for text in texts]
    for number, one in enumerate(events):
        recorder.add(one + between if number % 251 == 250 else one)
    transcript = recorder.transcript()
    assert transcript.unresumable is None
    assert transcript.reasoning_text == "".join(thoughts)
    assert transcript.text == "".join(texts)
    assert transcript.token_count == 1400
    assert transcript.usage_sent is (b"usage" in between)
    assert transcript.first_event["choices"][0]["delta"] == {"role": "assistant", "content": None}


def test_an_event_of_very_many_objects_is_not_read() -> None:
    recorder = TranscriptRecorder(read_chat, MIB)
    recorder.add(chat_chunk({"content": "a"}))
    recorder.add(chat_chunk({"content": "b"}, x=[[]] * 30_000))
    assert recorder.transcript().unresumable == "an event that was sent is too large to be read"


# Splice points: where the text tokenizes as it was written.


def transcript_of(*texts: str) -> Transcript:
    return Transcript(content_pieces=list(texts), token_count=len(texts))


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


@given(st.text(max_size=12), st.text(max_size=12), st.lists(st.integers(1, 5), max_size=20))
def test_the_overlap_alone_is_dropped(expected: str, rest: str, cuts: list[int]) -> None:
    overlap, text, out = OverlapFilter(expected), expected + rest, ""
    for cut in [*cuts, len(text)]:
        out += overlap.feed(text[:cut])
        text = text[cut:]
    assert out == rest
    assert overlap.done
