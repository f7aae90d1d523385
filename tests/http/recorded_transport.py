"""A transport that records what a protocol writes."""

from __future__ import annotations

import asyncio
from typing import Any


class RecordedTransport(asyncio.Transport):
    """A client's transport without a socket."""

    def __init__(self, **extra: object) -> None:
        addresses = {"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 8000)}
        super().__init__({**addresses, **extra})
        self.sent = b""
        self.closed = False
        self.paused = False

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def reads(self) -> bool:
        return not self.paused
