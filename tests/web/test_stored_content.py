"""Responses with stored bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest

from gateway.web.files import ContentResponse, content_headers


class Opened:
    """Content in two pieces, which may fail in between."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.closed = 0

    async def pieces(self) -> AsyncIterator[bytes]:
        yield b"one"
        if self.fails:
            raise LookupError("the disk is gone")
        yield b"two"

    async def close(self) -> None:
        self.closed += 1


async def answer(opened: Opened) -> bytes:
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    response = ContentResponse(opened, content_headers("ä.jsonl", 6))
    scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "method": "GET", "headers": []}
    await response(scope, receive, send)
    return b"".join(message.get("body", b"") for message in sent)


async def test_all_bytes_are_sent_and_the_content_is_closed() -> None:
    opened = Opened()
    assert await answer(opened) == b"onetwo"
    assert opened.closed == 1


async def test_the_content_is_closed_if_reading_fails() -> None:
    opened = Opened(fails=True)
    with pytest.raises(LookupError, match="gone"):
        await answer(opened)
    assert opened.closed == 1


def test_the_headers_name_the_file_and_its_length_if_known() -> None:
    headers = content_headers("a b/ä.jsonl", 5)
    assert headers["content-disposition"] == "attachment; filename*=UTF-8''a%20b%2F%C3%A4.jsonl"
    assert (headers["content-length"], headers["x-content-type-options"]) == ("5", "nosniff")
    assert "content-length" not in content_headers("a", None)
