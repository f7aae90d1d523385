"""Large bodies in parts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError, body_too_large
from gateway.http.body import PART_BYTES, body_parts, check_plain, content_length

LIMITS = LimitSettings(body_timeout=5.0, body_rate=1000)


def request(pieces: list[bytes], *headers: tuple[bytes, bytes], stalls: bool = False) -> Request:
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        if not left and stalls:
            await asyncio.Event().wait()
        if not left:
            return {"type": "http.disconnect"}
        body = left.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(left) or stalls}

    return Request({"type": "http", "method": "POST", "headers": list(headers)}, receive)


async def read(asked: Request, most: int = 1 << 30, limits: LimitSettings = LIMITS) -> list[bytes]:
    return [one async for one in body_parts(asked, limits, most, lambda: body_too_large(most))]


async def test_small_pieces_come_in_parts_of_some_size() -> None:
    pieces = [bytes([number % 256]) * 1000 for number in range(600)]
    parts = await read(request(pieces))
    assert b"".join(parts) == b"".join(pieces)
    assert [len(part) >= PART_BYTES for part in parts] == [True, True, False]
    assert await read(request([b""])) == []


async def test_a_body_that_is_too_large_ends_where_it_exceeds_the_limit() -> None:
    assert await read(request([b"x" * 10]), most=10) == [b"x" * 10]
    with pytest.raises(GatewayError) as refused:
        await read(request([b"x" * 11]), most=10)
    assert refused.value.status == 413


async def test_a_body_that_stalls_is_refused_and_one_that_is_left_ends() -> None:
    limits = LimitSettings(body_timeout=0.05, body_rate=1 << 20)
    with pytest.raises(GatewayError) as refused:
        await read(request([b"x"], stalls=True), limits=limits)
    assert refused.value.status == 408
    with pytest.raises(ClientDisconnect):
        await read(request([]))


def test_the_head_tells_length_and_encoding() -> None:
    assert content_length(request([])) is None
    assert content_length(request([], (b"content-length", b"12"))) == 12
    check_plain(request([], (b"content-encoding", b"identity")))
    with pytest.raises(GatewayError) as refused:
        check_plain(request([], (b"content-encoding", b"gzip")))
    assert refused.value.status == 415
