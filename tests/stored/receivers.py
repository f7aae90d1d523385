"""Receivers of webhooks for tests: real servers on this machine, each answering as it is told."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import SecretStr

from gateway.config.stored import WebhookTarget
from tests.gateways import until
from tests.transport.raw import Peer, RawServer, raw_server

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
    requests: list[ReceivedRequest] = field(default_factory=list)
    server_names: list[str | None] = field(default_factory=list)
    raw: RawServer = field(default_factory=lambda: RawServer(0))

    @property
    def port(self) -> int:
        return self.raw.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        return self.raw.opened

    async def came(self, number: int) -> None:
        """Wait until so many requests have come."""
        await until(lambda: len(self.requests) >= number, LIMIT)

    async def serve(self, peer: Peer) -> None:
        head, _, body = (await peer.request()).partition(b"\r\n\r\n")
        line, *fields = head.decode("latin-1").split("\r\n")
        pairs = (one.partition(": ") for one in fields)
        headers = {name.lower(): value for name, _, value in pairs}
        self.requests.append(ReceivedRequest(line, headers, body))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await (peer.say(answer) if isinstance(answer, bytes) else answer(peer.writer))


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

    def named(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> None:
        receiver.server_names.append(name)

    if tls is not None:
        tls.sni_callback = named
    async with raw_server(receiver.serve, tls, host) as receiver.raw:
        yield receiver


def target(url: str, *secrets: str, **more: Any) -> WebhookTarget:
    """A target of the settings, on this machine unless `allow_private` is given."""
    given = {"allow_private": True, **more}
    return WebhookTarget(
        url=url, secrets=tuple(SecretStr(one) for one in secrets or (SECRET,)), **given
    )
