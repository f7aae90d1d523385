"""The objects of a stream's events, before an API assembles them."""

from __future__ import annotations

import json

import pytest

from gateway.proxy.api.base import AssemblyError, ResponseAssembler, read_events
from gateway.proxy.api.completions import COMPLETIONS
from gateway.proxy.api.native import NATIVE
from tests.each_case import each_case


def test_objects_come_in_order_without_comments_and_the_end() -> None:
    stream = b':\ndata: {"a":1}\n\nevent: x\ndata: {"b":2}\n\n: ping\n\ndata: [DONE]\n\n'
    found = [{name: bytes(raw) for name, raw in one.items()} for one in read_events(stream)]
    assert found == [{"a": b"1"}, {"b": b"2"}]


@each_case("data", [b"nonsense", b"[1]", b'{"a":', b'"text"'])
def test_data_that_is_no_object_can_not_be_assembled(data: bytes) -> None:
    with pytest.raises(AssemblyError) as caught:
        list(read_events(b"data: " + data + b"\n\n"))
    assert data.decode() not in str(caught.value)


def test_an_error_event_can_not_be_assembled_and_its_text_stays_private() -> None:
    with pytest.raises(AssemblyError) as caught:
        list(read_events(b'data: {"error":{"message":"about secrets"}}\n\n'))
    assert "secrets" not in str(caught.value)


def test_a_response_is_assembled_from_chunks_up_to_its_limit() -> None:
    first, last = b'data: {"content":"a"}\n\n', b'data: {"content":"b","stop":true}\n\n'
    assembler = ResponseAssembler(NATIVE, {}, first, len(first + last))
    assert not assembler.add(last)
    assert assembler.response() == b'{"content":"ab","stop":true,"tokens":[]}'
    assembler = ResponseAssembler(NATIVE, {}, first, len(first + last))
    assert assembler.add(last + b":")
    assert assembler.too_large


@pytest.mark.parametrize("choice", [{"text": {"a": 1}}, {"text": [7]}, {"text": "\ud800"}])
def test_a_text_of_another_type_can_not_be_assembled(choice: dict[str, object]) -> None:
    events = [{"choices": [{"index": 0, **one}]} for one in (choice, {"finish_reason": "stop"})]
    stream = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    with pytest.raises(AssemblyError):
        ResponseAssembler(COMPLETIONS, {}, stream, 1000).response()
