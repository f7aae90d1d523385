"""Clients that send half of what they announce, or a byte at a time, in virtual time."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import pytest

from tests.emulator.raw_connection import RawConnection, raw_connection
from tests.virtual import in_virtual_time
from tests.web.raw_client import CHAT, HELLO, Answer, answer, public, request

IMPATIENT = {"limits": {"header_timeout": 0.3, "body_timeout": 0.3}}


def outcome_of(found: Answer) -> tuple[int, str | None]:
    return found.status, found.code


@pytest.mark.parametrize("start", [b"P", b"POST /v1/chat", request()[:60], b"\r\n\r\n"])
@in_virtual_time
async def test_half_a_head_and_then_silence_is_408(tmp_path: Path, start: bytes) -> None:
    async with public(tmp_path, IMPATIENT) as gate, raw_connection(gate.url) as wire:
        await wire.send(start)
        found = await answer(wire)
        assert outcome_of(found) == (408, "request_timeout")
        assert await wire.rest() == b""


@in_virtual_time
async def test_a_silent_connection_is_closed(tmp_path: Path) -> None:
    async with public(tmp_path, IMPATIENT) as gate, raw_connection(gate.url) as wire:
        assert await wire.rest() == b""


@in_virtual_time
async def test_a_head_a_byte_at_a_time_is_408(tmp_path: Path) -> None:
    async with public(tmp_path, IMPATIENT) as gate, raw_connection(gate.url) as wire:
        trickling = asyncio.create_task(_trickle(wire, request() * 100))
        assert outcome_of(await answer(wire)) == (408, "request_timeout")
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)


@in_virtual_time
async def test_half_a_head_on_a_used_connection_is_408(tmp_path: Path) -> None:
    async with public(tmp_path, IMPATIENT) as gate, raw_connection(gate.url) as wire:
        await wire.send(request({**HELLO, "max_tokens": 1}))
        assert (await answer(wire)).status == 200
        await wire.send(b"POST /v1")
        assert outcome_of(await answer(wire)) == (408, "request_timeout")


@in_virtual_time
async def test_line_ends_between_requests_do_not_keep_a_connection(tmp_path: Path) -> None:
    async with public(tmp_path, IMPATIENT) as gate, raw_connection(gate.url) as wire:
        await wire.send(request({**HELLO, "max_tokens": 1}))
        assert (await answer(wire)).status == 200
        await wire.send(b"\r\n")
        assert outcome_of(await answer(wire)) == (408, "request_timeout")


@in_virtual_time
async def test_half_a_body_and_then_silence_is_408(tmp_path: Path) -> None:
    async with public(tmp_path, IMPATIENT) as gate:
        async with raw_connection(gate.url) as wire:
            await wire.send(request(b'{"messages": ', length=5000))
            assert outcome_of(await answer(wire)) == (408, "request_timeout")
        assert (await gate.last()).status == 408


@pytest.mark.parametrize("part", ["", "2", "2;a=", "2\r\n{", "2\r\n{}", "2\r\n{}\r\n0\r\nX: y"])
@in_virtual_time
async def test_half_a_chunked_body_and_then_silence_is_408(tmp_path: Path, part: str) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with public(tmp_path, IMPATIENT) as gate, raw_connection(gate.url) as wire:
        await wire.send(f"{head}{part}".encode())
        assert outcome_of(await answer(wire)) == (408, "request_timeout")
        assert await wire.rest() == b""


@in_virtual_time
async def test_silence_after_100_continue_is_408(tmp_path: Path) -> None:
    async with public(tmp_path, IMPATIENT) as gate, raw_connection(gate.url) as wire:
        await wire.send(request(b"", "Expect: 100-continue", length=100))
        assert await wire.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert outcome_of(await answer(wire)) == (408, "request_timeout")


@in_virtual_time
async def test_half_a_request_behind_a_complete_one_has_its_own_timeout(tmp_path: Path) -> None:
    async with public(tmp_path, IMPATIENT) as gate, raw_connection(gate.url) as wire:
        gate.node.faults.next("hang", seconds=1.0)
        await wire.send(request({**HELLO, "max_tokens": 1}) + request()[:60])
        assert (await answer(wire)).status == 200
        assert outcome_of(await answer(wire)) == (408, "request_timeout")


@in_virtual_time
async def test_a_line_end_behind_a_body_does_not_close_the_connection(tmp_path: Path) -> None:
    """Old clients send one that `Content-Length` does not include."""
    async with public(tmp_path, IMPATIENT) as gate, raw_connection(gate.url) as wire:
        await wire.send(request({**HELLO, "max_tokens": 1}) + b"\r\n")
        assert (await answer(wire)).status == 200
        await asyncio.sleep(5.0)
        await wire.send(request({**HELLO, "max_tokens": 1}))
        assert (await answer(wire)).status == 200


@in_virtual_time
async def test_a_body_a_byte_at_a_time_is_408(tmp_path: Path) -> None:
    async with public(tmp_path, IMPATIENT) as gate, raw_connection(gate.url) as wire:
        await wire.send(request(b"{", length=5000))
        trickling = asyncio.create_task(_trickle(wire, b" " * 4000))
        assert outcome_of(await answer(wire)) == (408, "request_timeout")
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)


async def _trickle(wire: RawConnection, data: bytes) -> None:
    for byte in data:
        await wire.send(bytes([byte]))
        await asyncio.sleep(0.02)


@in_virtual_time
async def test_corrupted_requests_are_answered_or_closed(tmp_path: Path) -> None:
    async with public(tmp_path, IMPATIENT) as gate:
        rng = random.Random(20)
        whole = [
            request(
                {**HELLO, "max_tokens": 1}, "X-Request-ID: a", "Content-Type: application/json"
            ),
            request({**HELLO, "max_tokens": 1, "stream": True}, "Connection: keep-alive, X-A"),
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            "2\r\n{}\r\n0\r\n\r\n".encode(),
            request(b"", method="GET", path="/v1/models?x=%20#y"),
        ]

        async def one(number: int) -> None:
            data = bytearray(whole[number % len(whole)])
            for _ in range(rng.randint(1, 5)):
                place = rng.randrange(len(data))
                what = rng.choice(b'\0\r\n :;,/%{}[]"0159azAZ\x7f\x80\xff')
                if rng.random() < 0.5:
                    data[place] = what
                else:
                    data.insert(place, what)
            async with raw_connection(gate.url) as wire:
                middle = rng.randrange(len(data))
                await wire.send(bytes(data[:middle]))
                await asyncio.sleep(0)
                with suppress(ConnectionError):
                    await wire.send(bytes(data[middle:]))
                    outcome_of = await wire.some()
                    assert not outcome_of or outcome_of.startswith(b"HTTP/1.1 ")

        for start in range(0, 200, 50):
            await asyncio.gather(*(one(number) for number in range(start, start + 50)))
        await gate.all_disconnected()
