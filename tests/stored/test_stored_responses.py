"""What requests to `/v1/responses` ask of the gateway, and their conversations."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.errors import GatewayError
from gateway.web.background import (
    MOST_ECHOED_BYTES,
    body_to_run,
    conversation_of,
    echoed_fields,
    input_items,
    listed_item,
    read_fields,
    read_options,
)

ANSWER = {"type": "message", "id": "msg_1", "role": "assistant", "content": []}


def fields(**body: Any) -> Any:
    return read_fields(json.dumps({"model": "m", "input": "hello", **body}).encode())


def test_a_conversation_is_put_before_the_input_within_the_limit() -> None:
    first = body_to_run(fields(), [], 1000)
    said = conversation_of(first, {"status": "completed", "output": [ANSWER]})
    body = body_to_run(fields(input="go on"), said, 1000)
    items = json.loads(body)["input"]
    assert [item["role"] for item in items] == ["user", "assistant", "user"]
    assert items[1] == ANSWER
    with pytest.raises(GatewayError) as refused:
        body_to_run(fields(input="go on"), said, 100)
    assert (refused.value.status, refused.value.param) == (413, "previous_response_id")
    listed = [
        listed_item("resp_00ff", number, item)
        for number, item in enumerate(input_items(read_fields(body)))
    ]
    assert [item["id"] for item in listed] == [
        "msg_00ff000000",
        ANSWER.get("id", "msg_00ff000001"),
        "msg_00ff000002",
    ]
    assert [item["content"][0]["text"] for item in (listed[0], listed[2])] == ["hello", "go on"]


@pytest.mark.parametrize("status", ["queued", "in_progress", "failed", "cancelled"])
def test_no_conversation_goes_on_from_what_has_not_ended_well(status: str) -> None:
    with pytest.raises(GatewayError, match="previous response"):
        conversation_of(b'{"input": "x"}', {"status": status, "output": []})


@pytest.mark.parametrize(
    "wrong",
    [
        {"background": "yes"},
        {"store": 1},
        {"previous_response_id": 5},
        {"previous_response_id": "resp_1", "conversation": "conv_1"},
        {"metadata": {str(n): "x" for n in range(17)}},
        {"metadata": {"a": 1}},
        {"background_options": {"completion_window": "1h"}},
    ],
)
def test_fields_of_a_wrong_form_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(GatewayError) as refused:
        read_options(fields(**wrong))
    assert refused.value.status == 400


def test_a_response_repeats_no_more_than_some_bytes_of_its_request() -> None:
    long = "x" * MOST_ECHOED_BYTES
    fields = read_fields(msgspec.json.encode({"tools": [long], "user": "ann", "other": 1}))
    assert echoed_fields(fields, ("tools", "user")) == {"user": "ann"}
