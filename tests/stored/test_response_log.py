"""The file of an event log: what is found in it, whatever a crash has left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.api import sse
from gateway.api.resuming import named_event
from gateway.stored import response_log
from gateway.stored.folder import Folder, FolderError
from gateway.stored.response_log import (
    Extent,
    LogBroken,
    LogEnded,
    LogFull,
    LogTaken,
    ResponseLog,
    ResponseLogs,
    Write,
    event_data,
    split_events,
)
from tests.gateways import until
from tests.stored.responses_over_nodes import logged, open_logs


def a_folder(path: Path) -> Folder:
    folder = Folder(path / "folder", most_bytes=lambda: 1 << 30, spare_bytes=0)
    folder.open()
    return folder


def a_log(path: Path) -> tuple[Folder, str]:
    """The folder and the name of a new log."""
    folder = a_folder(path)
    return folder, response_log.create_log(folder)


def events(first: int, count: int, size: int = 10, last: str = "x") -> bytes:
    kinds = ["x"] * (count - 1) + [last]
    return b"".join(
        named_event({"type": f"response.{kind}", "sequence_number": first + at, "d": "a" * size})
        for at, kind in enumerate(kinds)
    )


def put(folder: Folder, name: str, parts: Sequence[bytes]) -> Extent:
    extent = Extent()
    for part in parts:
        response_log.write_log(folder, Write(name, extent.size, part))
        extent = extent.grown(part)
    return extent


def test_a_scan_finds_what_was_written(tmp_path: Path) -> None:
    folder, name = a_log(tmp_path)
    assert response_log.scan_log(folder, name) == Extent()
    parts = [events(0, 3), events(3, 2000, 100), events(2003, 1, 600_000), events(2004, 2)]
    extent = put(folder, name, [*parts, events(2006, 1, last="completed")])
    found = response_log.scan_log(folder, name)
    assert (found.events, found.size, found.ended) == (2007, extent.size, True)
    assert found.last_offset == extent.last_offset
    path = folder.path(name)
    assert path.stat().st_mode & 0o777 == 0o600


def test_whatever_is_torn_off_the_whole_events_before_it_stay(tmp_path: Path) -> None:
    folder, name = a_log(tmp_path)
    whole = events(0, 4)
    ends = [0, *(at + 2 for at in range(len(whole)) if whole.startswith(b"\n\n", at))]
    for size in range(len(whole) + 1):
        folder.path(name).write_bytes(whole[:size])
        found = response_log.scan_log(folder, name)
        assert found.size == max(end for end in ends if end <= size)
        assert found.events == ends.index(found.size)


@pytest.mark.parametrize(
    ("between", "found"),
    [(b"\0" * 5000, 3), (b"junk\n\n", 3), (events(9, 1), 3), (b": note\n\n", 3), (b": run\n", 6)],
)
def test_what_is_no_next_event_or_comment_of_one_ends_the_log(
    tmp_path: Path, between: bytes, found: int
) -> None:
    folder, name = a_log(tmp_path)
    whole = events(0, 3) + between + events(3, 3)
    folder.path(name).write_bytes(whole)
    log = response_log.scan_log(folder, name)
    assert (log.events, log.size) == (found, len(events(0, 3) if found == 3 else whole))


def test_two_writers_are_noticed(tmp_path: Path) -> None:
    folder, name = a_log(tmp_path)
    put(folder, name, [events(0, 3)])
    with pytest.raises(LogTaken):
        response_log.write_log(folder, Write(name, 0, events(0, 1)))
    results = response_log.write_logs(
        folder, [Write(name, 0, b"x"), Write(f"events-{'0' * 32}", 0, b"")]
    )
    assert [type(result) for result in results] == [LogTaken, FileNotFoundError]
    assert response_log.scan_log(folder, name).events == 3


END: dict[str, Any] = {"type": "response.completed", "response": {}}


def values(count: int, size: int = 3) -> list[dict[str, Any]]:
    return [{"type": "response.x", "d": "a" * size} for _ in range(count)]


async def test_events_are_numbered_and_kept(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        log = await logs.create()
        await log.append(values(2))
        assert (log.extent.events, log.next_number) == (0, 2)
        await log.flush()
        assert log.extent.events == 2
        await log.append(values(1))
        await log.append([END])
        await log.flush()
        assert log.ended
        assert await log.last_event() == END | {"sequence_number": 3}
        with pytest.raises(LogEnded):
            await log.append(values(1))
        found = await logged(logs, log.name)
        assert [value["sequence_number"] for value in found] == [0, 1, 2, 3]
        assert [value["type"] for value in found][2:] == ["response.x", "response.completed"]


async def test_a_log_has_a_limit_which_its_end_may_pass(tmp_path: Path) -> None:
    async with open_logs(tmp_path, most=1000) as logs:
        log = await logs.create()
        await log.append(values(2, 300))
        with pytest.raises(LogFull, match=r"1000 bytes \(limits\.response_bytes\)"):
            await log.append(values(1, 300))
        await log.append([END | {"response": {"text": "a" * 900}}])
        await log.flush()
        assert (log.ended, log.extent.events) == (True, 3)


async def test_pending_bytes_are_bounded(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        log = await logs.create()
        for _ in range(200):
            await log.append(values(1, 4000))
            waiting = log.next_number - log.extent.events
            assert waiting * 4000 <= response_log.MOST_PENDING_BYTES + 8000


async def test_a_disk_that_fails_fails_the_log_and_no_other(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        broken, good = await logs.create(), await logs.create()
        await broken.append(values(1))
        await broken.flush()
        with logs.folder.path(broken.name).open("ab") as file:
            file.write(b"of another process")
        await broken.append(values(1))
        await good.append(values(1))
        with pytest.raises(FolderError, match="another size"):
            await broken.flush()
        with pytest.raises(FolderError):
            await broken.append(values(1))
        assert broken.broken
        await good.flush()
        assert good.extent.events == 1


async def test_a_torn_log_is_written_on_behind_its_whole_events(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        log = await logs.create()
        await log.append(values(3))
        await log.flush()
        name = log.name
        del log
        await until(lambda: len(logs._open) == 0)
        with logs.folder.path(name).open("ab") as file:
            file.write(events(3, 1)[:-9])  # as a kill or a power cut may leave it
        again = await logs.open(name, to_write=True)
        assert again.next_number == 3
        await again.append([END])
        await again.flush()
        assert [one["sequence_number"] for one in await logged(logs, name)] == [0, 1, 2, 3]


async def test_nobody_waits_for_logs_that_have_closed(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs, asyncio.timeout(60):
        early = await logs.create()
        await logs.close()
        late = await logs.create()
        for log in (early, late):
            with pytest.raises(LogBroken):
                await log.append(values(1))
            await log.flush()


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


async def read(logs: ResponseLogs, name: str, after: int = -1) -> bytes:
    return b"".join([piece async for piece in logs.follow(name, after)])


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def numbers(data: bytes) -> list[int]:
    return [event_data(event)["sequence_number"] for event in split_events(data)]


async def test_each_sees_all_events_once_from_any_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_log, "SILENCE_SECONDS", 600.0)  # the machine may stand still
    rng = random.Random(1)
    async with open_logs(tmp_path) as logs:
        log = await logs.create()
        files, most = open_files(), 0
        # Fifty wait for what comes last: followers that wait hold no file open.
        readers = {asyncio.create_task(read(logs, log.name, 599)): 599 for _ in range(50)}
        writing = asyncio.create_task(write(log, 600, rng))
        while not writing.done():
            most = max(most, open_files())
            after = rng.choice([-1, 0, rng.randint(-1, 600)])
            readers[asyncio.create_task(read(logs, log.name, after))] = after
            await asyncio.sleep(0.02)
        last = log.next_number - 1
        for after in (-1, 0, last - 1, last, last + 5):
            readers[asyncio.create_task(read(logs, log.name, after))] = after
        whole = logs.folder.path(log.name).read_bytes()
        for reader, after in readers.items():
            data = await reader
            assert numbers(data) == list(range(after + 1, last + 1))
            assert whole.endswith(data)
        assert most <= files + 40
        del log
        await until(lambda: len(logs._open) == 0)


async def test_silence_is_broken_by_a_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_log, "SILENCE_SECONDS", 0.05)
    async with open_logs(tmp_path) as logs:
        log = await logs.create()
        pieces = logs.follow(log.name, 3)
        assert await anext(pieces) == sse.HEARTBEAT
        await log.append([value(number) for number in range(4)])
        assert await anext(pieces) == sse.HEARTBEAT
        await log.append([value(4)])
        while (piece := await anext(pieces)) == sse.HEARTBEAT:
            pass
        assert numbers(piece) == [4]
        await pieces.aclose()


async def test_a_log_of_another_process_is_followed_too(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as ours, open_logs(tmp_path) as theirs:
        log = await theirs.create()
        await log.append([value(0)])
        await log.flush()
        reader = asyncio.create_task(read(ours, log.name))
        await write(log, 200, random.Random(1))
        data = await reader
        assert numbers(data) == list(range(log.next_number))


@pytest.mark.slow
async def test_one_that_reads_nothing_holds_nobody_up(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        log = await logs.create()
        slow = logs.follow(log.name)
        await log.append([value(3)])
        first = await anext(slow)
        reader = asyncio.create_task(read(logs, log.name))
        await write(log, 20_000, random.Random(2))
        data = await reader
        rest = [first, *[piece async for piece in slow]]
        assert b"".join(rest) == data
        assert max(map(len, rest)) <= 2 * response_log.READ_BYTES


async def test_followers_that_can_return_are_cut_the_others_stay(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        log, done = await logs.create(), await logs.create()
        await log.append([value(0)])
        await done.append([value(0), END])
        await done.flush()
        cut, kept = logs.follow(log.name), logs.follow(log.name, can_return=False)
        for pieces in (cut, kept):
            assert numbers(await anext(pieces)) == [0]
        ahead = logs.follow(log.name, 7)
        waits = [asyncio.ensure_future(anext(pieces)) for pieces in (cut, kept, ahead)]
        await until(lambda: len(log.waiters) == 3)
        logs.cut()
        for wait in (waits[0], waits[2]):
            with pytest.raises(LogBroken):
                await wait
        with pytest.raises(LogBroken):
            await read(logs, log.name, -1)
        assert numbers(await read(logs, done.name, -1)) == [0, 1]
        await log.append([END])
        assert numbers(await waits[1]) == [1]
        await kept.aclose()
