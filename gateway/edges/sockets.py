"""Open sockets that pass between brain and edge, each with a message.

The brain accepts the clients' connections and hands them to edges. An edge hands the brain the
connections on which it passes on what the brain serves itself. Messages come in order, each once
and whole; a process that ends closes its end.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from gateway.http.exchange import ConnectionOrigin

MOST_MESSAGE_BYTES = 4096
MOST_MESSAGES = 32  # that are received in one turn of the event loop
MOST_UNSENT = 1024  # messages that wait for the other process to read
SINGLE, CLUSTERED = "single", "clustered"  # what an edge is told of its gateway at its start
Received = TypeVar("Received")


class _Message(msgspec.Struct, frozen=True, eq=False, gc=False, array_like=True, tag=True):
    """What is sent beside a link, where a socket goes with it or its place among sockets counts."""


# From the brain to an edge.


class NewClient(_Message, frozen=True):
    """A client's connection, which goes with this; `Taken` answers."""


class Drain(_Message, frozen=True):
    """Let each connection have one more response, and end when all clients have disconnected."""


class Reject(_Message, frozen=True):
    """Refuse new requests: the gateway shuts down."""


class End(_Message, frozen=True):
    """End when the requests that run have their responses."""


class NewLink(_Message, frozen=True):
    """The edge's end of a link, which goes with this; in a cluster, in place of its last one."""

    number: int  # of the links that the edge was given
    # Of the edge's own member; the brain may be on another machine.
    loopback: bool  # whether only this machine can reach the public listener
    edges: int  # how many edges share this machine's connections and memory


# From an edge to the brain.


class Ready(_Message, frozen=True):
    """It can serve clients."""


class Taken(_Message, frozen=True):
    """A client's connection is this edge's from now on; nothing of it has been read."""


class LinkEnded(_Message, frozen=True):
    """In a cluster: the link with this number is lost, and the edge needs another one."""

    number: int


class EdgeLoad(_Message, frozen=True):
    """How busy the edge is; told several times a second while that changes."""

    streams: int  # requests that wait or run
    fresh: int  # connections without a request so far
    connections: int
    cpu_seconds: float  # used since its start
    memory: int  # bytes, the most so far


class PassedOn(_Message, frozen=True):
    """A connection, which goes with this, on which the brain is to serve one request."""

    origin: ConnectionOrigin  # of the request


ToEdge = NewClient | Drain | Reject | End | NewLink
ToBrain = Ready | Taken | EdgeLoad | PassedOn | LinkEnded


class SocketChannel(Generic[Received]):
    """One end of a pair of sockets (SOCK_SEQPACKET) between two processes.

    `receive` gets each message of the other process, and the socket that came with it. `lost` is
    called once, when that process has ended or has sent what is no message.
    """

    def __init__(
        self,
        sock: socket.socket,
        kind: Any,
        receive: Callable[[Received, socket.socket | None], None],
        lost: Callable[[], None],
    ) -> None:
        """`kind`: the type of `Received`, at run time."""
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(kind)
        self._receive = receive
        self._lost = lost
        self._unsent: deque[tuple[bytes, socket.socket | None, bool]] = deque()
        self._loop = asyncio.get_running_loop()
        self.closed = False
        sock.setblocking(False)
        self._loop.add_reader(sock, self._read)

    def send(
        self,
        message: ToEdge | ToBrain,
        passed: socket.socket | None = None,
        *,
        then_close: bool = False,
    ) -> None:
        """Send a message, and with it a socket, of which this process keeps its own descriptor.

        If the other process does not read, both wait. `then_close`: give the descriptor up.
        """
        data = msgspec.msgpack.encode(message)
        if self.closed or len(self._unsent) >= MOST_UNSENT:
            self._end()
            if passed is not None and then_close:
                passed.close()
            return
        self._unsent.append((data, passed, then_close))
        if len(self._unsent) == 1 and not self._send_waiting():
            self._loop.add_writer(self._sock, self._send_rest)

    @property
    def lags(self) -> bool:
        """Whether messages wait for the other process to read."""
        return bool(self._unsent)

    def close(self) -> None:
        """Send and receive no more; `lost` is not called."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            for _, passed, then_close in self._unsent:
                if passed is not None and then_close:
                    passed.close()
            self._unsent.clear()
            self._sock.close()

    def _send_rest(self) -> None:
        if self._send_waiting():
            self._loop.remove_writer(self._sock)

    def _send_waiting(self) -> bool:
        """Send what waits; returns whether nothing is left."""
        while self._unsent:
            data, passed, then_close = self._unsent[0]
            try:
                if passed is None:
                    self._sock.send(data)
                else:
                    socket.send_fds(self._sock, [data], [passed.fileno()])
            except BlockingIOError:
                return False
            except OSError:
                # Not here: whoever sends must not find everything gone when `send` returns.
                self._loop.call_soon(self._end)
            self._unsent.popleft()
            if passed is not None and then_close:
                passed.close()
        return True

    def _read(self) -> None:
        for _ in range(MOST_MESSAGES):
            if self.closed:
                return
            try:
                data, passed = self._receive_one()
                if not data:
                    raise ConnectionResetError
                message = self._decoder.decode(data)
            except BlockingIOError:
                return
            except (OSError, msgspec.MsgspecError):
                self._end()
                return
            self._receive(message, passed)

    def _receive_one(self) -> tuple[bytes, socket.socket | None]:
        data, numbers, _, _ = socket.recv_fds(
            self._sock, MOST_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        # `socket` asks the kernel for the family and the type.
        return data, socket.socket(fileno=numbers[0]) if numbers else None

    def _end(self) -> None:
        if not self.closed:
            self.close()
            self._lost()


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a channel, for this process and for one that it starts."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
