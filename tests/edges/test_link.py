"""A link carries messages in order and each once, in bounded frames, and sees when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import uvloop

from gateway.transport import link as links
from gateway.transport.link import LENGTH, MOST_FRAME_BYTES, NUMBERS, EdgeLink
from tests.gateways import until
from tests.virtual import in_virtual_time, now


class Said(msgspec.Struct, frozen=True, tag=True, array_like=True):
    text: str
    number: int = 0


@dataclass(slots=True)
class Side:
    heard: list[Any] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    ages: list[float] = field(default_factory=list)
    link: EdgeLink = field(init=False)

    def __post_init__(self) -> None:
        self.link = EdgeLink(Said, self.receive, self.lost.append, now)

    def receive(self, message: Said) -> None:
        self.heard.append(message)
        self.ages.append(self.link.age)
        if message.text == "break":
            raise ValueError("broken")
        if message.text == "ask":
            self.link.tell(Said("answer", message.number))


@contextlib.asynccontextmanager
async def both_sides() -> AsyncIterator[tuple[Side, Side]]:
    one, other = Side(), Side()
    ends = socket.socketpair()
    for side, end in zip((one, other), ends, strict=True):
        await EdgeLink.over(end, side.link)
    try:
        yield one, other
    finally:
        for side in (one, other):
            side.link.close()
            await side.link.wait_closed()


def frame(number: int, settled: int, messages: object) -> bytes:
    payload = NUMBERS.pack(number, settled) + msgspec.msgpack.encode(messages)
    return LENGTH.pack(len(payload)) + payload


def one_frame(data: bytes) -> list[Any]:
    (length,) = LENGTH.unpack_from(data)
    assert len(data) == LENGTH.size + length
    messages: list[Any] = msgspec.msgpack.decode(data[LENGTH.size + NUMBERS.size :])
    return messages


@contextlib.asynccontextmanager
async def raw_peer() -> AsyncIterator[tuple[Side, socket.socket]]:
    """A side whose other end is a bare socket."""
    side = Side()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    await EdgeLink.over(ours, side.link)
    try:
        yield side, theirs
    finally:
        theirs.close()
        side.link.close()
        await side.link.wait_closed()


@in_virtual_time
async def test_messages_come_in_order_and_each_once_and_signs_of_life_keep_an_idle_link() -> None:
    async with both_sides() as (one, other):
        said = [Said(f"{number}", number) for number in range(1000)]
        for number, message in enumerate(said):
            one.link.tell(message)
            if number % 70 == 0:
                await asyncio.sleep(0)
        await until(lambda: len(other.heard) == len(said))
        assert (other.heard, one.heard) == (said, [])
        await asyncio.sleep(10 * links.SILENCE_SECONDS)
        one.link.tell(Said("still here"))
        await until(lambda: len(other.heard) == len(said) + 1)
        assert (one.lost, other.lost) == ([], [])


@in_virtual_time
async def test_what_is_told_or_postponed_within_a_turn_goes_out_together() -> None:
    async with raw_peer() as (side, peer):
        await asyncio.sleep(0.01)
        peer.recv(1 << 16)
        side.link.tell(Said("began"))
        side.link.tell(Said("ended"))
        asyncio.get_running_loop().call_soon(side.link.tell, Said("used"))
        side.link.postpone()
        await asyncio.sleep(0.01)
        assert [text for _, text, _ in one_frame(peer.recv(1 << 16))] == ["began", "ended", "used"]


@in_virtual_time
async def test_a_side_that_falls_silent_is_given_up() -> None:
    async with raw_peer() as (side, peer):
        # Its process may still be starting.
        await asyncio.sleep(10 * links.SILENCE_SECONDS)
        peer.send(frame(1, 0, []))
        await asyncio.sleep(links.SILENCE_SECONDS - 1.0)
        assert side.lost == []
        await asyncio.sleep(2.0)
        assert side.lost == ["nothing was heard for 20 s"]
        assert side.link.lost


@in_virtual_time
async def test_the_end_of_one_side_is_told_to_the_other_behind_all_that_was_said() -> None:
    async with both_sides() as (one, other):
        for number in range(500):
            one.link.tell(Said("last words", number))
        one.link.close()
        await until(lambda: other.lost)
        assert [said.number for said in other.heard] == list(range(500))
        assert other.lost == ["it has ended"]
        assert one.lost == [], "it has ended by itself"
        one.link.tell(Said("too late"))
        await asyncio.sleep(1.0)
        assert len(other.heard) == 500


@in_virtual_time
async def test_a_message_that_can_not_be_dealt_with_ends_the_link() -> None:
    async with both_sides() as (one, other):
        one.link.tell(Said("break"))
        one.link.tell(Said("never dealt with"))
        await until(lambda: one.lost and other.lost)
        assert other.lost == ["a message could not be dealt with"]
        assert [said.text for said in other.heard] == ["break"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (LENGTH.pack(MOST_FRAME_BYTES + 1), f"a frame of {MOST_FRAME_BYTES + 1} bytes"),
        (frame(2, 0, []), "frame 2 in place of 1"),
        (LENGTH.pack(3) + b"abc", "what can't be read"),
        (frame(1, 0, [["Other", 1]]), "could not be dealt with"),
        (frame(1, 0, [["Said", 7]]), "could not be dealt with"),
        (frame(1, 1000, []), "could not be dealt with"),
    ],
    ids=["too long", "out of order", "no head", "unknown message", "wrong type", "never sent"],
)
def test_what_breaks_the_rules_ends_the_link(data: bytes, reason: str) -> None:
    @in_virtual_time
    async def run() -> None:
        async with raw_peer() as (side, peer):
            peer.send(data)
            await until(lambda: side.lost)
            assert reason in side.lost[0]
            assert side.heard == []

    run()


@in_virtual_time
async def test_frames_may_come_in_any_pieces() -> None:
    async with raw_peer() as (side, peer):
        data = b"".join(frame(number, 0, [["Said", "a", number]]) for number in range(1, 4))
        for byte in struct.unpack(f"{len(data)}c", data):
            peer.send(byte)
            await asyncio.sleep(0)
        await until(lambda: len(side.heard) == 3)
        assert [said.number for said in side.heard] == [1, 2, 3]


@in_virtual_time
async def test_a_message_larger_than_a_frame_ends_the_link() -> None:
    async with both_sides() as (one, other):
        one.link.tell(Said("small"))
        one.link.tell(Said("x" * MOST_FRAME_BYTES))
        await until(lambda: one.lost)
        assert "a message of" in one.lost[0]
        await until(lambda: other.lost)
        assert [said.text for said in other.heard] == ["small"]


@in_virtual_time
async def test_a_side_that_reads_nothing_is_given_up() -> None:
    async with raw_peer() as (side, _):
        for _ in range(40):
            side.link.tell(Said("x" * (4 << 20)))
            await asyncio.sleep(0)
            if side.lost:
                break
        assert side.lost == ["what was told is not read"]


@in_virtual_time
async def test_an_answer_is_as_old_as_the_question_and_news_no_older_than_a_sign_of_life() -> None:
    async with both_sides() as (one, other):
        await asyncio.sleep(5.0)
        one.link.tell(Said("ask"))
        await until(lambda: one.heard)
        assert one.ages[-1] < 0.1
        await asyncio.sleep(5.0)
        other.link.tell(Said("news"))
        await until(lambda: len(one.heard) == 2)
        assert one.ages[-1] < 2 * links.BEAT_SECONDS
    async with raw_peer() as (side, peer):
        peer.send(frame(1, 1, [["Said", "early"]]))
        await asyncio.sleep(5.0)
        # It has not dealt with anything that was told since its first frame.
        peer.send(frame(2, 1, [["Said", "late"]]))
        await until(lambda: len(side.heard) == 2)
        assert (side.ages[0] < 0.1, side.ages[1] >= 5.0) == (True, True)


async def _cut_while_it_is_made(rng: random.Random) -> list[object]:
    """Make a link and end it, or its other side, at some moment; what may not go away yet."""
    side = Side()
    ours, theirs = socket.socketpair()
    making = asyncio.create_task(EdgeLink.over(ours, side.link))
    for _ in range(rng.randrange(4)):
        await asyncio.sleep(0)
    rng.choice((side.link.close, theirs.close, making.cancel, lambda: side.link.fail("cut")))()
    await asyncio.gather(making, return_exceptions=True)
    if making.cancelled():
        ours.close()
    side.link.close()
    theirs.close()
    return [ours, making, side]


def test_links_that_are_cut_while_they_are_made_close_no_descriptor_of_others() -> None:
    async def run() -> None:
        rng = random.Random(5)
        for _ in range(300):
            held = await _cut_while_it_is_made(rng)
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            # The next files get the descriptors that have just come free.
            others = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
            del held
            await asyncio.sleep(0)
            for one in others:
                os.close(one)
        side = Side()
        ours, theirs = socket.socketpair()
        side.link.close()
        await EdgeLink.over(ours, side.link)
        await until(lambda: ours.fileno() < 0)
        with theirs:
            assert theirs.recv(1) == b""

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the gateway's own
        runner.run(run())
