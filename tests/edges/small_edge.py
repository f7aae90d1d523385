"""An edge's process without the rest: it takes connections, and says who has taken each.

`python -m tests.edges.small_edge SOCKETS [HOW]`; HOW: `dies` after its first client came and
before it has taken it; `passes`: it passes on a request; `links`: it is ready with its first link,
and says over each the number of that and its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys

from gateway.edges.sockets import (
    Drain,
    EdgeLoad,
    End,
    LinkEnded,
    NewClient,
    NewLink,
    PassedOn,
    Ready,
    SocketChannel,
    Taken,
    ToEdge,
)
from gateway.http.exchange import ConnectionOrigin


async def main(how: str, ours: socket.socket) -> None:
    over = asyncio.Event()
    clients: set[socket.socket] = set()

    def receive(message: ToEdge, sock: socket.socket | None) -> None:
        match message:
            case NewClient():
                assert sock is not None
                if how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                channel.send(Taken())
                clients.add(sock)
                channel.send(EdgeLoad(len(clients), 0, len(clients), 0.0, 0))
                sock.send(f"{os.getpid()}\n".encode())
            case Drain():
                asyncio.get_running_loop().call_later(0.05, over.set)
            case End():
                over.set()
            case NewLink():
                assert sock is not None
                if how != "links":
                    clients.add(sock)
                    return
                if links:
                    links[-1].cancel()
                links.append(asyncio.create_task(keep(message.number, sock)))

    async def keep(number: int, sock: socket.socket) -> None:
        """Use a link until it is lost, or another one takes its place."""
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        try:
            writer.write(f"{number} {os.getpid()}\n".encode())
            if number == 1:
                channel.send(Ready())
            with contextlib.suppress(OSError):
                await reader.read()
        finally:
            writer.close()
        channel.send(LinkEnded(number))

    links: list[asyncio.Task[None]] = []
    channel: SocketChannel[ToEdge] = SocketChannel(ours, ToEdge, receive, over.set)
    if how != "links":
        channel.send(Ready())
    if how == "passes":
        one, other = socket.socketpair()
        origin = ConnectionOrigin(("192.0.2.7", 4711), None, tls=True)
        channel.send(PassedOn(origin), other, then_close=True)
        one.send(b"a request")
        clients.add(one)
    await over.wait()


if __name__ == "__main__":
    asyncio.run(main((sys.argv[2:] or [""])[0], socket.socket(fileno=int(sys.argv[1]))))
