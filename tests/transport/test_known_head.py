"""A known head matches messages with exactly its bytes, whatever their length."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.transport.connection import KnownHead

HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nAccept: */*\r\n\r\n"


def message(body: bytes, head: bytes = HEAD) -> bytes:
    return head % len(body) + body


def known(data: bytes) -> KnownHead:
    head = KnownHead.from_message(data)
    assert head is not None
    return head


@pytest.mark.parametrize(
    "head",
    [
        HEAD,
        b"HTTP/1.1 200 OK\r\ncontent-length:%d\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: Content-Length: 7\r\nCONTENT-LENGTH: %d\r\n\r\n",
    ],
)
@given(first=st.binary(max_size=120), second=st.binary(max_size=1200))
def test_the_body_of_each_message_with_this_head_is_found(
    head: bytes, first: bytes, second: bytes
) -> None:
    assert known(message(first, head)).match_body(message(second, head)) == second


def test_a_body_as_long_as_the_first_is_another_body() -> None:
    head = known(message(b"first"))
    assert head.match_body(message(b"other")) == b"other"
    assert head.match_body(message(b"other").replace(b": 5", b": 4")) is None


@given(st.data())
def test_another_byte_in_the_head_is_another_head(data: st.DataObject) -> None:
    whole = message(b"x" * 10)
    place = data.draw(st.integers(0, len(whole) - 11))
    byte = data.draw(st.binary(min_size=1, max_size=1).filter(lambda b: b[0] != whole[place]))
    changed = whole[:place] + byte + whole[place + 1 :]
    assert known(whole).match_body(changed) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        message(b"hello")[:-1],
        message(b"hello")[:30],
        message(b"hello") + b"!",
        message(b"hello") + message(b"hello"),
        message(b"hello").replace(b": 5", b":  5"),
        message(b"hello").replace(b": 5", b": +5"),
        message(b"hello").replace(b": 5", b": "),
        message(b"hello").replace(b": 5", b": 0x5"),
        message(b"hello").replace(b": 5", b": 5_"),
        message(b"hello").replace(b": 5", b": 5, 5"),
        message(b"hello").replace(b": 5", b": " + "\u0665".encode()),
        message(b"hello").replace(b": 5", b": 0000000005"),
    ],
)
def test_data_that_is_not_one_whole_message_has_no_known_head(data: bytes) -> None:
    assert known(message(b"12345")).match_body(data) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"POST / HTTP/1.1\r\nhost: a\r\n\r\n",
        message(b"hello") + b"x",
        message(b"hello")[:-1],
        message(b"hello").replace(b"Accept: */*", b"Content-Length: 5"),
        message(b"hello").replace(b"\r\n\r\n", b"\r\n\n"),
        b"POST / HTTP/1.1\r\nContent-Length: 6\n\nab\r\n\r\n",
    ],
)
def test_other_messages_are_not_learnt(data: bytes) -> None:
    assert KnownHead.from_message(data) is None


@given(body=st.binary(max_size=300), digits=st.from_regex(rb"[0-9]{1,12}", fullmatch=True))
def test_a_found_body_is_the_one_that_a_parser_finds(body: bytes, digits: bytes) -> None:
    data = HEAD.replace(b"%d", digits) + body
    found = known(message(b"hello")).match_body(data)
    if found is None:
        return
    parts: list[bytes] = []
    ends: list[bool] = []

    class Reader:
        on_body = staticmethod(parts.append)

        def on_message_complete(self) -> None:
            ends.append(True)

    httptools.HttpRequestParser(Reader()).feed_data(data)
    assert b"".join(parts) == found
    assert ends == [True]
