"""The load: keep-alive clients that send requests and check every answer.

A load is bounded by its number of requests and by a time limit. An answer with another status,
length or content, one that breaks off and one that never comes are errors; one error makes the
whole sample invalid.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self, cast
from zlib import crc32

import httptools

from tests.bench import node_replies

Address = tuple[str, int]
CONNECTING_AT_ONCE = 64


@dataclass(slots=True)
class Outcome:
    completed: int = 0
    errors: int = 0
    first_error: str = ""
    took: list[float] = field(default_factory=list)  # seconds of each correctly answered request

    def fail(self, problem: str) -> None:
        self.errors += 1
        self.first_error = self.first_error or problem


class LoadConnection(asyncio.Protocol):
    """One keep-alive connection; answers must match a length and a checksum."""

    def __init__(
        self, finished: Callable[[LoadConnection, str], None], length: int, crc: int
    ) -> None:
        self.finished = finished
        self.expected = (200, length, crc)
        self.parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport
        self.length = 0
        self.crc = 0
        self.busy = False
        self.closed = False
        self.sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def send(self, request: bytes) -> None:
        self.length = self.crc = 0
        self.busy = True
        self.sent_at = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort()
            self._end(f"not HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        self.length += len(body)
        self.crc = crc32(body, self.crc)

    def on_message_complete(self) -> None:
        # Only here: afterwards the parser has forgotten this answer's headers.
        if not self.parser.should_keep_alive():
            self.closed = True
            self.transport.close()
        if self.busy:
            self._end(self.problem())

    def problem(self) -> str:
        """The error in the answer that just ended; empty for a correct answer."""
        seen = (self.parser.get_status_code(), self.length, self.crc)
        return "" if seen == self.expected else f"status, length, checksum {seen}"

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._end(f"connection lost after {self.length} bytes: {exc}")

    def abort(self) -> None:
        self.closed = True
        self.transport.abort()

    def _end(self, problem: str) -> None:
        if self.busy:
            self.busy = False
            self.finished(self, problem)


class ChatConnection(LoadConnection):
    """Answers must be plain chat completions with the right text, in any layout of the JSON."""

    tokens = 0
    body = b""

    def on_body(self, body: bytes) -> None:
        self.body += body

    def problem(self) -> str:
        body, self.body = self.body, b""
        try:
            choice = json.loads(body)["choices"][0]
            content = (choice["message"]["content"], choice["finish_reason"])
        except (ValueError, LookupError, TypeError):
            return f"status {self.parser.get_status_code()}, no chat completion: {body[:100]!r}"
        good = content == (node_replies.text(self.tokens), "stop")
        return "" if good else "another text or finish reason"


class StampedConnection(LoadConnection):
    """Answers are streams of stamped events; records the age of each event on arrival."""

    def __init__(
        self, finished: Callable[[LoadConnection, str], None], length: int, crc: int
    ) -> None:
        super().__init__(finished, length, crc)
        self.partial = b""
        self.ages: list[tuple[int, int]] = []
        """Time of arrival (monotonic) and age of each event, in microseconds."""

    def on_body(self, body: bytes) -> None:
        now = time.monotonic_ns() // 1000
        self.length += len(body)
        whole, ended, self.partial = (self.partial + body).rpartition(b"\n\n")
        if ended:
            self.ages.extend((now, now - sent) for sent in node_replies.stamps(whole))
            self.crc = whole.endswith(node_replies.DONE.rstrip())

    def problem(self) -> str:
        seen = (self.parser.get_status_code(), self.length, self.crc)
        return "" if seen == self.expected else f"status, length, ended with [DONE] {seen}"


@dataclass(slots=True)
class Load:
    """Connections to one address that repeat one request.

    Every answer's body must have the length `length` and the checksum `crc`.
    """

    address: Address
    request: bytes
    length: int = 0
    crc: int = 0
    connection: type[LoadConnection] = LoadConnection
    connections: list[LoadConnection] = field(default_factory=list, repr=False)
    outcome: Outcome = field(default_factory=Outcome)
    _unsent: int = 0
    _open: int = 0
    _done: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: list[LoadConnection] = field(default_factory=list, repr=False)
    _repairs: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def connected(self, count: int) -> AsyncIterator[Self]:
        """Open `count` connections, not all at the same instant; they are aborted at the end."""
        try:
            while len(self.connections) < count:
                batch = min(CONNECTING_AT_ONCE, count - len(self.connections))
                self.connections += await asyncio.gather(*(self._connect() for _ in range(batch)))
            yield self
        finally:
            self._unsent = 0
            for connection in self.connections:
                connection.busy = False
                connection.abort()
            for task in list(self._repairs):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await task
            await asyncio.sleep(0)

    async def run(self, total: int, limit: float, spread: float = 0.0) -> Outcome:
        """Send `total` requests; each connection sends its next one after the answer.

        The connections start evenly over `spread` seconds. Requests without an answer after
        `limit` seconds are errors.
        """
        self._begin(total)
        self._unsent = total
        loop = asyncio.get_running_loop()
        pause = spread / len(self.connections)
        starts = [
            loop.call_later(i * pause, self._next, connection)
            for i, connection in enumerate(self.connections[:total])
        ]
        await self._answered(total, limit)
        for start in starts:
            start.cancel()
        return self.outcome

    async def steady(self, rate: float, seconds: float, limit: float) -> Outcome:
        """Send `rate` requests a second, whether or not answers come.

        Connections are reused last in, first out, and opened when none is free. Requests without
        an answer `limit` seconds after the last one are errors.
        """
        total = int(rate * seconds)
        self._begin(total)
        self._idle, begin = list(self.connections), time.perf_counter()
        for i in range(total):
            await asyncio.sleep(begin + i / rate - time.perf_counter())
            while self._idle and self._idle[-1].closed:
                self._idle.pop()
            if not self._idle:
                self.connections.append(await self._connect())
                self._idle.append(self.connections[-1])
            self._idle.pop().send(self.request)
        await self._answered(total, limit)
        return self.outcome

    def _begin(self, total: int) -> None:
        self.outcome = Outcome()
        self._open = total
        self._done.clear()

    async def _answered(self, total: int, limit: float) -> None:
        try:
            async with asyncio.timeout(limit):
                await self._done.wait()
        except TimeoutError:
            self._unsent = 0
            self.outcome.fail(f"{self._open} of {total} answers missing after {limit:g} s")

    async def _connect(self) -> LoadConnection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(
            lambda: self.connection(self._finished, self.length, self.crc), *self.address
        )
        return made

    def _next(self, connection: LoadConnection) -> None:
        if not self._unsent:
            return
        self._unsent -= 1
        if connection.closed:
            task = asyncio.get_running_loop().create_task(self._replace(connection))
            self._repairs.add(task)
            task.add_done_callback(self._repairs.discard)
        else:
            connection.send(self.request)

    async def _replace(self, connection: LoadConnection) -> None:
        try:
            fresh = await self._connect()
        except OSError as error:
            self._finished(connection, f"cannot connect: {error}")
            return
        self.connections[self.connections.index(connection)] = fresh
        fresh.send(self.request)

    def _finished(self, connection: LoadConnection, problem: str) -> None:
        if problem:
            self.outcome.fail(problem)
        else:
            self.outcome.completed += 1
            self.outcome.took.append(time.perf_counter() - connection.sent_at)
        self._open -= 1
        if self._unsent:
            self._next(connection)
            return
        self._idle.append(connection)
        if not self._open:
            self._done.set()
