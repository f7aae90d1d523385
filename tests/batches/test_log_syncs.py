"""Logs are brought to the disk together, soon after they were written, and not otherwise."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.batches import response_log
from gateway.batches.folder import DiskThreads, Folder, FolderError
from tests.gateways import until


async def test_what_was_written_is_brought_to_the_disk_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[list[str]] = []

    def sync_all(_: Folder, names: list[str]) -> None:
        rounds.append(names)
        if len(rounds) == 1:
            raise FolderError("the disk is away", "mount it")

    monkeypatch.setattr(response_log, "sync_logs", sync_all)
    monkeypatch.setattr(response_log, "SYNC_SECONDS", 0.01)
    threads = DiskThreads()
    syncs = response_log.LogSyncs(Folder(tmp_path, most_bytes=lambda: 1), threads)
    running = asyncio.create_task(syncs.run())
    try:
        for name in ("b", "a", "b"):
            syncs.add(name)
        await until(lambda: rounds == [["a", "b"]])
        syncs.add("c")
        await until(lambda: rounds == [["a", "b"], ["c"]])
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        threads.close()
