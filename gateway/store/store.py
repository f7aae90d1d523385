"""The store's thread: it alone has the connection, and does one job after the other.

A job is a function of the connection. It runs in a transaction of its own, off the event loop, and
its caller waits for a limited time. If the store fails, jobs fail at once with a `StoreError` until
it is open again; callers keep what they have to write, and try again. A job may have been done
although its caller got `StoreUnavailable`, so jobs that write must be idempotent: rows have ids,
and nothing is added to a sum twice.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import socket
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, TypeVar

import structlog
from sqlalchemy import Connection

from gateway.store import database
from gateway.store.database import Program, SqliteFiles, StoreLocation
from gateway.store.failures import (
    StoreError,
    StoreGone,
    StoreReadOnly,
    StoreUnavailable,
    store_error,
)

T = TypeVar("T")
MOST_JOBS = 1000  # jobs that may wait; further ones fail at once
JOB_SECONDS = 10.0  # seconds that a caller waits for its job, unless it says otherwise
# Seconds without a job after which the thread looks whether the store is still there.
CHECK_SECONDS = 5.0
# Seconds between the first attempts to open the store; each further pause is twice as long.
FIRST_PAUSE = 0.1
LOOK_SECONDS = 0.25  # seconds between two looks whether another process has changed the store
LONGEST_PAUSE = 5.0  # most seconds between two attempts to open the store, or to do a failed pass
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The store as `/admin/status` shows it."""

    url: str  # its password masked
    state: str  # `opening`, `up`, `closed`, or a `StoreError`'s state
    since: float  # Unix seconds since when it is in that state
    error: str | None
    remedy: str | None
    level: int | None  # the level of its tables; None: never opened
    waiting: int  # jobs that wait

    @property
    def up(self) -> bool:
        """Whether it can be read and written."""
        return self.state == "up"


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    work: Callable[[Connection], T]
    write: bool
    seconds: float  # how long its caller waits
    done: concurrent.futures.Future[T] = field(default_factory=concurrent.futures.Future)


@dataclass(eq=False)
class Store:
    """A store, opened by its own thread after `start`.

    `clock` is monotonic, `now` gives Unix seconds. `on_change` is called on that thread when the
    store fails, or is open again.
    """

    location: StoreLocation
    _: KW_ONLY
    program: Program = database.THIS_PROGRAM
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    most_jobs: int = MOST_JOBS
    check_seconds: float = CHECK_SECONDS
    look_seconds: float = LOOK_SECONDS
    on_change: Callable[[StoreStatus], None] | None = None

    def __post_init__(self) -> None:
        self._jobs: queue.Queue[_Job[Any] | None] = queue.Queue(self.most_jobs)
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)
        # A thread that hangs in the driver must not keep the process alive, hence `daemon`.
        self._tried: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done when the store was tried to be opened for the first time."""
        self._connection: Connection | None = None
        self._files: SqliteFiles | None = None  # SQLite's files that are, or were last, open
        self._seen = False
        """Whether this process has had the store open: then a missing file is not made anew."""
        self._level: int | None = None
        self._problem: StoreError | None = None
        self._pause = FIRST_PAUSE
        self._check_at = 0.0  # when the store is opened anew, or else looked at if there was no job
        self._look_at = 0.0  # when it is looked whether others have changed the store
        self._version: int | None = None  # the database's number of changes by others, as last seen
        self.changes = 0
        """Has grown when there may be something new in the store: another process has committed, or
        the store has failed or is open again. On PostgreSQL, which does not tell, it grows always.
        """
        self._closing = False
        self._state = "opening"
        self._since = self.now()
        self._link = DatabaseLink(self.clock)

    # For callers, on any thread.

    def start(self) -> None:
        """Start the thread, which opens the store."""
        self._thread.start()

    async def wait_opened(self, seconds: float) -> bool:
        """Wait for the first attempt to open the store; returns whether it is open."""
        await asyncio.wait([asyncio.wrap_future(self._tried)], timeout=seconds)
        return self._state == "up"

    async def run(
        self, job: Callable[[Connection], T], *, write: bool = True, seconds: float = JOB_SECONDS
    ) -> T:
        """Do the job in a transaction, and return its result.

        Raises: StoreError, or the job's own error. `write` False: the job only reads, and waits for
        no other process that writes.
        """
        waiting = self._submit(job, write, seconds)
        done = asyncio.wrap_future(waiting)
        # Nobody may be left to ask for its error.
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        try:
            async with asyncio.timeout(seconds):
                return await done
        except TimeoutError:
            raise self._too_slow(waiting, seconds) from None

    def run_now(
        self, job: Callable[[Connection], T], *, write: bool = True, seconds: float = JOB_SECONDS
    ) -> T:
        """Like `run`, for commands: block until the job is done."""
        waiting = self._submit(job, write, seconds)
        try:
            return waiting.result(seconds)
        except concurrent.futures.TimeoutError:
            raise self._too_slow(waiting, seconds) from None

    def status(self) -> StoreStatus:
        """The store's state now."""
        problem = self._problem
        state, since = self._state, self._since
        if silent := self._link.overdue():
            problem, state, since = self._silence(silent), "unavailable", self.now() - silent
        error, remedy = (problem.message, problem.remedy) if problem else (None, None)
        waiting = self._jobs.qsize()
        return StoreStatus(self.location.shown, state, since, error, remedy, self._level, waiting)

    def close(self, seconds: float) -> bool:
        """Do what waits and close the store, within the time; returns whether that was possible."""
        self._closing = True
        if self._thread.is_alive():
            # A full queue wakes the thread as well.
            with contextlib.suppress(queue.Full):
                self._jobs.put_nowait(None)
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._link.cut()
                return False
        return True

    async def aclose(self, seconds: float) -> bool:
        """Like `close`, beside the event loop."""
        return await asyncio.to_thread(self.close, seconds)

    def _submit(
        self,
        work: Callable[[Connection], T],
        write: bool,  # noqa: FBT001 - as `run` has it
        seconds: float,
    ) -> concurrent.futures.Future[T]:
        if self._closing:
            raise StoreUnavailable("the store is closed", "start the gateway again")
        if silent := self._link.overdue():
            self._link.cut()
            raise self._silence(silent)
        if (problem := self._problem) is not None and self._connection is None:
            # Not after the thread's next attempt to open it, which may take seconds.
            raise problem.copy()
        job = _Job(work, write, seconds)
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise StoreUnavailable(
                f"{self._jobs.maxsize} jobs wait for the store already",
                "see in /admin/status why it is slow",
            ) from None
        return job.done

    def _too_slow(self, waiting: concurrent.futures.Future[Any], seconds: float) -> StoreError:
        # If it has not begun, it never will; if it runs, nobody needs it any more.
        if not waiting.cancel() and waiting.running():
            self._link.cut()
        return self._silence(seconds)

    def _silence(self, seconds: float) -> StoreError:
        how_long = f"has not answered for {seconds:.0f} s" if seconds >= 1 else "does not answer"
        return StoreUnavailable(
            f"the store {how_long}", "see whether its disk, or its server, is stopped or overloaded"
        )

    # On the store's thread.

    def _work(self) -> None:
        path = self.location.path
        if path is not None:
            with contextlib.suppress(OSError):
                database.act_as_owner(path)
        self._open()
        self._tried.set_result(None)
        while not (self._closing and self._jobs.empty()):
            with contextlib.suppress(queue.Empty):
                next_at = min(self._check_at, self._look_at)
                job = self._jobs.get(timeout=max(0.001, next_at - self.clock()))
                if job is not None and job.done.set_running_or_notify_cancel():
                    self._do(job)
            now = self.clock()
            if now >= self._look_at:
                self._look_at = now + self.look_seconds
                self._look()
            if now >= self._check_at and not self._closing:
                self._check()
        if self._connection is not None:
            database.disconnect(self._connection)
            self._link.release()
        self._set_state("closed", None)

    def _look(self) -> None:
        """Notice what other processes have committed, and that the file is gone."""
        connection = self._connection
        if connection is None:
            return
        if self._files is not None and not self._files.are_in_place():
            self._check_at = self.clock()
            return
        self._link.begin(JOB_SECONDS)
        try:
            version = database.data_version(connection)
        except Exception:  # noqa: BLE001 - the next job meets the same error, and tells it
            version = None
        finally:
            self._link.end()
        if version is None or version != self._version:
            self._version = version
            self.changes += 1

    def _check(self) -> None:
        """Open the store if it is not, else look whether it is still what it was."""
        if self._connection is None:
            self._open()
            return
        # Whether it can be written again is tried, even if nobody has anything to write.
        self._check_at = self.clock() + self.check_seconds
        if self._problem is None:
            self._attempt(lambda _: None, write=False)  # the level is read for every job
        else:
            self._attempt(database.try_write, write=True)

    def _do(self, job: _Job[Any]) -> None:
        if self._connection is None:
            assert self._problem is not None
            job.done.set_exception(self._problem.copy())
            return
        try:
            result = self._attempt(job.work, write=job.write, seconds=job.seconds, raises=True)
        except Exception as error:  # noqa: BLE001 - the job's caller gets it
            job.done.set_exception(error)
        else:
            job.done.set_result(result)

    def _attempt(
        self,
        work: Callable[[Connection], T],
        *,
        write: bool,
        seconds: float = JOB_SECONDS,
        raises: bool = False,
    ) -> T | None:
        """Do work in a transaction, and draw the conclusions from an error."""
        connection = self._connection
        assert connection is not None
        self._link.begin(seconds)
        try:
            self._check_file()
            with database.transaction(connection, write=write, seconds=seconds):
                self._level = database.check_level(connection, self.program)
                result = work(connection)
        except Exception as error:
            problem = store_error(error)
            if problem is None:
                if raises:
                    raise
                problem = StoreUnavailable(str(error), "report this as a fault of the program")
            self._failed(problem)
            if raises:
                raise problem.copy() from None
            return None
        finally:
            self._link.end()
        if write or self._problem is None:
            self._check_at = self.clock() + self.check_seconds
            self._set_state("up", None)
        return result

    def _check_file(self) -> None:
        """Raises: StoreGone if the open file is no more what its path leads to."""
        if self._files is not None and not self._files.are_in_place():
            raise StoreGone(
                f"{self._files.path} is gone, or another file",
                "put it back, or restart the gateway; a store in its place is opened",
            )

    def _open(self) -> None:
        try:
            self._connection = self._opened()
        except Exception as error:  # noqa: BLE001 - whatever it is, the thread goes on
            problem = store_error(error)
            if problem is None and isinstance(error, OSError):
                problem = _file_problem(error)
            if problem is None:
                problem = StoreUnavailable(f"{type(error).__name__}: {error}", "report this")
            self._failed(problem)
            return
        self._seen = True
        self._pause = FIRST_PAUSE
        self._check_at = self.clock() + self.check_seconds
        self._attempt(database.try_write, write=True)

    def _opened(self) -> Connection:
        path = self.location.path
        if self._files is not None:
            is_empty = True
            with contextlib.suppress(FileNotFoundError):
                is_empty = not self._files.path.stat().st_size
            if is_empty:
                raise StoreGone(f"{path} is gone, or empty", "put it back, or restart the gateway")
            self._files.remove_stale_log()
        self._link.begin(JOB_SECONDS)
        connection = None
        try:
            connection = database.connect(self.location, self._link.hold)
            with database.transaction(connection, write=False):
                level = database.store_level(connection)
            # A store that was in use and has lost its tables is refused below.
            if level is None and not self._seen:
                level = 0
            if level is not None and level < self.program.level:
                self._link.end()
                with database.transaction(connection):
                    database.make_tables(connection, self.program, self.now())
            with database.transaction(connection, write=False):
                self._level = database.check_level(connection, self.program)
            if path is not None:
                self._files = SqliteFiles(path)
        except BaseException:
            if connection is not None:
                database.disconnect(connection)
            self._link.release()
            raise
        finally:
            self._link.end()
        return connection

    def _failed(self, problem: StoreError) -> None:
        if problem.ends_connection or self._connection is None:
            if self._connection is not None:
                if isinstance(problem, StoreGone):
                    database.empty_log(self._connection)
                database.disconnect(self._connection)
                self._connection = None
                self._link.release()
            self._check_at = self.clock() + self._pause
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
        self._set_state(problem.state, problem)

    def _set_state(self, state: str, problem: StoreError | None) -> None:
        self._problem = problem
        if state != self._state:
            self.changes += 1
            self._state, self._since = state, self.now()
            if self.on_change is not None:
                self.on_change(self.status())


def log_store_change(status: StoreStatus) -> None:
    """Write a line into the log: the store has failed, is open again, or is closed."""
    if status.error is not None:
        log.warning("the store fails", store=status.url, why=status.error, remedy=status.remedy)
    elif status.up:
        log.info("the store is open", store=status.url, schema_level=status.level)


class DatabaseLink:
    """The way to the database that a job is on, so that others can see how long, and cut it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._sqlite: sqlite3.Connection | None = None
        self._began = 0.0
        self._due: float | None = None
        """When the database must have answered; None: nobody waits for it."""

    def hold(self, made: Any) -> None:
        """This is the driver's new connection."""
        with self._lock:
            if isinstance(made, sqlite3.Connection):
                self._sqlite = made
            else:
                # A descriptor of its own: the driver's may be another file's at the time of a cut.
                self._socket = socket.socket(fileno=os.dup(made.fileno()))

    def release(self) -> None:
        """The driver's connection is closed."""
        with self._lock:
            self._sqlite = None
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def begin(self, seconds: float) -> None:
        """The thread begins to wait for the database, for so long at most."""
        self._began = self._clock()
        self._due = self._began + seconds

    def end(self) -> None:
        """The database has answered, or may take its time."""
        self._due = None

    def overdue(self) -> float:
        """Seconds for which the thread has been waiting, if those are too many; else 0."""
        due, now = self._due, self._clock()
        return 0.0 if due is None or now < due else now - self._began

    def cut(self) -> None:
        """Let the thread's wait end with an error."""
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            elif self._sqlite is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._sqlite.interrupt()


def _file_problem(error: OSError) -> StoreError:
    message = f"{error.filename}: {error.strerror}"
    if isinstance(error, PermissionError) or error.errno == 30:
        return StoreReadOnly(message, "let the gateway's user write the file and its folder")
    return StoreUnavailable(message, "make its folder, and let the gateway's user write into it")


async def woken(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until the event is set, for so many seconds at most, and clear it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    event.clear()


@dataclass(eq=False)
class StoreWorker:
    """Does work that is due again and again, pass by pass, on a store that may be away.

    Its owner runs `run` in a task, and cancels and awaits it. A pass that raises StoreError has met
    a store that is away. It is told of once, until a pass succeeds again, and the next passes
    follow at growing distances. So a pass must keep what it has not written, and be one that can be
    done twice.

    `period`: seconds from the beginning of a pass to that of the next. `first`: seconds until the
    first pass, in place of a period. `longest_pause`: seconds until a pass that failed is tried
    again, at most, unless `period` is longer. `on_away` is told, once for each time that the store
    is away, why; the store itself has a line in the log. `clock` is monotonic; by default it is the
    event loop's.
    """

    one_pass: Callable[[], Awaitable[object]]
    period: float
    first: float | None = None
    longest_pause: float = LONGEST_PAUSE
    on_away: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = lambda: asyncio.get_running_loop().time()
    problem: str | None = None  # why the last pass failed; None: it did not
    failures: int = 0  # passes that failed
    due: float | None = None
    """When the pass that is under way, or else the next, was to begin, by `clock`; None: `run` has
    not begun."""
    _pause: float = 0.0
    _woken: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Work until cancelled."""
        self.due = due = self.clock() + (self.period if self.first is None else self.first)
        while True:
            if (seconds := due - self.clock()) > 0:
                await woken(self._woken, seconds)
            else:
                self._woken.clear()
            began = self.clock()
            due = began + self.period if await self.attempt() else self.clock() + self._pause
            self.due = due

    async def attempt(self) -> bool:
        """Do one pass now; returns whether the store took it."""
        try:
            await self.one_pass()
        except StoreError as error:
            self.failed(str(error))
            return False
        self.succeeded()
        return True

    async def attempt_within(self, seconds: float, work: Callable[[], Awaitable[object]]) -> None:
        """Do what comes before the first pass; a store that takes longer is away."""
        try:
            async with asyncio.timeout(seconds):
                await work()
        except StoreError as error:
            self.failed(str(error))
        except TimeoutError:
            self.failed("the store has not answered yet")

    def wake(self) -> None:
        """Do the next pass at once, unless the store is away."""
        if self.problem is None:
            self._woken.set()

    def failed(self, why: str) -> None:
        """The store is away."""
        if self.problem is None:
            self._pause = self.period
            self.on_away(why)
        else:
            self._pause = min(2 * self._pause, max(self.longest_pause, self.period))
        self.problem = why
        self.failures += 1

    def succeeded(self) -> None:
        """The store has taken all of a pass."""
        self.problem = None
