"""A large body, read in parts that go to the disk as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request

from gateway import errors
from gateway.config.listeners import LimitSettings
from gateway.errors import GatewayError

PART_BYTES = 256 << 10
"""Bytes of a body that are parsed and written at a time."""

_PLAIN_ENCODINGS = frozenset({b"", b"identity"})


async def body_parts(
    request: Request,
    limits: LimitSettings,
    most_bytes: int,
    too_large: Callable[[], GatewayError],
) -> AsyncIterator[bytes]:
    """The body in parts of some size. It may take as long as `limits` allow for its bytes.

    Only the time that the client takes counts, not that of the disk. Raises: GatewayError 408, 413
    (`too_large`); ClientDisconnect.
    """
    clock = asyncio.get_running_loop().time
    source = request.stream()
    waited, size, part = 0.0, 0, bytearray()
    while True:
        began = clock()
        left = limits.body_timeout + size / limits.body_rate - waited
        try:
            async with asyncio.timeout(left):
                piece = await anext(source, None)
        except TimeoutError:
            raise errors.request_timeout("The body took too long to arrive.") from None
        waited += clock() - began
        if piece is None:
            break
        size += len(piece)
        if size > most_bytes:
            raise too_large()
        part += piece
        if len(part) >= PART_BYTES:
            yield bytes(part)
            part.clear()
    if part:
        yield bytes(part)


def check_plain(request: Request) -> None:
    """Refuse a compressed body. Raises: GatewayError 415."""
    headers = request.scope["headers"]
    if any(n == b"content-encoding" and v.lower() not in _PLAIN_ENCODINGS for n, v in headers):
        raise errors.compressed_body()


def content_length(request: Request) -> int | None:
    """The length of the body, as its head says; None: it says nothing."""
    # The protocol has checked that it is a number.
    value = request.headers.get("content-length")
    return None if value is None else int(value)
