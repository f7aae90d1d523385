"""A chunked body is decoded as httptools does, however it is split, in a bounded amount of work."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Iterator

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.http.protocol import MOST_CHUNKS_PER_FEED, MOST_EXTENSION_BYTES, ChunkedDecoder

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
MOST = 1000


def read(pieces: Iterable[bytes], most: int = MOST) -> tuple[bytes, bytes] | None:
    """The body and the bytes behind it; None: it is incomplete. Raises: GatewayError."""
    chunks = ChunkedDecoder(most)
    body, waiting = b"", b""
    for piece in pieces:
        waiting += piece
        while waiting and not chunks.done:
            at, part = chunks.feed(waiting)
            assert at
            body, waiting = body + part, waiting[at:]
    return (body, waiting) if chunks.done else None


class Parsed:
    """The same by httptools."""

    def __init__(self, data: bytes) -> None:
        self.parts: list[bytes] = []
        self.on_body = self.parts.append
        self.ended = False
        httptools.HttpRequestParser(self).feed_data(HEAD + data)

    def on_message_complete(self) -> None:
        self.ended = True


FRAMED = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=30), st.sampled_from([b"", b";a", b"; a=b", b";a=b;c"])
    ),
    max_size=6,
)


def framed(chunks: list[tuple[bytes, bytes]], trailers: bytes = b"") -> bytes:
    lines = [b"%x%b\r\n%b\r\n" % (len(part), more, part) for part, more in chunks]
    return b"".join(lines) + b"0\r\n" + trailers + b"\r\n"


@given(
    chunks=FRAMED,
    trailers=st.sampled_from([b"", b"A: b\r\n", b"Content-Length: 3\r\nHost: evil\r\n"]),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    rest=st.binary(max_size=20),
)
def test_a_body_is_decoded_however_it_is_split(
    chunks: list[tuple[bytes, bytes]], trailers: bytes, cuts: list[int], rest: bytes
) -> None:
    data = framed(chunks, trailers)
    places = sorted({min(cut, len(data)) for cut in cuts})
    pieces = [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
    assert read([*pieces, rest]) == (b"".join(part for part, _ in chunks), rest)


@given(
    chunks=FRAMED,
    place=st.integers(0, 200),
    put=st.sampled_from(
        [
            b"\r",
            b"\n",
            b"\r\n",
            b" ",
            b"\t",
            b";",
            b"0",
            b"g",
            b"\0",
            b"-",
            b"+",
            b"_",
            b"\x0b",
            b'"',
        ]
    ),
    instead=st.booleans(),
)
def test_an_accepted_body_means_the_same_to_httptools(
    chunks: list[tuple[bytes, bytes]], place: int, put: bytes, instead: bool
) -> None:
    data = framed(chunks, b"A: b\r\n")
    place = min(place, len(data))
    data = data[:place] + put + data[place + instead :]
    try:
        found = read([data])
    except GatewayError:
        return
    cut = [data[at : at + 1] for at in range(len(data))]
    assert read(cut) == found
    if found is not None:
        body, rest = found
        try:
            parsed = Parsed(data[: len(data) - len(rest)])
        except httptools.HttpParserError:
            return  # httptools parses extensions, and what follows
        assert parsed.ended
        assert b"".join(parsed.parts) == body


@pytest.mark.parametrize(
    "data",
    [
        b"g\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b"1_0\r\n",
        b" 1\r\n",
        b"1 \r\n",
        b"1\n",
        b"1\r\r",
        b"1;a\nb\r\n",
        b"1;a\rb\r\n",
        b"1;\0\r\n",
        b";a\r\n",
        b"\r\n",
        b"1\r\nx0\r\n",
        b"1\r\nx\n0\r\n",
        b"1\r\nxy",
        b"0" * 17,
        b"0\r\n \r\n\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\nA : b\r\n\r\n",
        b"0\r\nA: b\n\r\n\r\n",
        b"0\r\nA: b\r\n c: d\r\n\r\n",
        b"0\r\n: b\r\n\r\n",
        b"1;" + b"a" * (MOST_EXTENSION_BYTES + 1),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_body_that_other_parsers_may_read_differently_is_refused(
    data: bytes, whole: bool
) -> None:
    pieces = [data] if whole else [data[at : at + 1] for at in range(len(data))]
    with pytest.raises(GatewayError) as raised:
        read(pieces)
    assert raised.value.status == 400


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (b"", b"1;aaaaaaaaaaaaaaa\r\nx\r\n"),
        (b"0\r\nA: ", b"x" * 20),
        (b"0\r\n", b"A: b\r\nC: d\r\n"),
    ],
)
def test_extensions_and_trailers_are_limited(first: bytes, more: bytes) -> None:
    endless = [first, *[more] * 1000]
    taken: list[bytes] = []

    def come() -> Iterator[bytes]:
        for part in endless:
            taken.append(part)
            yield part

    with pytest.raises(GatewayError) as raised:
        read(come())
    assert raised.value.status == 431
    assert sum(map(len, taken)) <= 2 * MOST


def test_one_call_does_a_bounded_amount_of_work() -> None:
    data = b"1\r\nx\r\n" * 50_000
    tracemalloc.start()
    try:
        offset, body = ChunkedDecoder(MOST).feed(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(body) <= MOST_CHUNKS_PER_FEED
    assert offset < 7 * MOST_CHUNKS_PER_FEED
    assert peak < len(data) / 4, "the rest of the data was copied"
