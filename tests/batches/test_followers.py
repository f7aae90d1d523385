"""Followers: each sees every event once and in order, from any point, and none holds up another."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from gateway.batches import response_log
from gateway.batches.response_log import (
    Followers,
    LogBroken,
    ResponseLog,
    ResponseLogs,
    event_data,
    split_events,
)
from gateway.proxy import sse
from tests.batches.responses_over_nodes import open_logs
from tests.gateways import until

END: dict[str, Any] = {"type": "response.completed", "response": {}}


def value(number: int) -> dict[str, Any]:
    return {"type": "response.output_text.delta", "delta": f"{number} " * (number % 5)}


async def write(log: ResponseLog, count: int, rng: random.Random) -> None:
    """Write so many events and the end, in groups and with pauses."""
    while log.next_number < count:
        group = rng.randint(1, 9)
        await log.append([value(log.next_number + at) for at in range(group)])
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.02)
    await log.append([END])
    await log.flush()


async def read(followers: Followers, name: str, after: int = -1) -> bytes:
    return b"".join([piece async for piece in followers.follow(name, after)])


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def numbers(data: bytes) -> list[int]:
    return [event_data(event)["sequence_number"] for event in split_events(data)]


@pytest.mark.parametrize("tail", [500, response_log.TAIL_BYTES])
async def test_each_sees_all_events_once_from_any_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: int
) -> None:
    monkeypatch.setattr(response_log, "TAIL_BYTES", tail)
    rng = random.Random(tail)
    async with open_logs(tmp_path) as logs:
        followers, log = Followers(logs), await logs.create()
        writing = asyncio.create_task(write(log, 600, rng))
        readers: dict[asyncio.Task[bytes], int] = {}
        while not writing.done():
            after = rng.choice([-1, 0, rng.randint(-1, 600)])
            readers[asyncio.create_task(read(followers, log.name, after))] = after
            await asyncio.sleep(0.02)
        last = log.next_number - 1
        for after in (-1, 0, last - 1, last, last + 5):
            readers[asyncio.create_task(read(followers, log.name, after))] = after
        whole = logs.folder.path(log.name).read_bytes()
        for reader, after in readers.items():
            data = await reader
            assert numbers(data) == list(range(after + 1, last + 1))
            assert whole.endswith(data)
        await log.release()
        assert (followers.count, len(logs)) == (0, 0)


async def test_a_follower_that_waits_gets_each_event_when_it_is_written(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        followers, log = Followers(logs), await logs.create()
        pieces = followers.follow(log.name)
        for number in range(5):
            await log.append([value(number)])
            piece = await anext(pieces)
            assert numbers(piece) == [number]
            assert log.event_count == number + 1
        waiting = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await log.append([END])
        assert numbers(await waiting) == [5]
        with pytest.raises(StopAsyncIteration):
            await anext(pieces)
        await log.release()


async def test_silence_is_broken_by_a_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_log, "SILENCE_SECONDS", 0.05)
    async with open_logs(tmp_path) as logs:
        followers, log = Followers(logs), await logs.create()
        pieces = followers.follow(log.name, 3)
        assert await anext(pieces) == sse.HEARTBEAT
        await log.append([value(number) for number in range(4)])
        assert await anext(pieces) == sse.HEARTBEAT
        await log.append([value(4)])
        while (piece := await anext(pieces)) == sse.HEARTBEAT:
            pass
        assert numbers(piece) == [4]
        await pieces.aclose()
        await log.release()


async def test_without_an_end_the_followers_break(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        followers, log = Followers(logs), await logs.create()
        await log.append([value(0)])
        one = asyncio.create_task(read(followers, log.name))
        other = asyncio.create_task(read(followers, log.name, 7))
        await until(lambda: followers.count == 2)
        await log.release()
    for reader in (one, other):
        with pytest.raises(LogBroken):
            await reader


async def test_a_log_of_another_process_is_followed_too(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as ours, open_logs(tmp_path) as theirs:
        log = await theirs.create()
        await log.append([value(0)])
        await log.flush()
        reader = asyncio.create_task(read(Followers(ours), log.name))
        await write(log, 200, random.Random(1))
        data = await reader
        assert numbers(data) == list(range(log.next_number))
        await log.release()


@pytest.mark.slow
async def test_one_that_reads_nothing_holds_nobody_up(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        followers, log = Followers(logs), await logs.create()
        slow = followers.follow(log.name)
        await log.append([value(3)])
        first = await anext(slow)
        reader = asyncio.create_task(read(followers, log.name))
        await write(log, 20_000, random.Random(2))
        data = await reader
        rest = [first, *[piece async for piece in slow]]
        assert b"".join(rest) == data
        assert max(map(len, rest)) <= response_log.READ_BYTES + response_log.TAIL_BYTES
        await log.release()


async def test_many_logs_with_clients_that_reconnect_at_random(tmp_path: Path) -> None:
    rng, count = random.Random(5), 100
    files = open_files()
    most = 0

    async def client(followers: Followers, name: str) -> bytes:
        """Follow to the end, and leave now and then."""
        data = b""
        while True:
            after = numbers(data)[-1] if data else -1
            stay = rng.choice([0.02, 0.1, 1.0])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(stay):
                    async with contextlib.aclosing(followers.follow(name, after)) as pieces:
                        async for piece in pieces:
                            data += piece
                    return data
            # Within an event, as a connection breaks.
            data = data[: data.rfind(b"\n\n") + 2]

    async with open_logs(tmp_path) as logs:
        followers = Followers(logs)
        open_ones = [await logs.create() for _ in range(count)]
        writers = [
            asyncio.create_task(write(log, 100, random.Random(log.name))) for log in open_ones
        ]
        clients = [
            asyncio.create_task(client(followers, log.name)) for log in open_ones for _ in range(2)
        ]
        everything = asyncio.gather(*writers, *clients)
        while not everything.done():
            most = max(most, open_files())
            await asyncio.sleep(0.05)
        await everything
        results = [one.result() for one in clients]
        for at, log in enumerate(open_ones):
            assert results[2 * at] == results[2 * at + 1]
            assert numbers(results[2 * at]) == list(range(log.next_number))
            await log.release()
        assert (followers.count, len(logs)) == (0, 0)
    assert most <= files + 40
    assert isinstance(logs, ResponseLogs)


async def test_followers_that_can_return_are_cut_the_others_stay(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        followers, log, done = Followers(logs), await logs.create(), await logs.create()
        await log.append([value(0)])
        await done.append([value(0), END])
        await done.flush()
        cut, kept = followers.follow(log.name), followers.follow(log.name, can_return=False)
        for pieces in (cut, kept):
            assert numbers(await anext(pieces)) == [0]
        waits = [asyncio.ensure_future(anext(pieces)) for pieces in (cut, kept)]
        await asyncio.sleep(0)
        followers.cut()
        with pytest.raises(LogBroken):
            await waits[0]
        with pytest.raises(LogBroken):
            await read(followers, log.name, -1)
        assert numbers(await read(followers, done.name, -1)) == [0, 1]
        await log.append([END])
        assert numbers(await waits[1]) == [1]
        await kept.aclose()
        for one in (log, done):
            await one.release()
