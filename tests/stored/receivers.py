"""Receivers of webhooks for tests: real servers on this machine, each answering as it is told."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import SecretStr

from gateway.config.stored import WebhookTarget

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
OTHER_SECRET = "whsec_" + base64.b64encode(b"o" * 24).decode()
LIMIT = 30.0
Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]
"""What a receiver sends, or does with the connection."""


@dataclass
class ReceivedRequest:
    """A request as it came."""

    line: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """What came, and what is answered: one answer after the other, the last one again and again."""

    answers: list[Answer]
    port: int = 0
    requests: list[ReceivedRequest] = field(default_factory=list)
    server_names: list[str | None] = field(default_factory=list)
    connections: int = 0
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def came(self, number: int) -> None:
        """Wait until so many requests have come."""
        async with asyncio.timeout(LIMIT):
            while len(self.requests) < number:
                self._came.clear()
                await self._came.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._answer(reader, writer)
        except BaseException:
            writer.transport.abort()
            raise
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *fields = head.split("\r\n")[:-2]
            pairs = (one.partition(": ") for one in fields)
            headers = {name.lower(): value for name, _, value in pairs}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.requests.append(ReceivedRequest(line, headers, body))
            self._came.set()
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)


def status(code: int, *fields: str) -> bytes:
    """An answer without a body."""
    return "\r\n".join([f"HTTP/1.1 {code} X", "content-length: 0", *fields, "", ""]).encode()


async def never(_: asyncio.StreamWriter) -> None:
    """Answer nothing for longer than any test waits."""
    await asyncio.sleep(LIMIT)


@asynccontextmanager
async def receiving(
    *answers: Answer, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Receiver]:
    """Run a receiver; without answers it answers 204."""
    receiver = Receiver(list(answers) or [status(204)])
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await receiver.serve(reader, writer)

    def named(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> None:
        receiver.server_names.append(name)

    if tls is not None:
        tls.sni_callback = named
    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def target(url: str, *secrets: str, **more: Any) -> WebhookTarget:
    """A target of the settings, on this machine unless `allow_private` is given."""
    given = {"allow_private": True, **more}
    return WebhookTarget(
        url=url, secrets=tuple(SecretStr(one) for one in secrets or (SECRET,)), **given
    )
