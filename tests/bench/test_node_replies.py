from __future__ import annotations

import json

from tests.bench import node_replies


def test_every_event_of_a_stream_has_the_json_of_llama_cpp() -> None:
    events = node_replies.stream_body(20).decode().removesuffix("\n\n").split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert events[-1] == "data: [DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert text == node_replies.text(20)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 21 + ["stop"]
    assert chunks[-1]["timings"]["predicted_n"] == 200


def test_content_events_are_all_of_one_length_near_two_hundred_bytes() -> None:
    lengths = {len(event) for event in node_replies.TOKENS}
    assert len(lengths) == 1
    assert 190 <= lengths.pop() <= 250


def test_an_embedding_is_json_of_exactly_the_size_of_the_scenario() -> None:
    assert len(node_replies.EMBEDDING) == 400
    assert json.loads(node_replies.EMBEDDING)["data"][0]["object"] == "embedding"


def test_stamps_are_read_back_from_merged_events() -> None:
    events = node_replies.ROLE + node_replies.stamped_token(7) + node_replies.stamped_token(10**12)
    assert node_replies.stamps(events) == [7, 10**12]


def test_a_node_advertises_its_slots() -> None:
    responses = node_replies.info_responses(512)
    props = json.loads(responses[b"/props"].partition(b"\r\n\r\n")[2])
    slots = json.loads(responses[b"/slots"].partition(b"\r\n\r\n")[2])
    assert props["total_slots"] == len(slots) == 512
