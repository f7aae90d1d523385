"""Event logs: the streams of stored responses on the disk, each event there before anyone sees it.

The file of a log holds whole server-sent events, numbered from 0 without gaps. It has its name from
the start and only grows. `scan_log` finds what a crash left of an event; the next write drops it.

All logs of the process are written by one loop, together, some thirty times a second at most: what
one token after another brings takes neither a switch of threads nor a call of the system each. An
event that is written survives the end of the process, and within a second or so also a loss of
power; a terminal event does so before it is seen.

Followers read a log from any position at their own speed. A slow one holds nothing in memory: what
it has not read yet is on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec

from gateway.api import sse
from gateway.api.json_values import JsonObject
from gateway.api.resuming import named_event
from gateway.stored.folder import (
    DISK_SECONDS,
    DiskThreads,
    Folder,
    FolderError,
    write_whole,
)

LOG_KIND = "events"  # what the names of these files begin with
PIECE_BYTES = 256 * 1024  # bytes that are read at once
# Types of the events that end a log; each has one of them at most, its last.
TERMINAL_TYPES = frozenset({"response.completed", "response.incomplete", "response.failed"})

# The beginning of each event.
_HEAD = re.compile(
    rb'(?::[^\n]*\n)*event: ([a-z_.]+)\ndata: \{"type":"[a-z_.]+","sequence_number":(\d+)[,}]'
)


class LogFull(Exception):  # noqa: N818 - said of the log
    """The log may not hold so much."""


class LogEnded(Exception):  # noqa: N818 - said of the log
    """The log has its terminal event already."""


class LogBroken(FolderError):  # noqa: N818 - said of the log
    """The log has no terminal event, and nobody here will write one."""

    def __init__(self) -> None:
        super().__init__("the log is closed without an end", "follow it again from where it broke")


class Extent(NamedTuple):
    """The whole events that a file holds."""

    events: int = 0
    size: int = 0  # bytes of them
    last_offset: int = 0  # where the last one begins
    ended: bool = False  # whether the last one is terminal

    def grown(self, data: bytes) -> Extent:
        """The same with the whole events that follow."""
        count = data.count(b"\n\n")
        if not count:
            return self
        last = data.rfind(b"\n\n", 0, -2) + 2 if count > 1 else 0
        head = _HEAD.match(data, last)
        ended = head is not None and head[1].decode() in TERMINAL_TYPES
        return Extent(self.events + count, self.size + len(data), self.size + last, ended)


NOTHING = Extent()


def create_log(folder: Folder) -> str:
    """Make an empty file, and return its name. Raises: FolderError."""
    file = folder.open_appended(LOG_KIND)
    file.close()
    return file.name


def scan_log(folder: Folder, name: str, known: Extent = NOTHING) -> Extent:
    """What the file holds, up to the first byte that is no whole event with the next number.

    `known`: what it held before. Raises: FileNotFoundError, FolderError.
    """
    extent, rest = known, b""
    with folder.open_to_read(name) as file, folder.translated_errors():
        while piece := os.pread(file.fileno(), PIECE_BYTES, extent.size + len(rest)):
            rest += piece
            if (end := rest.rfind(b"\n\n") + 2) < 2:
                continue
            whole = rest[: _valid_bytes(rest[:end], extent.events)]
            extent = extent.grown(whole)
            if len(whole) < end:
                break
            rest = rest[end:]
    return extent


def scan_logs(folder: Folder, known: Mapping[str, Extent]) -> dict[str, Extent]:
    """What these files hold now, but for those that can't be read."""
    found = {}
    for name, extent in known.items():
        with contextlib.suppress(OSError, FolderError):
            has_grown = folder.path(name).stat().st_size > extent.size
            found[name] = scan_log(folder, name, extent) if has_grown else extent
    return found


def find_event(folder: Folder, name: str, number: int) -> int:
    """Where the event of this number, which is there, begins.

    Raises: FileNotFoundError, FolderError.
    """
    offset = 0
    with folder.open_to_read(name) as file, folder.translated_errors():
        while piece := os.pread(file.fileno(), PIECE_BYTES, offset):
            at = 0
            while number and (end := piece.find(b"\n\n", at) + 2) > 1:
                number, at = number - 1, end
            if not number:
                return offset + at
            offset += at or max(1, len(piece) - 1)  # What ends an event may have come by half.
    return offset


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes that a file gets behind its first `offset` ones."""

    name: str
    offset: int
    data: bytes
    sync: bool = False
    """Whether they are to be on the disk, so that a loss of power does not lose them."""


def write_logs(folder: Folder, writes: list[Write]) -> list[Exception | None]:
    """Write at the ends of the files; returns what went wrong with each.

    After an error the file holds what it held before, or a part of an event behind it.
    """
    results: list[Exception | None] = []
    for one in writes:
        failure: Exception | None = None
        try:
            with folder.descriptor(one.name, os.O_WRONLY) as descriptor:
                if os.fstat(descriptor).st_size == one.offset:
                    write_whole(descriptor, one.data, one.offset, sync=one.sync)
                else:
                    failure = FolderError(
                        f"{folder.path(one.name)} has another size than this process has written",
                        "let one gateway at a time work on a folder's requests",
                    )
        except (FolderError, FileNotFoundError) as error:
            failure = error
        results.append(failure)
    return results


def sync_logs(folder: Folder, names: list[str]) -> None:
    """Bring these files to the disk, as far as they exist. Raises: FolderError."""
    for name in names:
        with (
            contextlib.suppress(FileNotFoundError),
            folder.descriptor(name, os.O_RDONLY) as descriptor,
        ):
            os.fdatasync(descriptor)


def truncate_log(folder: Folder, name: str, size: int) -> None:
    """Cut the file off behind so many bytes. Raises: FileNotFoundError, FolderError."""
    with folder.descriptor(name, os.O_WRONLY) as descriptor:
        os.ftruncate(descriptor, size)
        os.fdatasync(descriptor)


def split_events(data: bytes) -> Iterator[bytes]:
    """The events of whole ones, one by one."""
    start = 0
    while (end := data.find(b"\n\n", start) + 2) > 1:
        yield data[start:end]
        start = end


def event_data(event: bytes) -> JsonObject:
    """The data of an event of a log."""
    value: JsonObject = msgspec.json.decode(event[event.index(b"\ndata: ") + 7 :])
    return value


def _valid_bytes(data: bytes, first_number: int) -> int:
    """Bytes of these whole events up to the first that has not the next number."""
    end = 0
    for number, event in enumerate(split_events(data), first_number):
        head = _HEAD.match(event)
        if head is None or int(head[2]) != number:
            break
        end += len(event)
    return end


SYNC_SECONDS = 1.0  # least seconds between two rounds
COMMIT_SECONDS = 0.03  # least seconds between two rounds of writing
# After a round the loop rests for so many times its duration: the disk is not kept busy.
COMMIT_SHARE = 2.0
BEAT_SECONDS = 0.25  # between two looks at those who wait
SILENCE_SECONDS = 15.0  # after so long without an event a follower gets a comment
# Bytes of one log that wait to be written; then whoever brings more waits.
MOST_PENDING_BYTES = 64 * 1024
READ_BYTES = 64 * 1024  # bytes that a follower gets at once
MOST_TOGETHER = 128  # logs of one round: their followers wake together
# Most seconds to wait for what was appended: a round under way, and the next one.
FLUSH_SECONDS = 2 * DISK_SECONDS
CLOSE_SECONDS = 3.0  # most seconds to write what is pending, at the end


@dataclass(slots=True, weakref_slot=True, eq=False)
class ResponseLog:
    """One log. `ResponseLogs` makes it and writes it, as long as somebody has it.

    Events are numbered from 0 in the order of `append`.
    """

    name: str  # of its file
    _logs: ResponseLogs
    extent: Extent  # what is written: followers may see these events
    writers: int = 0  # those in this process that write it
    next_number: int = 0  # of the next event
    pending: list[bytes] = field(default_factory=list)
    _pending_bytes: int = 0
    ending: bool = False  # whether its terminal event has been appended
    _failure: Exception | None = None  # why nothing more can be written
    _writing: bool = False
    _rounds: list[asyncio.Future[None]] = field(default_factory=list)
    """Those who wait until what is pending has been written."""
    waiters: dict[asyncio.Future[bytes | None], float] = field(default_factory=dict)
    """Followers that have all that is written and wait for more, and since when."""
    _closed: bool = False

    @property
    def size(self) -> int:
        """Bytes of the written events."""
        return self.extent.size

    @property
    def ended(self) -> bool:
        """Whether the terminal event is written."""
        return self.extent.ended

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
        encoded, number = [comment], self.next_number
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise LogBroken
        if self.ending:
            raise LogEnded
        if not self.writers:
            raise ValueError("the log was opened to be read")
        for value in values:
            fields = {"type": value["type"], "sequence_number": number} | value
            fields["sequence_number"] = number
            encoded.append(named_event(fields))
            number += 1
        data = b"".join(encoded)
        is_last = bool(values) and values[-1]["type"] in TERMINAL_TYPES
        most = self._logs.most_bytes()
        if not is_last and self.extent.size + self._pending_bytes + len(data) > most:
            raise LogFull(f"The response takes more than {most} bytes (limits.response_bytes).")
        self.next_number, self.ending = number, is_last
        self.pending.append(data)
        self._pending_bytes += len(data)
        self._logs.mark_dirty(self)
        if self._pending_bytes > MOST_PENDING_BYTES and not is_last:
            await self.flush()

    async def flush(self) -> None:
        """Return when all that was appended is written, and on the disk if it has ended.

        Raises: FolderError.
        """
        while self.pending or self._writing:
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

    # Reading.

    async def read(self, offset: int) -> bytes:
        """Written bytes from there on, at most about `READ_BYTES`; empty: there are none yet.

        Raises: FolderError, FileNotFoundError.
        """
        length, logs = min(READ_BYTES, self.extent.size - offset), self._logs
        if length <= 0:
            return b""
        return await logs.threads.run(logs.folder.read, self.name, offset, length)

    async def find(self, number: int) -> int | None:
        """Where the event of this number begins; None: it is not written yet.

        Raises: FolderError, FileNotFoundError.
        """
        extent, logs = self.extent, self._logs
        if number >= extent.events:
            return extent.size if number == extent.events else None
        if number <= 0:
            return 0
        return await logs.threads.run(find_event, logs.folder, self.name, number)

    async def wait(self, offset: int) -> bytes | None:
        """Wait for bytes behind `offset`; None: there was silence for `SILENCE_SECONDS`.

        Returns what was written then, or nothing if it is to be read, has ended or broken.
        """
        if offset < self.extent.size or self.ended or self.broken:
            return b""
        changed: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self.waiters[changed] = self._logs.clock()
        self._logs.waited_for.set()
        try:
            return await changed
        finally:
            self.waiters.pop(changed, None)

    async def last_event(self) -> JsonObject | None:
        """The data of the last written event; None: there is none.

        Raises: FolderError, FileNotFoundError.
        """
        extent, logs = self.extent, self._logs
        if not extent.events:
            return None
        length = extent.size - extent.last_offset
        return event_data(
            await logs.threads.run(logs.folder.read, self.name, extent.last_offset, length)
        )

    async def events(self, first: int = 0) -> AsyncGenerator[bytes, None]:
        """All written events from this number on, in pieces of whole ones.

        Raises: FolderError, FileNotFoundError.
        """
        offset, rest = await self.find(first), b""
        while offset is not None and (piece := await self.read(offset)):
            offset += len(piece)
            rest += piece
            if (end := rest.rfind(b"\n\n") + 2) > 1:
                yield rest[:end]
                rest = rest[end:]

    async def stop_writing(self) -> None:
        """This process goes on with it no more; another may. Raises: FolderError."""
        try:
            await self.flush()
        finally:
            self.writers -= 1

    # For `ResponseLogs`.

    def begin_writing(self, events: int) -> None:
        """This process writes it from now on; it holds so many events."""
        if not self.writers:
            self.next_number, self.ending = events, self.extent.ended
        self.writers += 1

    def take(self) -> Write | None:
        """What is to be written now, if anything is and nothing is being written."""
        if self._writing or not self.pending or self._failure is not None:
            return None
        data, self.pending, self._writing = b"".join(self.pending), [], True
        return Write(self.name, self.extent.size, data, sync=self.ending)

    def written(self, write: Write, failure: Exception | None) -> None:
        """That was written, or not."""
        self._writing = False
        self._pending_bytes -= len(write.data)
        if failure is not None:
            self.fail(failure)
            return
        self.extent = self.extent.grown(write.data)
        self.wake(write.data)
        if not self.pending:
            self._end_round()

    def fail(self, failure: Exception) -> None:
        """Nothing more can be written."""
        self._failure = self._failure or failure
        self.pending.clear()
        self._pending_bytes = 0
        self.wake()
        self._end_round()

    def grew(self, extent: Extent) -> None:
        """Another process has written to it."""
        if extent.size > self.extent.size:
            self.extent = extent
            self.wake()

    def beat(self, now: float) -> None:
        """Wake those that have had nothing for long."""
        for waiter, since in self.waiters.items():
            if now - since >= SILENCE_SECONDS and not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Nothing more will be written or waited for in this process."""
        self._closed = True
        self.wake()
        self._end_round()

    def wake(self, data: bytes = b"") -> None:
        """Let those that wait look again, or give them what was written."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(data)

    def _end_round(self) -> None:
        rounds, self._rounds = self._rounds, []
        for waiter in rounds:
            if not waiter.done():
                waiter.set_result(None)


@dataclass(slots=True, eq=False)
class ResponseLogs:
    """All logs of one folder that are open in this process.

    `most_bytes` gives the largest size of a log. `run` must run while logs are written or followed.
    """

    folder: Folder
    threads: DiskThreads
    most_bytes: Callable[[], int]
    clock: Callable[[], float] = time.monotonic
    _open: WeakValueDictionary[str, ResponseLog] = field(default_factory=WeakValueDictionary)
    _opening: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    _dirty: dict[ResponseLog, None] = field(default_factory=dict)
    _wakes: asyncio.Event = field(default_factory=asyncio.Event)
    _end_wakes: asyncio.Event = field(default_factory=asyncio.Event)
    waited_for: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while somebody waits for more of a log."""
    _unsynced: set[str] = field(default_factory=set)
    """Logs that were written since they were last brought to the disk."""
    _written: asyncio.Event = field(default_factory=asyncio.Event)
    _is_cut: bool = False
    _rounds: set[asyncio.Task[None]] = field(default_factory=set)
    """Rounds of writing under way: one of logs that end, one of others."""
    _closed: bool = False

    async def create(self) -> ResponseLog:
        """A new log, which this process writes. Raises: FolderError."""
        name = await self.threads.run(create_log, self.folder)
        log = ResponseLog(name, self, NOTHING)
        log.begin_writing(0)
        self._open[name] = log
        if self._closed:
            log.close()
        return log

    async def open(self, name: str, *, to_write: bool = False) -> ResponseLog:
        """The log of this name; `to_write`: this process goes on with it, nobody else does.

        Raises: FileNotFoundError, FolderError.
        """
        async with self._opening.setdefault(name, asyncio.Lock()):
            log = self._open.get(name)
            if log is not None and not log.writers:
                await self._look([log])
            if log is None or log.broken:
                extent = await self.threads.run(scan_log, self.folder, name)
                log = self._open[name] = ResponseLog(name, self, extent)
            if to_write:
                extent = log.extent
                if not log.writers:
                    # What a crash left of an event would be in the way.
                    await self.threads.run(truncate_log, self.folder, name, extent.size)
                log.begin_writing(extent.events)
            if self._closed:
                log.close()
            return log

    async def delete(self, name: str) -> None:
        """Remove the file; if it is a log, those who follow it break. Raises: FolderError."""
        log = self._open.get(name)
        if log is not None:
            log.fail(LogBroken())
            log.close()
        await self.threads.run(self.folder.delete, name)

    def mark_dirty(self, log: ResponseLog) -> None:
        """The log has something to be written."""
        self._dirty[log] = None
        (self._end_wakes if log.ending else self._wakes).set()

    # Followers: any number of each log, of which none slows the log or the others.

    def cut(self) -> None:
        """Break those that follow a log which has not ended; they may come again elsewhere."""
        self._is_cut = True
        for log in list(self._open.values()):
            log.wake()

    async def follow(
        self, name: str, after: int = -1, *, can_return: bool = True
    ) -> AsyncGenerator[bytes, None]:
        """The events of this log with higher numbers than `after`, then those to come.

        Pieces may end within an event. It ends behind the terminal event; a comment comes when
        nothing has for long. Raises: LogBroken, if nothing more will come without a terminal event:
        then break the connection, since its polite end would read as a complete response;
        FileNotFoundError, FolderError. `can_return`: `cut` breaks it, as it may follow again.
        """
        log = await self.open(name)
        offset: int | None = None
        while True:
            if offset is None:
                offset = await log.find(after + 1)
            if can_return and self._is_cut and not log.ended:
                raise LogBroken
            if offset is not None and (piece := await log.read(offset)):
                offset += len(piece)
                yield piece
            elif log.ended:
                return
            elif log.broken:
                raise LogBroken
            elif (new := await log.wait(log.size if offset is None else offset)) is None:
                yield sse.HEARTBEAT
            elif new and offset is not None:
                offset += len(new)
                yield new

    # The loops.

    async def run(self) -> None:
        """Write, sync and wake, until it is cancelled; then what is pending is written."""
        # Ends go to the disk, which holds nobody else up.
        works = (
            self._commits(self._wakes, ending=False), self._commits(self._end_wakes, ending=True),
            self._sync(), self._beats(),
        )  # fmt: skip
        loops = [asyncio.create_task(work) for work in works]
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

    async def _commits(self, wakes: asyncio.Event, *, ending: bool) -> None:
        """Write what is pending of logs that end, or of the others."""
        while True:
            await wakes.wait()
            wakes.clear()
            began = self.clock()
            await self._commit(ending=ending)
            took = self.clock() - began
            await asyncio.sleep(max(COMMIT_SECONDS, COMMIT_SHARE * took))

    async def _commit(self, *, ending: bool) -> None:
        logs = [log for log in self._dirty if log.ending is ending]
        for at in range(0, len(logs), MOST_TOGETHER):
            # A cancellation must not leave it half done.
            await asyncio.shield(self._begin_round(logs[at : at + MOST_TOGETHER]))

    def _begin_round(self, logs: list[ResponseLog]) -> asyncio.Task[None]:
        for log in logs:
            self._dirty.pop(log, None)
        task = asyncio.create_task(self._write_round(logs))
        self._rounds.add(task)
        task.add_done_callback(self._rounds.discard)
        return task

    async def _write_round(self, logs: list[ResponseLog]) -> None:
        taken = [(log, write) for log in logs if (write := log.take()) is not None]
        writes = [write for _, write in taken]
        results: Sequence[Exception | None]
        try:
            results = await self.threads.run(write_logs, self.folder, writes)
        except (FolderError, RuntimeError) as error:
            results = [error] * len(writes)
        for (log, write), failure in zip(taken, results, strict=True):
            log.written(write, failure)
            if failure is None and not write.sync:
                self._unsynced.add(log.name)
                self._written.set()
            if log.pending:
                self.mark_dirty(log)

    async def _sync(self) -> None:
        """Bring what was written to the disk, together."""
        while True:
            await self._written.wait()
            await asyncio.sleep(SYNC_SECONDS)
            self._written.clear()
            names, self._unsynced = sorted(self._unsynced), set()
            with contextlib.suppress(FolderError):
                await self.threads.run(sync_logs, self.folder, names)

    async def _beats(self) -> None:
        while True:
            await self.waited_for.wait()
            await asyncio.sleep(BEAT_SECONDS)
            await self._beat()  # on its own: a variable here would keep its last logs open

    async def _beat(self) -> None:
        now = self.clock()
        waited = [log for log in list(self._open.values()) if log.waiters]
        if not waited:
            self.waited_for.clear()
        for log in waited:
            log.beat(now)
        await self._look([log for log in waited if not log.writers])

    async def _look(self, logs: list[ResponseLog]) -> None:
        """Look for what another process has added to these logs."""
        if not logs:
            return
        known = {log.name: log.extent for log in logs}
        try:
            found = await self.threads.run(scan_logs, self.folder, known)
        except FolderError:
            return
        for log in logs:
            if log.name not in found:
                log.close()
            elif not log.writers:
                log.grew(found[log.name])
