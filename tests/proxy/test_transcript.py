"""What went out is kept in few bytes, and told again when the node has failed."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gateway.proxy.api.chat import read_chat
from gateway.proxy.api.completions import read_completion
from gateway.proxy.api.messages import read_message
from gateway.proxy.api.native import read_native
from gateway.proxy.transcript import (
    KEPT_RAW_BYTES,
    MOST_RAW_BYTES,
    MOST_RAW_CHUNKS,
    TranscriptRecorder,
)

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
        value: Any = {"type": "content_block_delta", "index": 0, "delta": delta}
        return b"event: content_block_delta\ndata: " + json.dumps(value).encode() + b"\n\n"
    if path == "/completion":
        value = {"index": 0, "content": text, "tokens": [len(text)], "stop": False}
    elif path == "/v1/completions":
        value = {"choices": [{"text": text, "index": 0, "logprobs": None}], "id": "x"}
    else:
        value = {"choices": [{"index": 0, "delta": {"content": text}}], "id": "x"}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@pytest.mark.parametrize("path", READERS)
@pytest.mark.parametrize(("tokens", "together"), [(1, 1), (50, 7), (2000, 1)])
def test_the_text_is_what_went_out_however_long_it_was(
    path: str, tokens: int, together: int
) -> None:
    rng = random.Random(tokens)
    texts = [rng.choice([" a", '"', "\n\n", "é", " data: x", "\\"]) for _ in range(tokens)]
    so_far = TranscriptRecorder(READERS[path], MIB)
    for start in range(0, tokens, together):
        so_far.add(b"".join(chunk(path, text) for text in texts[start : start + together]))
    said = so_far.transcript()
    assert said.unresumable is None
    assert said.text == "".join(texts)
    assert said.token_count == tokens
    newest = said.content_pieces[-min(20, tokens - 1) :] if tokens > 1 else said.content_pieces
    assert newest == texts[-len(newest) :]
    assert said.token_ids == ([len(text) for text in texts] if path == "/completion" else [])
    # More may go out afterwards, and be asked for again.
    so_far.add(chunk(path, " more"))
    assert so_far.transcript().text == "".join(texts) + " more"


def test_a_long_answer_is_kept_in_little_more_than_half_its_bytes() -> None:
    words = (Path(__file__).parents[2] / "docs/operations.md").read_text().split(" ") * 10
    texts = [f" {word}" for word in words]
    text = "".join(texts)
    so_far = TranscriptRecorder(read_chat, MIB)
    tracemalloc.start()
    for piece in texts:
        so_far.add(chunk("/v1/chat/completions", piece))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(text) > 100_000
    assert kept < 0.65 * len(text) + 2 * KEPT_RAW_BYTES + 20_000
    assert so_far.transcript().text == text
    assert so_far.transcript().text == text


def test_little_is_kept_unread_of_a_stream_that_comes_token_by_token() -> None:
    so_far = TranscriptRecorder(read_chat, MIB)
    event = chunk("/v1/chat/completions", " word")
    for told in range(1, 1000):
        so_far.add(event)
        assert so_far.raw_bytes <= 2 * KEPT_RAW_BYTES + MOST_RAW_CHUNKS * len(event)
        assert so_far.raw_chunk_count <= MOST_RAW_CHUNKS
        assert so_far.raw_bytes >= min(KEPT_RAW_BYTES, told * len(event)) - len(event)


def test_no_more_is_kept_than_is_allowed() -> None:
    so_far = TranscriptRecorder(read_chat, 1000)
    for _ in range(3000):
        so_far.add(chunk("/v1/chat/completions", " word"))
        assert so_far.raw_bytes <= MOST_RAW_BYTES + 200
    said = so_far.transcript()
    assert said.unresumable is not None
    assert len(said.text) < MOST_RAW_BYTES


@pytest.mark.parametrize(
    "event",
    [
        b"data: {oops\n\n",
        b"data: [1]\n\n",
        b'data: {"choices":3}\n\n',
        b'data: {"choices":[{"delta":"text"}]}\n\n',
    ],
)
def test_what_cannot_be_read_is_no_ground_to_go_on_from(event: bytes) -> None:
    so_far = TranscriptRecorder(read_chat, MIB)
    so_far.add(chunk("/v1/chat/completions", "a"))
    so_far.add(event)
    assert so_far.transcript().unresumable == "an event that went out can't be read"


@pytest.mark.parametrize(
    "between", [b":\n", b"event: nothing\n\n", b"data: null\n\n", b"\n\n", b"data: [DONE]\n\n"]
)
def test_what_says_nothing_adds_nothing(between: bytes) -> None:
    so_far = TranscriptRecorder(read_chat, MIB)
    for text in ("a", "b"):
        so_far.add(between)
        so_far.add(chunk("/v1/chat/completions", text))
    assert so_far.transcript().text == "ab"
    assert so_far.transcript().unresumable is None


def test_other_line_ends_are_read_as_well() -> None:
    so_far = TranscriptRecorder(read_chat, MIB)
    so_far.add(chunk("/v1/chat/completions", "a").replace(b"\n", b"\r\n") * 600)
    said = so_far.transcript()
    assert (said.text, said.unresumable) == ("a" * 600, None)


def test_a_tool_call_that_has_begun_is_noticed() -> None:
    so_far = TranscriptRecorder(read_chat, MIB)
    call = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]}
    so_far.add(b"data: " + json.dumps(call).encode() + b"\n\n")
    assert so_far.transcript().unresumable == "a tool call has begun"


def test_which_blocks_are_open_is_known() -> None:
    """llama.cpp ends all of a message's blocks at its end."""

    def told(**value: Any) -> bytes:
        return b"data: " + json.dumps(value).encode() + b"\n\n"

    so_far = TranscriptRecorder(read_message, MIB)
    so_far.add(told(type="content_block_start", index=0, content_block={"type": "thinking"}))
    so_far.add(told(type="content_block_start", index=1, content_block={"type": "text"}))
    assert so_far.transcript().open_blocks == {0: "thinking", 1: "text"}
    signature = {"type": "signature_delta", "signature": ""}
    so_far.add(told(type="content_block_delta", index=0, delta=signature))
    assert so_far.transcript().open_blocks == {0: "signed", 1: "text"}
    so_far.add(told(type="content_block_stop", index=0))
    said = so_far.transcript()
    assert (said.open_blocks, said.block_index, said.block_is_open, said.unresumable) == (
        {1: "text"},
        1,
        True,
        None,
    )
