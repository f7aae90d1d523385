from __future__ import annotations

import pytest

from gateway.proxy.api.base import AssemblyError, read_events


def test_the_objects_of_all_events_come_in_order_without_comments_and_the_end() -> None:
    stream = b':\ndata: {"a":1}\n\nevent: x\ndata: {"b":2}\n\n: ping\n\ndata: [DONE]\n\n'
    assert list(read_events(stream)) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("data", [b"nonsense", b"[1]", b'{"a":', b'"text"'])
def test_data_that_is_no_object_makes_no_answer(data: bytes) -> None:
    with pytest.raises(AssemblyError) as told:
        list(read_events(b"data: " + data + b"\n\n"))
    assert data.decode() not in str(told.value)


def test_an_error_event_makes_no_answer_and_its_text_stays_private() -> None:
    with pytest.raises(AssemblyError) as told:
        list(read_events(b'data: {"error":{"message":"about secrets"}}\n\n'))
    assert "secrets" not in str(told.value)
