"""Threads for the disk: the event loop never waits for it, and nobody waits without limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from gateway.batches.folder import FolderError

THREADS = 4
"""Threads: more would not make a disk faster."""

DISK_SECONDS = 120.0
"""Seconds that a caller waits for one piece of work."""

T = TypeVar("T")


class DiskThreads:
    """A few threads of their own: one that hangs in the disk takes nobody else's."""

    def __init__(self, threads: int = THREADS, seconds: float = DISK_SECONDS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="disk")
        self._seconds = seconds

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do the work on a thread. Raises: FolderError, if it takes too long; the work's own error.

        A caller that is cancelled leaves the work to its end.
        """
        return await self._result(self._pool.submit(work, *arguments))

    async def open(
        self, work: Callable[..., T], *arguments: Any, close: Callable[[T], object]
    ) -> T:
        """As `run`, for work that opens something: `close` ends it if the caller has left by then.

        `close` is called on a thread.
        """
        job = self._pool.submit(work, *arguments)
        try:
            return await self._result(job)
        except BaseException:
            job.add_done_callback(partial(_close_opened, close))
            raise

    async def _result(self, job: Future[T]) -> T:
        done = asyncio.wrap_future(job)
        # Nobody may be left to ask for its error.
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.shield(done)
        except TimeoutError:
            raise FolderError(
                f"the disk of the files has not answered for {self._seconds:.0f} s",
                "see whether it is overloaded, or its server is gone",
            ) from None

    def close(self) -> None:
        """Take no more work; what runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _close_opened(close: Callable[[T], object], job: Future[T]) -> None:
    if not job.cancelled() and job.exception() is None:
        close(job.result())
