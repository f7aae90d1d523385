"""An emulated llama.cpp node that needs next to no CPU, so that the proxy is measured.

It has one protocol object for each connection, responses encoded in advance, and no framework. It
never closes a connection, though llama.cpp does after 100 requests or 5 idle seconds: the cost of
reconnecting would count for every proxy alike and hide the differences.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from dataclasses import dataclass, field
from typing import Self, cast

import httptools

from tests.bench import node_replies

BACKLOG = 4096


@dataclass(slots=True)
class Script:
    """How the node answers chat requests; changed between scenarios, never while streams run.

    `interval`: seconds between writes, 0 for no pause. `burst`: tokens in one write. `stamped`:
    each token contains the time of sending. `held`: a stream stops after each write, until it is
    resumed.
    """

    tokens: int = 200
    interval: float = 0.02
    burst: int = 1
    stamped: bool = False
    held: bool = False


@dataclass(slots=True)
class Upstream:
    """Several emulated nodes in this process, one port each: an async context manager."""

    nodes: int
    slots: int  # slots that each node reports
    script: Script = field(default_factory=Script)
    opened: int = 0  # connections
    ports: tuple[int, ...] = ()
    info_responses: dict[bytes, bytes] = field(default_factory=dict)
    # Streams start at random phases, as in production: in step they would reach the proxy in one
    # batch and look cheaper than they are.
    phases: random.Random = field(default_factory=lambda: random.Random(7))
    connections: set[NodeConnection] = field(default_factory=set, repr=False)
    _servers: list[asyncio.Server] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self.info_responses = node_replies.info_responses(self.slots)
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
        self.upstream.opened += 1

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
            self.transport.write(_EMBEDDING)
        elif path == b"/v1/chat/completions":
            self._chat(body)
        else:
            path = path.partition(b"?")[0]
            self.transport.write(self.upstream.info_responses.get(path, node_replies.NOT_FOUND))

    def _chat(self, body: bytes) -> None:
        script = self.upstream.script
        squeezed = body.replace(b" ", b"")
        if b'"stream":true' in squeezed:
            if script.burst < script.tokens:
                self.transport.write(node_replies.STREAM_HEAD)
            self.stream = Stream(self, script, usage=b'"include_usage":true' in squeezed)
            self.stream.start(self.upstream.phases.random() * script.interval)
        else:
            reply = node_replies.plain_response(node_replies.plain_chat(script.tokens))
            self.loop.call_later(script.tokens * script.interval, self.transport.write, reply)

    def pause_writing(self) -> None:
        if self.stream:
            self.stream.paused = True

    def resume_writing(self) -> None:
        if self.stream:
            self.stream.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self.upstream.connections.discard(self)
        if self.stream and self.stream.timer:
            self.stream.timer.cancel()


class Stream:
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

    def resume(self) -> None:
        self.paused = False
        if self.timer is None:
            self._next()

    def _next(self) -> None:
        loop, interval = self.connection.loop, self.script.interval
        self.due += interval
        self.timer = (
            loop.call_at(self.due, self._write) if interval else loop.call_soon(self._write)
        )

    def _write(self) -> None:
        script = self.script
        self.timer = None
        begin = b"" if self.sent else node_replies.ROLE
        # What comes at once comes in one read, however busy the machine is.
        head = node_replies.STREAM_HEAD if script.burst >= script.tokens else b""
        if script.stamped:
            stamped = node_replies.stamped_token(time.monotonic_ns() // 1000)
            data, count = node_replies.http_chunk(begin + stamped), 1
        else:
            count = min(script.burst, script.tokens - self.sent)
            data = _run(begin, self.sent % len(node_replies.TOKENS), count)
        self.sent += count
        if self.sent < script.tokens:
            self.connection.transport.write(data)
            if not self.paused and not script.held:
                self._next()
            return
        end = _USAGE_END if self.usage else _END
        self.connection.stream = None
        self.connection.transport.write(head + data + end)


_EMBEDDING = node_replies.plain_response(node_replies.EMBEDDING)
_FINAL = node_replies.http_chunk(node_replies.FINAL)
_END = _FINAL + node_replies.http_chunk(node_replies.DONE) + node_replies.END_OF_BODY
_USAGE_END = _FINAL + node_replies.http_chunk(node_replies.USAGE) + _END.removeprefix(_FINAL)


@functools.cache
def _run(begin: bytes, first: int, count: int) -> bytes:
    """`count` tokens from `first` on, a chunk each; the real server puts its role delta, `begin`,
    into the chunk of the first token. There are few different runs, so they are kept.
    """
    tokens = [node_replies.token(first + i) for i in range(count)]
    return b"".join(map(node_replies.http_chunk, (begin + tokens[0], *tokens[1:])))
