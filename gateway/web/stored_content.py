"""Responses with the bytes of a stored file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol
from urllib.parse import quote

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class OpenContent(Protocol):
    """Something open that is read to its end, and closed."""

    def pieces(self) -> AsyncIterator[bytes]:
        """Its bytes."""
        ...

    async def close(self) -> None:
        """Close it; called again, nothing."""
        ...


class ContentResponse(StreamingResponse):
    """The bytes of `content`, which is closed whatever happens."""

    def __init__(self, content: OpenContent, headers: dict[str, str]) -> None:
        super().__init__(content.pieces(), headers=headers)
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._content.close()


def content_headers(
    name: str, size: int | None, media_type: str = "application/octet-stream"
) -> dict[str, str]:
    """The headers of a file of this name; `size` is None where it is not known yet."""
    length = {} if size is None else {"content-length": str(size)}
    return {
        "content-type": media_type,
        **length,
        # No browser shows it as a page of this host.
        "content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "x-content-type-options": "nosniff",
    }
