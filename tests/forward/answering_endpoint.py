"""A gateway over an OpenAI-compatible endpoint that answers with chosen bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.events import RequestRecord
from tests.gateways import Running, running_gateway
from tests.transport.raw import Peer, raw_server

MODELS = b'{"data": [{"id": "demo"}]}'


class Unended(bytes):
    """A response behind which the endpoint says no more, until its client leaves."""


def response(content: bytes, kind: bytes = b"application/json") -> bytes:
    """A whole response with this content."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (kind, len(content)) + content


@asynccontextmanager
async def over_endpoint(
    folder: Path, answer: Callable[[bytes], bytes], **settings: object
) -> AsyncIterator[tuple[Running, list[RequestRecord]]]:
    """The gateway, and the records of its requests.

    `answer` makes a response of a request; the connection ends behind it. The one model is `demo`.
    """

    async def serve(peer: Peer) -> None:
        request = await peer.request()
        said = answer(request) if request.startswith(b"POST") else response(MODELS)
        await peer.say(said)
        if isinstance(said, Unended):
            await peer.reader.read()

    async with raw_server(serve) as server:
        node = {"name": "a", "url": f"http://127.0.0.1:{server.port}", "kind": "openai"}
        async with running_gateway(folder, [node], settings) as running:
            records: list[RequestRecord] = []
            running.gateway.bus.subscribe(RequestRecord, records.append)
            yield running, records
