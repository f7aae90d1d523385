"""Brings what was written to event logs to the disk, together, within about a second."""

from __future__ import annotations

import asyncio
import contextlib

from gateway.batches import log_file
from gateway.batches.disk_threads import DiskThreads
from gateway.batches.folder import Folder, FolderError

SYNC_SECONDS = 1.0
"""Least seconds between two rounds."""


class LogSyncs:
    """The logs of a folder that have been written since they were last brought to the disk."""

    def __init__(self, folder: Folder, threads: DiskThreads) -> None:
        self._folder = folder
        self._threads = threads
        self._names: set[str] = set()
        self._written = asyncio.Event()

    def add(self, name: str) -> None:
        """This log was written."""
        self._names.add(name)
        self._written.set()

    async def run(self) -> None:
        """Bring them to the disk, until cancelled."""
        while True:
            await self._written.wait()
            await asyncio.sleep(SYNC_SECONDS)
            self._written.clear()
            names, self._names = sorted(self._names), set()
            with contextlib.suppress(FolderError):
                await self._threads.run(log_file.sync_all, self._folder, names)
