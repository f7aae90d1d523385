"""What an edge passes on: the client sees what the brain itself would have said to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from gateway.edges import sockets
from gateway.edges.sockets import (
    Drain,
    End,
    NewClient,
    SocketChannel,
    Taken,
    ToBrain,
    ToEdge,
    channel_pair,
)
from tests.edges.edge_beside import an_edge
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import raw_connection
from tests.gateways import Running, running_gateway, until
from tests.known import known

PIECE = b"x" * 65536


def passed_on(brain: Running) -> list[object]:
    """The connections at the brain on which requests are passed on."""
    connections = known(brain.gateway.public_listener).connections
    # Their sockets have no address.
    return [one for one in connections if not one.transport.get_extra_info("peername")]


@asynccontextmanager
async def edge(folder: Path) -> AsyncIterator[tuple[Running, httpx.AsyncClient]]:
    """A brain, and a client of its edge."""
    async with running_gateway(folder, [EmulatedNode(slots=2)]) as brain:
        async with an_edge(brain) as one:
            yield brain, one.client
        assert not passed_on(brain)


async def test_answers_are_those_of_the_brain(tmp_path: Path) -> None:
    async with edge(tmp_path) as (brain, client):
        headers = {"x-request-id": "mine"}
        for method, path in (
            *(("GET", path) for path in ("/v1/models", "/health", "/v1/no%2Fsuch?a=b%20c")),
            *((method, "/v1/models") for method in ("HEAD", "DELETE", "OPTIONS")),
        ):
            theirs = await brain.client.request(method, path, headers=headers)
            found = await client.request(method, path, headers=headers)
            assert (found.status_code, found.content) == (theirs.status_code, theirs.content)
            assert found.headers == theirs.headers
        # It knows the client's own address: this name of a host may come from a web page.
        foreign = await client.get("/v1/models", headers={"host": "evil.example"})
        assert foreign.status_code == 403
        # A refused upload gets its answer early.
        async with raw_connection(str(client.base_url)) as wire:
            head = b"POST /v1/no-such HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n"
            await wire.send(head + b"x" * 1000)
            assert (await wire.head()).startswith(b"HTTP/1.1 404 ")
        listener = known(brain.gateway.public_listener)
        listener.protocol.connection_made = _abort  # type: ignore[method-assign, assignment]
        answer = await client.get("/v1/models", headers=headers)
        assert (answer.status_code, answer.headers["x-request-id"]) == (503, "mine")


async def test_a_large_file_goes_through_in_pieces_and_comes_back(tmp_path: Path) -> None:
    async with edge(tmp_path) as (_, client):

        async def pieces() -> AsyncIterator[bytes]:
            yield (
                b'--XX\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
                b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            )
            for _ in range(128):
                yield PIECE
            yield b"\r\n--XX--\r\n"

        form = {"content-type": "multipart/form-data; boundary=XX"}
        sent = await client.post("/v1/files", content=pieces(), headers=form)
        assert sent.status_code == 200, sent.text
        assert sent.json()["bytes"] == 128 * len(PIECE)
        got = await client.get(f"/v1/files/{sent.json()['id']}/content")
        assert got.content == 128 * PIECE


async def test_a_client_that_leaves_ends_the_request_at_the_brain(tmp_path: Path) -> None:
    async with edge(tmp_path) as (brain, client):
        async with raw_connection(str(client.base_url)) as wire:
            # A form that never ends.
            await wire.send(
                b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n"
                b"Content-Type: multipart/form-data; boundary=XX\r\n\r\n--XX\r\n"
            )
            await until(lambda: len(passed_on(brain)) == 1)
        await until(lambda: not passed_on(brain))


def _abort(_: object, transport: asyncio.Transport) -> None:
    transport.abort()


# The channel over which it is passed.


class Ends:
    def __init__(self) -> None:
        self.raw, theirs = channel_pair()  # the brain's socket
        self.got: list[tuple[ToEdge, socket.socket | None]] = []
        self.told: list[ToBrain] = []
        self.lost: list[str] = []
        self.brain: SocketChannel[ToBrain] = SocketChannel(
            self.raw,
            ToBrain,
            lambda one, _: self.told.append(one),
            lambda: self.lost.append("brain"),
        )
        self.edge: SocketChannel[ToEdge] = SocketChannel(
            theirs, ToEdge, lambda *both: self.got.append(both), lambda: self.lost.append("edge")
        )


@asynccontextmanager
async def ends() -> AsyncIterator[Ends]:
    both = Ends()
    yield both
    both.brain.close()
    both.edge.close()
    for _, sock in both.got:
        if sock is not None:
            sock.close()


async def test_messages_come_in_order_and_with_their_sockets() -> None:
    async with ends() as both:
        pairs = [socket.socketpair() for _ in range(3)]
        for _, theirs in pairs:
            both.brain.send(NewClient(), theirs, then_close=True)
        both.brain.send(Drain())
        await until(lambda: len(both.got) == 4)
        kinds = [type(message) for message, _ in both.got]
        assert kinds == [NewClient, NewClient, NewClient, Drain]
        for number, (ours, theirs) in enumerate(pairs):
            assert theirs.fileno() == -1
            ours.send(b"%d" % number)
            passed = both.got[number][1]
            assert passed is not None
            assert passed.recv(8) == b"%d" % number
            ours.close()
        both.edge.send(Taken())
        await until(lambda: bool(both.told))
        assert isinstance(both.told[0], Taken)


async def test_what_the_other_side_does_not_read_waits_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "MOST_UNSENT", 8)
    async with ends() as both:
        sent = 0
        while not both.brain.lags:
            both.brain.send(Drain())
            sent += 1
        # The other end reads as soon as the event loop turns; nothing is lost.
        await until(lambda: len(both.got) == sent)
    async with ends() as both:
        while not both.brain.closed:
            both.brain.send(Drain())
        assert both.lost == ["brain"]


@pytest.mark.parametrize("data", [b"nonsense", msgspec.msgpack.encode(["Taken"])])
async def test_what_is_no_message_to_an_edge_ends_the_channel(data: bytes) -> None:
    async with ends() as both:
        both.raw.send(data)
        await until(lambda: both.lost == ["edge", "brain"])
        assert both.got == []


async def test_the_end_of_one_side_is_told_to_the_other_after_all_messages() -> None:
    async with ends() as both:
        both.brain.send(Drain())
        both.brain.send(End())
        both.brain.close()
        await until(lambda: both.lost == ["edge"])
        assert [type(message) for message, _ in both.got] == [Drain, End]
        both.edge.send(Taken())  # to nobody
        await asyncio.sleep(0)
        assert both.lost == ["edge"]
