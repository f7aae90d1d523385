"""Event logs: what was seen survives a kill, and many are written with few calls."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.batches import response_log
from gateway.batches.folder import DiskThreads, Folder, FolderError
from gateway.batches.response_log import LogBroken, LogEnded, LogFull, ResponseLogs
from tests.batches.log_writer import delta
from tests.batches.responses_over_nodes import logged, open_logs
from tests.batches.virtual_store import store_in_virtual_time
from tests.gateways import until
from tests.virtual import in_virtual_time

END = {"type": "response.completed", "response": {}}


def values(count: int, size: int = 3) -> list[dict[str, Any]]:
    return [{"type": "response.x", "d": "a" * size} for _ in range(count)]


async def test_events_are_numbered_and_kept(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        log = await logs.create()
        await log.append(values(2))
        assert (log.event_count, log.next_number) == (0, 2)
        await log.flush()
        assert log.event_count == 2
        await log.append(values(1))
        await log.append([END])
        await log.flush()
        assert log.ended
        assert await log.last_event() == END | {"sequence_number": 3}
        with pytest.raises(LogEnded):
            await log.append(values(1))
        await log.release()
        assert len(logs) == 0
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
        assert (log.ended, log.event_count) == (True, 3)
        await log.release()


async def test_pending_bytes_are_bounded(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        log = await logs.create()
        for _ in range(200):
            await log.append(values(1, 4000))
            waiting = log.next_number - log.event_count
            assert waiting * 4000 <= response_log.MOST_PENDING_BYTES + 8000
        await log.release()


@in_virtual_time
async def test_many_logs_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 0
    write_all = response_log.write_logs

    def counted(*arguments: Any) -> Any:
        nonlocal rounds
        rounds += 1
        return write_all(*arguments)

    monkeypatch.setattr(response_log, "write_logs", counted)
    with store_in_virtual_time():
        async with open_logs(tmp_path) as logs:
            open_ones = [await logs.create() for _ in range(100)]
            for _ in range(20):
                for log in open_ones:
                    await log.append(values(1))
                await asyncio.sleep(0.01)
            await asyncio.gather(*(log.flush() for log in open_ones))
            assert all(log.event_count == 20 for log in open_ones)
            assert rounds <= 15
            for log in open_ones:
                await log.release()


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
        assert good.event_count == 1
        await broken.release()
        await good.release()


async def test_events_that_nobody_has_seen_can_be_dropped(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        log = await logs.create()
        await log.append(values(5))
        await log.cut(2)
        await log.append([END])
        await log.release()
        assert [value["type"] for value in await logged(logs, log.name)] == [
            "response.x", "response.x", "response.completed",
        ]  # fmt: skip


async def test_what_is_pending_is_written_at_the_end_of_the_process(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        log = await logs.create()
        await log.append(values(3))
    async with open_logs(tmp_path) as logs:
        assert len(await logged(logs, log.name)) == 3


async def test_a_deleted_log_is_gone(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        log = await logs.create()
        await log.append(values(3))
        await log.flush()
        await logs.delete(log.name)
        assert log.broken
        await log.release()
        assert not logs.folder.path(log.name).exists()
        with pytest.raises(FileNotFoundError):
            await logs.open(log.name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_what_was_seen_survives_kills_of_the_writer(tmp_path: Path, seed: int) -> None:
    rng, seen, names = random.Random(seed), dict[str, int](), list[str]()
    for _ in range(3):
        writer = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.batches.log_writer", str(tmp_path), *names,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert writer.stdout is not None
        before, deadline = dict(seen), time.monotonic() + rng.uniform(0.2, 0.6)
        async with asyncio.timeout(60):
            while time.monotonic() < deadline or seen == before:
                name, count = (await writer.stdout.readline()).decode().split()
                assert int(count) >= seen.get(name, 0)
                if seen == before:
                    deadline = time.monotonic() + rng.uniform(0.2, 0.6)
                seen[name] = int(count)
            writer.kill()
            await writer.wait()
        names = list(seen)
        # As a power cut may leave it, too.
        torn = tmp_path / "folder" / rng.choice(names)
        with torn.open("ab") as file:
            file.write(os.urandom(rng.randrange(300)).replace(b"\n", b""))
    async with open_logs(tmp_path) as logs:
        assert names
        for name in names:
            found = await logged(logs, name)
            assert len(found) >= seen[name] > 0
            for number, value in enumerate(found):
                assert value == delta(name, number) | {"sequence_number": number}


async def test_two_openings_are_one_log(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs:
        log = await logs.create()
        await log.append(values(1))
        await log.flush()
        await log.stop_writing()
        await log.release()
        one, other = await asyncio.gather(logs.open(log.name), logs.open(log.name, to_write=True))
        assert one is other
        await one.append([END])
        await other.flush()
        for opened in (one, other):
            await opened.release()
        assert len(logs) == 0


async def test_the_end_is_on_the_disk_before_it_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_size))
    async with open_logs(tmp_path) as logs:
        log = await logs.create()
        await log.append(values(1))
        await log.append([END])
        await until(lambda: log.ended)
        assert log.size in synced
        await log.release()


@in_virtual_time
async def test_what_was_written_is_synced_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_size))
    with store_in_virtual_time():
        async with open_logs(tmp_path) as logs:
            log = await logs.create()
            await log.append(values(1))
            await until(lambda: log.size in synced and log.size > 0, 10)
            await log.release()


def test_the_limits_are_what_the_words_say() -> None:
    assert response_log.COMMIT_SECONDS <= 0.05
    assert response_log.TAIL_BYTES * 1000 <= 64 << 20
    assert ResponseLogs is not None


async def test_nobody_waits_for_logs_that_have_closed(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs, asyncio.timeout(60):
        early = await logs.create()
        await logs.close()
        late = await logs.create()
        for log in (early, late):
            with pytest.raises(LogBroken):
                await log.append(values(1))
            await log.flush()
            await log.release()


async def test_a_log_whose_flush_is_late_takes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_log, "FLUSH_SECONDS", 0.1)
    folder = Folder(tmp_path / "folder", most_bytes=lambda: 1 << 30, spare_bytes=0)
    folder.open()
    logs = ResponseLogs(folder, DiskThreads(), lambda: 1 << 20)
    log = await logs.create()
    await log.append(values(1))
    with pytest.raises(LogBroken):
        await log.flush()
    with pytest.raises(LogBroken):
        await log.append(values(1))
    await log.release()
    logs.threads.close()
