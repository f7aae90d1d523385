from __future__ import annotations

import asyncio
import threading

import pytest

from gateway.batches.folder import DiskThreads, FolderError


async def test_work_runs_beside_the_event_loop() -> None:
    threads = DiskThreads(1)
    assert await threads.run(threading.current_thread) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    threads.close()


async def test_a_disk_that_hangs_is_told_and_does_not_hold_its_caller() -> None:
    threads, release = DiskThreads(1, seconds=0.05), threading.Event()
    with pytest.raises(FolderError, match="has not answered"):
        await threads.run(release.wait)
    release.set()
    threads.close()


async def test_work_ends_although_its_caller_was_cancelled() -> None:
    threads, begun, release = DiskThreads(1), threading.Event(), threading.Event()
    ended = threading.Event()

    def work() -> None:
        begun.set()
        release.wait(60)
        ended.set()
        raise ValueError  # Nobody is left to see it.

    caller = asyncio.create_task(threads.run(work))
    await asyncio.to_thread(begun.wait, 60)
    caller.cancel()
    await asyncio.wait([caller])
    assert caller.cancelled()
    release.set()
    assert await asyncio.to_thread(ended.wait, 60)
    await threads.run(lambda: None)
    threads.close()


async def test_what_a_lost_caller_has_opened_is_closed() -> None:
    threads, begun, release = DiskThreads(1), threading.Event(), threading.Event()
    closed: list[str] = []

    def work() -> str:
        begun.set()
        release.wait(60)
        return "opened"

    caller = asyncio.create_task(threads.open(work, close=closed.append))
    await asyncio.to_thread(begun.wait, 60)
    caller.cancel()
    await asyncio.wait([caller])
    release.set()
    await threads.run(lambda: None)
    assert closed == ["opened"]
    assert await threads.open(lambda: "kept", close=closed.append) == "kept"
    with pytest.raises(ZeroDivisionError):
        await threads.open(_fails, close=closed.append)
    assert closed == ["opened"]
    threads.close()


def _fails() -> str:
    raise ZeroDivisionError
