"""What an edge passes on: the client sees what the brain itself would have said to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gateway.edges.passing import Passing, over_channel
from gateway.edges.sockets import PassedOn, SocketChannel, ToBrain, ToEdge, channel_pair
from gateway.http.listener import Acceptor, ClientServer, bind_socket
from gateway.http.protocol import protocol_class
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import raw_connection
from tests.gateways import Running, running_gateway, until
from tests.known import known

PIECE = b"x" * 65536


@dataclass(slots=True)
class Edge:
    """An edge without routes in front of a gateway, both in this process."""

    brain: Running
    server: ClientServer
    client: httpx.AsyncClient
    url: str


def passed_on(brain: Running) -> list[object]:
    """The connections at the brain on which requests are passed on."""
    connections = known(brain.gateway.public_listener).connections
    # Their sockets have no address.
    return [one for one in connections if not one.transport.get_extra_info("peername")]


@asynccontextmanager
async def edge(folder: Path, **settings: Any) -> AsyncIterator[Edge]:
    ours, its_end = channel_pair()
    async with running_gateway(folder, [EmulatedNode(slots=2)], settings) as brain:
        listener = known(brain.gateway.public_listener)

        def adopt(message: ToBrain, sock: socket.socket | None) -> None:
            assert isinstance(message, PassedOn)
            known(sock).setblocking(False)
            listener.adopt(known(sock), message.origin)

        of_brain: SocketChannel[ToBrain] = SocketChannel(ours, ToBrain, adopt, lambda: None)
        of_edge: SocketChannel[ToEdge] = SocketChannel(
            its_end, ToEdge, lambda *_: None, lambda: None
        )
        server = ClientServer(
            Passing(over_channel(of_edge)),
            protocol=protocol_class(brain.gateway.settings.limits),
            keep_alive=60.0,
        )
        server.open()
        sock = bind_socket("127.0.0.1", 0)
        sock.listen()
        acceptor = Acceptor(sock, server.adopt)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as client:
                yield Edge(brain, server, client, url)
            await asyncio.wait_for(server.close(), 30.0)
            assert not passed_on(brain)
        finally:
            for one in (acceptor, of_edge, of_brain):
                one.close()


async def test_answers_are_those_of_the_brain(tmp_path: Path) -> None:
    async with edge(tmp_path) as site:
        headers = {"x-request-id": "mine"}
        for method, path in (
            *(("GET", path) for path in ("/v1/models", "/health", "/v1/no%2Fsuch?a=b%20c")),
            *((method, "/v1/models") for method in ("HEAD", "DELETE", "OPTIONS")),
        ):
            theirs = await site.brain.client.request(method, path, headers=headers)
            found = await site.client.request(method, path, headers=headers)
            assert (found.status_code, found.content) == (theirs.status_code, theirs.content)
            assert found.headers == theirs.headers
        # It knows the client's own address: this name of a host may come from a web page.
        foreign = await site.client.get("/v1/models", headers={"host": "evil.example"})
        assert foreign.status_code == 403
        # A refused upload gets its answer early.
        async with raw_connection(site.url) as wire:
            head = b"POST /v1/no-such HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n"
            await wire.send(head + b"x" * 1000)
            assert (await wire.head()).startswith(b"HTTP/1.1 404 ")
        listener = known(site.brain.gateway.public_listener)
        listener.protocol.connection_made = _abort  # type: ignore[method-assign, assignment]
        answer = await site.client.get("/v1/models", headers=headers)
        assert (answer.status_code, answer.headers["x-request-id"]) == (503, "mine")


async def test_a_large_file_goes_through_in_pieces_and_comes_back(tmp_path: Path) -> None:
    async with edge(tmp_path) as site:

        async def pieces() -> AsyncIterator[bytes]:
            yield (
                b'--XX\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
                b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            )
            for _ in range(128):
                yield PIECE
            yield b"\r\n--XX--\r\n"

        form = {"content-type": "multipart/form-data; boundary=XX"}
        sent = await site.client.post("/v1/files", content=pieces(), headers=form)
        assert sent.status_code == 200, sent.text
        assert sent.json()["bytes"] == 128 * len(PIECE)
        got = await site.client.get(f"/v1/files/{sent.json()['id']}/content")
        assert got.content == 128 * PIECE


async def test_a_client_that_leaves_ends_the_request_at_the_brain(tmp_path: Path) -> None:
    async with edge(tmp_path) as site:
        async with raw_connection(site.url) as wire:
            # A form that never ends.
            await wire.send(
                b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n"
                b"Content-Type: multipart/form-data; boundary=XX\r\n\r\n--XX\r\n"
            )
            await until(lambda: len(passed_on(site.brain)) == 1)
        await until(lambda: not passed_on(site.brain))


def _abort(_: object, transport: asyncio.Transport) -> None:
    transport.abort()
