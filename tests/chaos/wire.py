"""A wire in front of a real server: it can be cut, go silent, trickle, or carry rubbish."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Self

RUBBISH = b"\x16\x03\x01\x02\0 no HTTP \xff\xfe\0\r\n\r\n" * 4


class Wire:
    """Listens on a port of its own and carries bytes to `target` and back."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._next: str | None = None
        self.trickling = False
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0, backlog=512)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Faults.

    def reset(self) -> None:
        """RST on every connection there is."""
        for writer in list(self._writers):
            _reset(writer)

    def silence(self) -> None:
        """Nothing passes any more, in either direction; connections stay, new ones are taken."""
        self._open.clear()

    def spoil(self, kind: str) -> None:
        """The next bytes of a reply: `half` of them, then FIN or RST; or `rubbish` instead."""
        self._next = kind

    def heal(self) -> None:
        """As a wire should be; what was held back goes on."""
        self._next, self.trickling = None, False
        self._open.set()

    # Carrying.

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            await self._open.wait()
            back, far = await asyncio.open_connection(*self._target)
            up = asyncio.create_task(self._up(reader, far))
            try:
                await self._down(back, writer)
            finally:
                up.cancel()
                await asyncio.gather(up, return_exceptions=True)
        except OSError:
            _reset(writer)
        finally:
            self._writers.discard(writer)
            for one in (writer, far):
                if one is not None:
                    one.close()
                    with contextlib.suppress(OSError):
                        await one.wait_closed()

    async def _up(self, reader: asyncio.StreamReader, far: asyncio.StreamWriter) -> None:
        """Whoever closes his end is followed at once: so a real server learns of it."""
        try:
            while data := await reader.read(65536):
                await self._open.wait()
                if far.transport.is_closing():
                    return
                far.write(data)
                await far.drain()
        except OSError:
            pass
        await self._open.wait()
        far.close()

    async def _down(self, back: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await back.read(65536):
            await self._open.wait()
            if writer.transport.is_closing():
                return
            spoilt, self._next = self._next, None
            if spoilt == "rubbish":
                writer.write(RUBBISH)
                return
            if spoilt is not None:
                writer.write(data[: len(data) // 2])
                if spoilt == "half, then reset":
                    await writer.drain()
                    _reset(writer)
                return
            if not self.trickling:
                writer.write(data)
                await writer.drain()
                continue
            for at in range(0, len(data), 20):
                if writer.transport.is_closing():
                    return
                writer.write(data[at : at + 20])
                await asyncio.sleep(0.01)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
