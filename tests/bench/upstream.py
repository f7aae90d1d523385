"""An emulated llama.cpp node that costs next to nothing, so that the proxy is what is measured.

One protocol object a connection, bytes made beforehand, no framework. It never closes a
connection by itself, though llama.cpp does after 100 requests or 5 idle seconds: reconnecting
would be charged to every proxy alike and hide what is asked.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Self, cast

import httptools

from tests.bench import shapes

BACKLOG = 4096


@dataclass(slots=True)
class Script:
    """How the node answers chat requests; changed between scenarios, never while streams run.

    `interval` is the seconds between writes, 0 for no pause; `burst` the tokens of one write.
    A stamped token tells when it was sent; a held stream stops after its first token.
    """

    tokens: int = 200
    interval: float = 0.02
    burst: int = 1
    stamped: bool = False
    held: bool = False


@dataclass(slots=True)
class Counters:
    """What the node has seen, over all its ports."""

    connections: int = 0
    requests: int = 0
    left: int = 0
    """Streams whose client closed before their end."""


@dataclass(slots=True)
class Upstream:
    """Several emulated nodes in this process, one port each: an async context manager."""

    nodes: int
    slots: int
    """Slots that each of them advertises."""
    script: Script = field(default_factory=Script)
    counters: Counters = field(default_factory=Counters)
    ports: tuple[int, ...] = ()
    control: dict[bytes, bytes] = field(default_factory=dict)
    # Streams start at a random phase, as they would in life: in step they would reach the proxy
    # in one batch and look cheaper than they are.
    phases: random.Random = field(default_factory=lambda: random.Random(7))
    connections: set[NodeConnection] = field(default_factory=set, repr=False)
    _servers: list[asyncio.Server] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self.control = shapes.control(self.slots)
        loop = asyncio.get_running_loop()
        for _ in range(self.nodes):
            server = await loop.create_server(
                lambda: NodeConnection(self, loop), "127.0.0.1", 0, backlog=BACKLOG
            )
            self._servers.append(server)
        self.ports = tuple(s.sockets[0].getsockname()[1] for s in self._servers)
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for connection in self.connections:
            connection.transport.abort()
        await asyncio.sleep(0)


class NodeConnection(asyncio.Protocol):
    """One connection to the node."""

    def __init__(self, upstream: Upstream, loop: asyncio.AbstractEventLoop) -> None:
        self.upstream = upstream
        self.loop = loop
        self.parser = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport
        self.path = b""
        self.body = b""
        self.stream: Stream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self.upstream.connections.add(self)
        self.upstream.counters.connections += 1

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def on_url(self, url: bytes) -> None:
        self.path = url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        path, body = self.path, self.body
        self.body = b""
        if path == b"/v1/embeddings":
            self.upstream.counters.requests += 1
            self.transport.write(_EMBEDDING)
        elif path == b"/v1/chat/completions":
            self.upstream.counters.requests += 1
            self._chat(body)
        else:
            path = path.partition(b"?")[0]
            self.transport.write(self.upstream.control.get(path, shapes.NOT_FOUND))

    def _chat(self, body: bytes) -> None:
        script = self.upstream.script
        squeezed = body.replace(b" ", b"")
        if b'"stream":true' in squeezed:
            self.transport.write(shapes.STREAM_HEAD)
            self.stream = Stream(self, script, usage=b'"include_usage":true' in squeezed)
            self.stream.start(self.upstream.phases.random() * script.interval)
        else:
            reply = shapes.answer(shapes.plain_chat(script.tokens))
            self.loop.call_later(script.tokens * script.interval, self.transport.write, reply)

    def pause_writing(self) -> None:
        if self.stream:
            self.stream.pause()

    def resume_writing(self) -> None:
        if self.stream:
            self.stream.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self.upstream.connections.discard(self)
        if self.stream:
            self.stream.stop()
            self.upstream.counters.left += 1


class Stream:
    """One chat stream being written."""

    def __init__(self, connection: NodeConnection, script: Script, *, usage: bool) -> None:
        self.connection = connection
        self.script = script
        self.usage = usage
        self.sent = 0
        self.due = 0.0
        self.timer: asyncio.Handle | None = None
        self.paused = False

    def start(self, delay: float) -> None:
        self.due = self.connection.loop.time() + delay
        self.timer = self.connection.loop.call_at(self.due, self._write)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        if self.timer is None:
            self._next()

    def stop(self) -> None:
        if self.timer:
            self.timer.cancel()

    def _next(self) -> None:
        loop, interval = self.connection.loop, self.script.interval
        if interval:
            self.due += interval
            self.timer = loop.call_at(self.due, self._write)
        else:
            self.timer = loop.call_soon(self._write)

    def _write(self) -> None:
        script = self.script
        self.timer = None
        begin = b"" if self.sent else shapes.ROLE
        if script.stamped:
            data = shapes.framed(begin + shapes.stamped_token(time.monotonic_ns() // 1000))
            count = 1
        else:
            count = min(script.burst, script.tokens - self.sent)
            data = _run(begin, self.sent % len(shapes.TOKENS), count)
        self.sent += count
        if self.sent < script.tokens:
            self.connection.transport.write(data)
            if not self.paused and not script.held:
                self._next()
            return
        end = _USAGE_END if self.usage else _END
        self.connection.stream = None
        self.connection.transport.write(data + end)


_EMBEDDING = shapes.answer(shapes.EMBEDDING)
_FINAL = shapes.framed(shapes.FINAL)
_END = _FINAL + shapes.framed(shapes.DONE) + shapes.END_OF_BODY
_USAGE_END = _FINAL + shapes.framed(shapes.USAGE) + _END.removeprefix(_FINAL)
_RUNS: dict[tuple[bytes, int, int], bytes] = {}


def _run(begin: bytes, first: int, count: int) -> bytes:
    """`count` tokens from `first` on, a chunk each; the real server puts its role delta, `begin`,
    into the chunk of the first token. There are few different runs, so they are kept.
    """
    run = _RUNS.get((begin, first, count))
    if run is None:
        tokens = [shapes.token(first + i) for i in range(count)]
        run = b"".join(map(shapes.framed, (begin + tokens[0], *tokens[1:])))
        _RUNS[begin, first, count] = run
    return run
