"""The next node's events become those of the first stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.proxy import sse
from gateway.proxy.api.chat import CHAT, ChatRewriter, NativeToChatRewriter, read_chat
from gateway.proxy.api.completions import (
    COMPLETIONS,
    CompletionsRewriter,
    NativeToCompletionsRewriter,
    read_completion,
)
from gateway.proxy.api.messages import MessagesRewriter, NativeToMessagesRewriter
from gateway.proxy.api.native import NativeRewriter
from gateway.proxy.api.resuming import ReasoningEndMark, StreamRewriter
from gateway.proxy.splice import OverlapMismatch, SplicePoint
from gateway.proxy.transcript import TokenIdExtractor, Transcript, TranscriptRecorder
from gateway.transport.errors import InvalidResponse, NodeReportedError

HEAD = {"id": "first", "created": 1, "model": "m", "object": "chat.completion.chunk"}
SEAM = SplicePoint(" one two", "", prompt_tokens=5, sent_tokens=2, prefix_tokens=2)


def values(events: bytes) -> list[Any]:
    return [json.loads(sse.payload(event)) for event in sse.split(events)]


def choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish}


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def test_a_chat_keeps_its_id_and_has_no_second_role() -> None:
    joiner = ChatRewriter(Transcript(first_event=HEAD), SEAM)
    other = {"id": "second", "created": 2, "model": "x", "object": "chat.completion.chunk"}
    assert (
        joiner.rewrite(other | {"choices": [choice({"role": "assistant", "content": None})]}) == b""
    )
    (value,) = values(joiner.rewrite(other | {"choices": [choice({"content": " three"})]}))
    assert (value["id"], value["created"], value["model"]) == ("first", 1, "m")
    assert value["choices"][0]["delta"] == {"content": " three"}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    (value,) = values(joiner.rewrite(other | {"choices": [], "usage": usage}))
    assert value["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}


def test_what_was_sent_is_not_sent_again() -> None:
    joiner = ChatRewriter(Transcript(first_event=HEAD), SplicePoint(" one", " two", 5, 2, 1))
    assert joiner.rewrite({"choices": [choice({"content": " t"})]}) == b""
    assert not joiner.caught_up
    (value,) = values(joiner.rewrite({"choices": [choice({"content": "wo three"})]}))
    assert value["choices"][0]["delta"]["content"] == " three"
    assert joiner.caught_up


def test_an_answer_that_ends_before_it_has_caught_up_is_another() -> None:
    joiner = ChatRewriter(Transcript(first_event=HEAD), SplicePoint(" one", " two", 5, 2, 1))
    with pytest.raises(OverlapMismatch):
        joiner.rewrite({"choices": [choice({}, "stop")]})
    with pytest.raises(OverlapMismatch):
        CompletionsRewriter(Transcript(), SplicePoint("", "x", 1, 1, 0)).rewrite(
            {"choices": [{"text": "y"}]}
        )


def test_a_native_stream_counts_on() -> None:
    joiner = NativeRewriter(Transcript(), SEAM)
    last = {"content": "", "stop": True, "tokens_predicted": 4, "tokens_evaluated": 9}
    (value,) = values(joiner.rewrite(last | {"prompt": "tell me one two"}))
    assert (value["tokens_predicted"], value["tokens_evaluated"]) == (6, 5)
    assert value["prompt"] == "tell me"


@pytest.mark.parametrize(("opened", "index"), [(True, 0), (False, 1)])
def test_messages_go_on_in_the_open_block_or_in_the_next(opened: bool, index: int) -> None:
    said = Transcript(token_count=2, block_index=0, open_blocks={0: "text"} if opened else {})
    joiner = MessagesRewriter(said, SEAM)
    assert joiner.rewrite({"type": "message_start", "message": {}}) == b""
    started = joiner.rewrite({"type": "content_block_start", "index": 0, "content_block": {}})
    assert (started == b"") is opened
    delta = {"type": "text_delta", "text": " three"}
    out = joiner.rewrite({"type": "content_block_delta", "index": 0, "delta": delta})
    assert sse.event_name(out) == b"content_block_delta"
    assert values(out)[0]["index"] == index
    out = joiner.rewrite({"type": "message_delta", "delta": {}, "usage": {"output_tokens": 3}})
    assert values(out)[0]["usage"]["output_tokens"] == 5


def test_reasoning_goes_on_up_to_its_closing_mark() -> None:
    joiner = NativeToChatRewriter(Transcript(first_event=HEAD), SEAM, ReasoningEndMark("</think>"))
    texts = ["so", " it", " is", "\n</", "thi", "nk>", "\n\n", "Yes", " it <", "is"]
    deltas: list[Any] = []
    for text in texts:
        deltas += [v["choices"][0]["delta"] for v in values(joiner.rewrite({"content": text}))]
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    answer = "".join(delta.get("content", "") for delta in deltas)
    assert (thought, answer) == ("so it is\n", "Yes it <is")
    last = values(joiner.rewrite({"content": "", "stop": True, "stop_type": "eos"}))
    assert last[-1]["choices"][0]["finish_reason"] == "stop"


def test_reasoning_that_never_ends_is_told_to_its_end() -> None:
    joiner = NativeToChatRewriter(Transcript(first_event=HEAD), SEAM, ReasoningEndMark("</think>"))
    out = joiner.rewrite({"content": "so </th"})
    out += joiner.rewrite({"content": "", "stop": True, "stop_type": "limit"})
    deltas = [value["choices"][0] for value in values(out)]
    assert "".join(d["delta"].get("reasoning_content", "") for d in deltas) == "so </th"
    assert deltas[-1]["finish_reason"] == "length"


def test_chunks_made_of_native_events_count_where_the_client_wants_it() -> None:
    said = Transcript(first_event=HEAD | {"object": "text_completion"})
    joiner = NativeToCompletionsRewriter(said, SEAM, usage=True)
    out = joiner.rewrite({"content": " x"})
    out += joiner.rewrite(
        {"content": "", "stop": True, "stop_type": "limit", "tokens_predicted": 3}
    )
    first, end, usage = values(out)
    assert first["choices"][0]["text"] == " x"
    assert (end["choices"][0]["finish_reason"], end["object"]) == ("length", "text_completion")
    assert usage["usage"]["completion_tokens"] == 5
    assert {value["id"] for value in (first, end, usage)} == {"first"}


@pytest.mark.parametrize("behind", ["\n", "\n\n", "\n\n\n", " ", " \n", ""])
def test_only_the_white_space_that_the_template_writes_is_no_part_of_an_answer(behind: str) -> None:
    joiner = NativeToChatRewriter(
        Transcript(first_event=HEAD), SEAM, ReasoningEndMark("</think>", "\n\n")
    )
    out = b"".join(joiner.rewrite({"content": text}) for text in ["so</think>", *behind, "Yes"])
    answer = "".join(v["choices"][0]["delta"].get("content", "") for v in values(out))
    assert answer == (behind.removeprefix("\n\n") if behind != "\n" else "") + "Yes"


def shown(events: bytes) -> list[Any]:
    """Of each of Anthropic's events what tells it from others."""
    found: list[Any] = []
    for value in values(events):
        kind = value["type"].removeprefix("content_block_")
        if kind == "start":
            found.append((kind, value["index"], value["content_block"]["type"]))
        elif kind == "delta":
            found.append((value["index"], *value["delta"].values()))
        elif kind == "stop":
            found.append((kind, value["index"]))
        else:
            found.append(kind)
    return found


def test_a_thought_of_anthropics_goes_on_in_its_block_and_the_answer_in_the_next() -> None:
    said = Transcript(
        reasoning_pieces=["so"], token_count=1, block_index=0, open_blocks={0: "thinking"}
    )
    joiner = NativeToMessagesRewriter(said, SEAM, ReasoningEndMark("</think>"))
    out = b"".join(
        joiner.rewrite({"content": text}) for text in [" it", "</", "think>", "\n", "Yes"]
    )
    out += joiner.rewrite(
        {"content": "", "stop": True, "stop_type": "word", "stopping_word": "x",
         "tokens_predicted": 6}
    )  # fmt: skip
    assert shown(out) == [
        (0, "thinking_delta", " it"),
        ("start", 1, "text"),
        (1, "text_delta", "Yes"),
        (0, "signature_delta", ""),
        ("stop", 0),
        ("stop", 1),
        "message_delta",
        "message_stop",
    ]
    end = values(out)[-2]
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": "x"}
    assert end["usage"] == {"output_tokens": 8}


OPEN_BLOCKS: list[tuple[dict[int, str], int, list[Any]]] = [
    ({}, 0, [("start", 0, "text"), (0, "text_delta", "a"), ("stop", 0)]),
    ({0: "text"}, 1, [(0, "text_delta", "a"), ("stop", 0)]),
    ({0: "signed", 1: "text"}, 2, [(1, "text_delta", "a"), ("stop", 0), ("stop", 1)]),
    ({1: "text"}, 2, [(1, "text_delta", "a"), ("stop", 1)]),
]


@pytest.mark.parametrize(("blocks", "tokens", "expected"), OPEN_BLOCKS)
def test_every_block_is_ended_once(
    blocks: dict[int, str], tokens: int, expected: list[Any]
) -> None:
    said = Transcript(token_count=tokens, block_index=max(blocks, default=0), open_blocks=blocks)
    joiner = NativeToMessagesRewriter(said, SEAM)
    out = joiner.rewrite({"content": "a", "stop": True, "stop_type": "limit"})
    assert shown(out) == [*expected, "message_delta", "message_stop"]
    assert values(out)[-2]["delta"]["stop_reason"] == "max_tokens"
    ended = shown(MessagesRewriter(said, SEAM).final_events("length", usage=False))
    assert ended == [e for e in expected if e[0] == "stop" and e[1] in blocks] + [
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize(
    ("joiner", "said"),
    [
        (ChatRewriter, Transcript(first_event=HEAD)),
        (CompletionsRewriter, Transcript(first_event=HEAD)),
        (NativeRewriter, Transcript()),
        (MessagesRewriter, Transcript(open_blocks={0: "text"}, token_count=2)),
    ],
)
def test_an_answer_that_lacks_nothing_else_is_ended(joiner: Any, said: Transcript) -> None:
    out = joiner(said, SEAM).final_events("length", usage=True)
    text = out.decode()
    assert any(word in text for word in ('"length"', '"limit"', '"max_tokens"'))
    if joiner is MessagesRewriter:
        assert text.rstrip().endswith('{"type":"message_stop"}')
    elif joiner is not NativeRewriter:
        assert values(out)[-1]["usage"]["completion_tokens"] == 2
    said.finish_reason, said.usage_sent, said.open_blocks = "stop", True, {}
    if joiner is not NativeRewriter:
        assert '"usage"' not in joiner(said, SEAM).final_events("stop", usage=True).decode()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"data: {oops\n\n", InvalidResponse),
        (b"data: [1]\n\n", InvalidResponse),
        (b'data: {"choices":[3]}\n\n', InvalidResponse),
        (b'data: {"error":{"message":"no"}}\n\n', NodeReportedError),
        (b'event: error\ndata: {"message":"no"}\n\n', NodeReportedError),
    ],
)
def test_what_cannot_be_read_goes_to_nobody(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        StreamRewriter(ChatRewriter(Transcript(first_event=HEAD), SEAM)).rewrite(data)


# Ids.


def test_probabilities_that_only_we_asked_for_are_taken_out() -> None:
    so_far = TranscriptRecorder(read_chat, 1000)
    strip = TokenIdExtractor(CHAT.take_token_ids, so_far.add_token_ids)
    bare = HEAD | {"choices": [choice({"content": " a"})]}
    told = {"content": [{"id": 7, "token": " a", "bytes": [32, 97], "top_logprobs": [{"id": 7}]}]}
    with_ids = HEAD | {"choices": [choice({"content": " a"}) | {"logprobs": told}]}
    out = strip(event(bare) + event(with_ids) + b"data: [DONE]\n\n")
    assert values(out.removesuffix(b"data: [DONE]\n\n")) == [bare, bare]
    assert so_far.transcript().token_ids == [7]
    with pytest.raises(InvalidResponse):
        strip(b'data: {"choices":[{"logprobs":{"content":[{"token":"a"}]}}]}\n\n')


def test_a_completion_keeps_the_field_empty() -> None:
    so_far = TranscriptRecorder(read_completion, 1000)
    strip = TokenIdExtractor(COMPLETIONS.take_token_ids, so_far.add_token_ids)
    value = {"choices": [{"text": "a", "logprobs": {"content": [{"id": 7}]}}]}
    assert values(strip(event(value))) == [{"choices": [{"text": "a", "logprobs": None}]}]
    assert so_far.transcript().token_ids == [7]
