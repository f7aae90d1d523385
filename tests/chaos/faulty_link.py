"""A TCP proxy in front of a real server; it can reset, go silent, trickle or send garbage."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Self

METHODS = (b"GET ", b"POST ")
GARBAGE = b"\x16\x03\x01\x02\0 no HTTP \xff\xfe\0\r\n\r\n" * 4


class FaultyLink:
    """Listens on a port of its own and passes bytes to `target` and back."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._next_fault: str | None = None
        self.trickling = False
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=512)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Send RST on every open connection."""
        for writer in list(self._writers):
            _reset(writer)

    def silence(self) -> None:
        """Stop passing bytes in both directions; connections stay, new ones are accepted."""
        self._passing.clear()

    def corrupt_next(self, kind: str) -> None:
        """Corrupt the next bytes of a response.

        `half`: half of them, then FIN; `half, then reset`: then RST; `garbage`: garbage instead.
        """
        self._next_fault = kind

    def repair(self) -> None:
        """End all faults, and pass on what was held back."""
        self._next_fault, self.trickling = None, False
        self._passing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        ends = [writer]
        request = bytearray()
        try:
            await self._passing.wait()
            server_reader, server_writer = await asyncio.open_connection(*self._target)
            ends.append(server_writer)
            up = asyncio.create_task(self._client_to_server(reader, server_writer, request))
            try:
                await self._server_to_client(server_reader, writer, request)
            finally:
                up.cancel()
                await asyncio.gather(up, return_exceptions=True)
        except OSError:
            _reset(writer)
        finally:
            self._writers.discard(writer)
            for one in ends:
                one.close()
                with contextlib.suppress(OSError):
                    await one.wait_closed()

    async def _client_to_server(
        self, reader: asyncio.StreamReader, server_writer: asyncio.StreamWriter, request: bytearray
    ) -> None:
        """Pass on what the client sends; close the server's side at once when the client closes.

        `request` gets the beginning of each request.
        """
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._passing.wait()
                if data.startswith(METHODS):
                    request[:] = data[:64]
                if server_writer.transport.is_closing():
                    return
                server_writer.write(data)
                await server_writer.drain()
        await self._passing.wait()
        server_writer.close()

    async def _server_to_client(
        self, server_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: bytearray
    ) -> None:
        while data := await server_reader.read(65536):
            await self._passing.wait()
            fault, self._next_fault = self._next_fault, None
            if fault is not None:
                writer.write(GARBAGE if fault == "garbage" else data[: len(data) // 2])
                if fault == "half, then reset":
                    await writer.drain()
                    _reset(writer)
                return
            step = 20 if self.trickling else len(data)
            for at in range(0, len(data), step):
                if writer.transport.is_closing():
                    return
                writer.write(data[at : at + step])
                await writer.drain()
                await asyncio.sleep(0.01 if self.trickling else 0)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
