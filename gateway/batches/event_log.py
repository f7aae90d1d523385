"""Event logs: the streams of stored responses on the disk, each event there before anyone sees it.

All logs of the process are written by one loop, together, some thirty times a second at most: what
one token after another brings takes neither a switch of threads nor a call of the system each. An
event that is written survives the end of the process, and within a second or so also a loss of
power; a terminal event does so before it is seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from gateway.batches import log_file
from gateway.batches.disk_threads import DISK_SECONDS, DiskThreads
from gateway.batches.folder import Folder, FolderError
from gateway.batches.log_file import TERMINAL_TYPES, Extent, LogBroken, Write, event_data
from gateway.batches.log_syncs import LogSyncs
from gateway.proxy.api.resuming import named_event
from gateway.proxy.json_values import JsonObject

COMMIT_SECONDS = 0.03
"""Least seconds between two rounds of writing."""

COMMIT_SHARE = 2.0
"""After a round the loop rests for so many times its duration: the disk is not kept busy."""

BEAT_SECONDS = 0.25
"""Between two looks at those who wait."""

SILENCE_SECONDS = 15.0
"""After so long without an event a follower gets a comment."""

MOST_PENDING_BYTES = 64 * 1024
"""Bytes of one log that wait to be written; then whoever brings more waits."""

TAIL_BYTES = 32 * 1024
"""Bytes of a log's newest events that are kept in memory, for all that follow it live."""

READ_BYTES = 64 * 1024
"""Bytes that a follower gets at once."""

MOST_TOGETHER = 128
"""Logs of one round: their followers wake together."""

MOST_ENDINGS = 32

FLUSH_SECONDS = 2 * DISK_SECONDS
"""Most seconds to wait for what was appended: a round under way, and the next one."""

CLOSE_SECONDS = 3.0
"""Most seconds to write what is pending, at the end."""


@dataclass(slots=True, eq=False)
class EventLog:
    """One log. `EventLogs` makes it and writes it; whoever got it from there calls `release`.

    Events are numbered from 0 in the order of `append`.
    """

    name: str
    """Of its file."""
    _logs: EventLogs
    _extent: Extent
    """What is written."""
    users: int = 0
    """Those that have not released it."""
    _writers: int = 0
    """Those in this process that write it."""
    _next_number: int = 0
    _pending: list[bytes] = field(default_factory=list)
    _pending_bytes: int = 0
    _ending: bool = False
    """Whether its terminal event has been appended."""
    _failure: Exception | None = None
    """Why nothing more can be written."""
    _writing: bool = False
    _rounds: list[asyncio.Future[None]] = field(default_factory=list)
    """Those who wait until what is pending has been written."""
    _tail: deque[tuple[int, bytes]] = field(default_factory=deque)
    """The newest bytes, by their offsets."""
    _tail_bytes: int = 0
    _waiters: dict[asyncio.Future[bool], float] = field(default_factory=dict)
    """Followers that wait for more, and since when."""
    _closed: bool = False

    # What is written.

    @property
    def event_count(self) -> int:
        """Written events: followers may see these."""
        return self._extent.events

    @property
    def next_number(self) -> int:
        """The number that the next event gets."""
        return self._next_number

    @property
    def size(self) -> int:
        """Bytes of the written events."""
        return self._extent.size

    @property
    def ended(self) -> bool:
        """Whether the terminal event is written."""
        return self._extent.ended

    @property
    def ending(self) -> bool:
        """Whether the terminal event is written or about to be."""
        return self._ending

    @property
    def broken(self) -> bool:
        """Whether it has no terminal event, and nothing more will come in this process."""
        return (self._closed or self._failure is not None) and not self.ended

    # Writing.

    async def append(self, values: Sequence[JsonObject], *, comment: bytes = b"") -> None:
        """Add events with these data, which get their numbers; waits only if too much is pending.

        `comment`: a line of a comment that goes before them.

        The last one may be terminal: then `flush` tells when it is on the disk. Raises: LogFull,
        then none of them is added; LogEnded; FolderError, if an earlier write has failed.
        """
        encoded, number = [comment], self._next_number
        self._check_open()
        for value in values:
            fields = {"type": value["type"], "sequence_number": number} | value
            fields["sequence_number"] = number
            encoded.append(named_event(fields))
            number += 1
        data = b"".join(encoded)
        is_last = bool(values) and values[-1]["type"] in TERMINAL_TYPES
        most = self._logs.most_bytes()
        if not is_last and self._extent.size + self._pending_bytes + len(data) > most:
            raise log_file.LogFull(most)
        self._next_number, self._ending = number, is_last
        self._pending.append(data)
        self._pending_bytes += len(data)
        self._logs.mark_dirty(self)
        if self._pending_bytes > MOST_PENDING_BYTES and not is_last:
            await self.flush()

    async def flush(self) -> None:
        """Return when all that was appended is written, and on the disk if it has ended.

        Raises: FolderError.
        """
        while self._pending or self._writing:
            if self._closed:
                raise LogBroken
            written = asyncio.get_running_loop().create_future()
            self._rounds.append(written)
            try:
                async with asyncio.timeout(FLUSH_SECONDS):
                    await written
            except TimeoutError:
                # What is late must not come behind what another process writes.
                self.fail(LogBroken())
                raise LogBroken from None
        if self._failure is not None:
            raise self._failure

    async def cut(self, events: int) -> None:
        """Drop all but the first so many events, which nobody has seen. Raises: FolderError."""
        await self.flush()
        self._check_open()
        offset = await self._offset_of(events)
        logs = self._logs
        await logs.threads.run(log_file.truncate, logs.folder, self.name, offset)
        self._extent = await logs.threads.run(log_file.scan, logs.folder, self.name)
        self._next_number = self._extent.events
        self._forget_tail()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise LogBroken
        if self._ending:
            raise log_file.LogEnded
        if not self._writers:
            raise ValueError("the log was opened to be read")

    # Reading.

    async def read(self, offset: int) -> bytes:
        """Written bytes from there on, at most about `READ_BYTES`; empty: there are none yet.

        Raises: FolderError, FileNotFoundError.
        """
        if offset >= self._extent.size:
            return b""
        if self._tail and offset >= self._tail[0][0]:
            return self._from_tail(offset)
        length = min(READ_BYTES, self._extent.size - offset)
        logs = self._logs
        return await logs.threads.run(log_file.read, logs.folder, self.name, offset, length)

    async def find(self, number: int) -> int | None:
        """Where the event of this number begins; None: it is not written yet.

        Raises: FolderError, FileNotFoundError.
        """
        if number > self._extent.events:
            return None
        return await self._offset_of(number)

    async def wait(self, offset: int) -> bool:
        """Wait for bytes behind `offset`; False: there was silence for `SILENCE_SECONDS`.

        Returns also when it has ended or broken.
        """
        if offset < self._extent.size or self.ended or self.broken:
            return True
        changed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters[changed] = self._logs.clock()
        self._logs.waited_for.set()
        try:
            return await changed
        finally:
            self._waiters.pop(changed, None)

    async def last_event(self) -> JsonObject | None:
        """The data of the last written event; None: there is none.

        Raises: FolderError, FileNotFoundError.
        """
        extent, logs = self._extent, self._logs
        if not extent.events:
            return None
        length = extent.size - extent.last_offset
        return event_data(
            await logs.threads.run(
                log_file.read, logs.folder, self.name, extent.last_offset, length
            )
        )

    async def events(self, first: int = 0) -> AsyncGenerator[bytes, None]:
        """All written events from this number on, in pieces of whole ones.

        Raises: FolderError, FileNotFoundError.
        """
        offset, rest = await self.find(first), b""
        while offset is not None and (piece := await self.read(offset)):
            offset += len(piece)
            data = rest + piece
            end = data.rfind(b"\n\n") + 2
            if end > 1:
                yield data[:end]
                rest = data[end:]
            else:
                rest = data

    async def _offset_of(self, number: int) -> int:
        extent, logs = self._extent, self._logs
        if number >= extent.events:
            return extent.size
        at = bisect_right(extent.index, (number, 1 << 62)) - 1
        known, offset = extent.index[at]
        if known == number:
            return offset
        return await logs.threads.run(log_file.find, logs.folder, self.name, offset, number - known)

    def _from_tail(self, offset: int) -> bytes:
        parts, size = [], 0
        for start, data in self._tail:
            if start + len(data) <= offset:
                continue
            part = data[offset - start :] if start < offset else data
            parts.append(part)
            size += len(part)
            if size >= READ_BYTES:
                break
        return b"".join(parts)

    async def stop_writing(self) -> None:
        """This process goes on with it no more; another may. Raises: FolderError."""
        try:
            await self.flush()
        finally:
            self._writers -= 1
            if not self._writers:
                self._forget_tail()

    async def release(self) -> None:
        """It is not needed any more by the one who got it."""
        self.users -= 1
        if not self.users:
            with contextlib.suppress(FolderError):
                await self.flush()
            if not self.users:
                self._logs.forget(self)

    # For `EventLogs`.

    def begin_writing(self, events: int) -> None:
        """This process writes it from now on; it holds so many events."""
        if not self._writers:
            self._next_number, self._ending = events, self._extent.ended
        self._writers += 1

    @property
    def is_written_here(self) -> bool:
        """Whether this process writes it."""
        return self._writers > 0

    @property
    def has_pending(self) -> bool:
        """Whether something is to be written."""
        return bool(self._pending)

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody waits for more."""
        return bool(self._waiters)

    def take(self) -> Write | None:
        """What is to be written now, if anything is and nothing is being written."""
        if self._writing or not self._pending or self._failure is not None:
            return None
        data, self._pending, self._writing = b"".join(self._pending), [], True
        return Write(self.name, self._extent.size, data, sync=self._ending)

    def written(self, write: Write, failure: Exception | None) -> None:
        """That was written, or not."""
        self._writing = False
        self._pending_bytes -= len(write.data)
        if failure is not None:
            self.fail(failure)
            return
        self._extent.add(write.data)
        self._tail.append((write.offset, write.data))
        self._tail_bytes += len(write.data)
        while self._tail_bytes > TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft()[1])
        self.wake()
        if not self._pending:
            self._end_round()

    def fail(self, failure: Exception) -> None:
        """Nothing more can be written."""
        self._failure = self._failure or failure
        self._pending.clear()
        self._pending_bytes = 0
        self.wake()
        self._end_round()

    def grew(self, extent: Extent) -> None:
        """Another process has written to it."""
        if extent.size > self._extent.size:
            self._extent = extent
            self._forget_tail()
            self.wake()

    def extent(self) -> Extent:
        """What is written, for a look at what another process adds."""
        known = self._extent
        return Extent(known.events, known.size, known.last_offset, known.ended, list(known.index))

    def beat(self, now: float) -> None:
        """Wake those that have had nothing for long."""
        for waiter, since in self._waiters.items():
            if now - since >= SILENCE_SECONDS and not waiter.done():
                waiter.set_result(False)

    def close(self) -> None:
        """Nothing more will be written or waited for in this process."""
        self._closed = True
        self.wake()
        self._end_round()

    def _forget_tail(self) -> None:
        self._tail.clear()
        self._tail_bytes = 0

    def wake(self) -> None:
        """Let those that wait look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(True)

    def _end_round(self) -> None:
        rounds, self._rounds = self._rounds, []
        for waiter in rounds:
            if not waiter.done():
                waiter.set_result(None)


class EventLogs:
    """All logs of one folder that are open in this process.

    `most_bytes` gives the largest size of a log. `run` must run while logs are written or followed.
    """

    def __init__(
        self,
        folder: Folder,
        threads: DiskThreads,
        most_bytes: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.threads = threads
        self.most_bytes = most_bytes
        self.clock = clock
        self._open: dict[str, EventLog] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._dirty: dict[EventLog, None] = {}
        self._wakes = asyncio.Event()
        self.waited_for = asyncio.Event()
        """Set while somebody waits for more of a log."""
        self._syncs = LogSyncs(folder, threads)
        self._rounds: set[asyncio.Task[None]] = set()
        """Rounds of writing under way: one of logs that end, one of others."""
        self._ends = False
        """Whether a round of logs that end is under way."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    async def create(self) -> EventLog:
        """A new log, which this process writes. Raises: FolderError."""
        name = await self.threads.run(log_file.create, self.folder)
        log = EventLog(name, self, Extent(), users=1)
        log.begin_writing(0)
        self._open[name] = log
        if self._closed:
            log.close()
        return log

    async def open(self, name: str, *, to_write: bool = False) -> EventLog:
        """The log of this name; `to_write`: this process goes on with it, nobody else does.

        Raises: FileNotFoundError, FolderError.
        """
        lock = self._opening.setdefault(name, asyncio.Lock())
        try:
            async with lock:
                return await self._opened(name, to_write=to_write)
        finally:
            if not lock.locked():
                self._opening.pop(name, None)

    async def _opened(self, name: str, *, to_write: bool) -> EventLog:
        log = self._open.get(name)
        if log is not None and not log.is_written_here:
            await self._look([log])
        if log is None or log.broken:
            extent = await self.threads.run(log_file.scan, self.folder, name)
            log = EventLog(name, self, extent)
            self._open[name] = log
        if to_write:
            extent = log.extent()
            if not log.is_written_here:
                # What a crash left of an event would be in the way.
                await self.threads.run(log_file.truncate, self.folder, name, extent.size)
            log.begin_writing(extent.events)
        log.users += 1
        if self._closed:
            log.close()
        return log

    async def delete(self, name: str) -> None:
        """Remove the log; those who follow it break. Raises: FolderError."""
        log = self._open.get(name)
        if log is not None:
            log.fail(LogBroken())
            log.close()
        await self.threads.run(self.folder.delete, name)

    def mark_dirty(self, log: EventLog) -> None:
        """The log has something to be written."""
        self._dirty[log] = None
        self._wakes.set()

    def forget(self, log: EventLog) -> None:
        """Nobody needs the log any more."""
        if self._open.get(log.name) is log:
            del self._open[log.name]

    def wake(self) -> None:
        """Let all that wait for more look again."""
        for log in self._open.values():
            log.wake()

    # The loops.

    async def run(self) -> None:
        """Write, sync and wake, until it is cancelled; then what is pending is written."""
        loops = [
            asyncio.create_task(loop)
            for loop in (self._commits(), self._syncs.run(), self._beats())
        ]
        try:
            await asyncio.gather(*loops)
        finally:
            for one in loops:
                one.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await self.close()

    async def close(self) -> None:
        """Write what is pending; whoever follows a log that has not ended breaks."""
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                while self._dirty or self._rounds:
                    self._begin_round(list(self._dirty))
                    await asyncio.gather(*map(asyncio.shield, self._rounds))
        for log in list(self._open.values()):
            log.close()

    async def _commits(self) -> None:
        while True:
            await self._wakes.wait()
            self._wakes.clear()
            began = self.clock()
            await self._commit()
            took = self.clock() - began
            await asyncio.sleep(max(COMMIT_SECONDS, COMMIT_SHARE * took))

    async def _commit(self) -> None:
        """Write what is pending. Ends go to the disk, which holds nobody else up."""
        endings = [log for log in self._dirty if log.ending]
        if endings and not self._ends:
            self._ends = True
            self._begin_round(endings[:MOST_ENDINGS]).add_done_callback(self._ends_written)
        others = [log for log in self._dirty if not log.ending]
        for at in range(0, len(others), MOST_TOGETHER):
            # A cancellation must not leave it half done.
            await asyncio.shield(self._begin_round(others[at : at + MOST_TOGETHER]))

    def _ends_written(self, _: object) -> None:
        self._ends = False
        self._wakes.set()

    def _begin_round(self, logs: list[EventLog]) -> asyncio.Task[None]:
        for log in logs:
            self._dirty.pop(log, None)
        task = asyncio.create_task(self._write_round(logs))
        self._rounds.add(task)
        task.add_done_callback(self._rounds.discard)
        return task

    async def _write_round(self, logs: list[EventLog]) -> None:
        taken = [(log, write) for log in logs if (write := log.take()) is not None]
        writes = [write for _, write in taken]
        results: Sequence[Exception | None]
        try:
            results = await self.threads.run(log_file.write_all, self.folder, writes)
        except (FolderError, RuntimeError) as error:
            results = [error] * len(writes)
        for (log, write), failure in zip(taken, results, strict=True):
            log.written(write, failure)
            if failure is None and not write.sync:
                self._syncs.add(log.name)
            if log.has_pending:
                self.mark_dirty(log)

    async def _beats(self) -> None:
        while True:
            await self.waited_for.wait()
            await asyncio.sleep(BEAT_SECONDS)
            now = self.clock()
            waited = [log for log in self._open.values() if log.is_waited_for]
            if not waited:
                self.waited_for.clear()
            for log in waited:
                log.beat(now)
            await self._look([log for log in waited if not log.is_written_here])

    async def _look(self, logs: list[EventLog]) -> None:
        """Look for what another process has added to these logs."""
        extents = {log.name: log.extent() for log in logs}
        if not extents:
            return
        try:
            lost = await self.threads.run(log_file.grow_all, self.folder, extents)
        except FolderError:
            return
        for log in logs:
            if log.name in lost:
                log.close()
            elif not log.is_written_here:
                log.grew(extents[log.name])
