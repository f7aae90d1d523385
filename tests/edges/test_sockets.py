from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
from tests.gateways import until


class Ends:
    """Both ends of a channel in one process."""

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
