"""Measures the turns of a process's event loops, and notices waits in them.

A turn is what a loop does between two looks for what is ready: so long everybody else waits. It is
measured in CPU time of the loop's own thread, since a busy machine makes the clock run on. Plain
asyncio is measured exactly, at each turn. uvloop has no such place: where its thread was busy for
some milliseconds, a callback is scheduled, and what the thread takes until it runs is a turn, or
the end of one and the next. That is less than the turn by `INTERVAL` at most. Where only turns are
watched, as by a benchmark, the callbacks follow each other while the loop is busy: then all turns
but the first are measured exactly, and nothing slows down what is measured.

In the process of tests only the gateway's own part of a turn counts, by samples of the stack: a
test's own work, its emulated nodes and its garbage are no part of it. In a gateway's process
everything counts.

The second watch is for calls that may wait: files, locks, names, processes, imports. Python tells
most of them itself (`sys.addaudithook`). Each place in the gateway is told once.

This module stands alone: a gateway's process imports it by its bare name.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import linecache
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

SHOWN_SECONDS = float(os.environ.get("LOOP_WATCH_SECONDS", "0.020"))
"""CPU time of a turn that is recorded."""

INTERVAL = 0.010
"""Seconds between two samples."""

BUSY_SECONDS = 0.003
"""CPU time within an interval, from which on a loop of uvloop may be in a long turn."""

ROOT = str(Path(__file__).resolve().parents[2]) + os.sep

WAITS = frozenset(
    {
        "fcntl.flock", "fcntl.lockf", "glob.glob", "import", "open", "os.chmod", "os.fork",
        "os.link", "os.listdir", "os.mkdir", "os.posix_spawn", "os.remove", "os.rename", "os.rmdir",
        "os.scandir", "os.symlink", "os.system", "os.truncate", "shutil.copyfile", "shutil.rmtree",
        "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "sqlite3.connect",
        "subprocess.Popen", "time.sleep",
    }
)  # fmt: skip
"""Events of Python's audit that may wait for a disk, another process or a network."""


@dataclass(slots=True)
class Record:
    """A turn that took long, or a call that may wait."""

    kind: str
    """`turn`, or the event of a call."""
    cpu: float
    """Seconds; in a test's process those of the gateway."""
    wall: float
    collecting: float
    """Seconds of CPU time that garbage collections took of it."""
    stack: list[str]
    """`file:function:line` of the code here, the innermost first; most of the turn was there."""

    @property
    def place(self) -> str:
        """Where it was: file and function."""
        return self.stack[0].rpartition(":")[0] if self.stack else "?"


Report = Callable[[Record], None]


@dataclass(slots=True)
class _Loop:
    """A loop that runs, of this thread."""

    report: Report
    whole: bool
    """Whether all of its work counts."""
    clock: int
    beat: Callable[[], object] | None
    """Schedules `end_turn` on a loop of uvloop."""
    began: float = 0.0
    wall: float = 0.0
    sampled_at: float = 0.0
    collecting: float = 0.0
    beating: bool = False
    each_turn: bool = False  # whether the next turn is measured, too, while the loop is busy
    samples: list[tuple[float, list[str]]] = field(default_factory=list)
    """CPU time since the sample before, and the stack."""

    def begin_turn(self) -> None:
        self.collecting = 0.0
        self.samples = []
        self.wall = time.monotonic()
        self.began = self.sampled_at = time.thread_time()

    def end_turn(self) -> None:
        cpu = time.thread_time() - self.began
        self.beating = False
        if cpu >= SHOWN_SECONDS:
            self._tell(cpu)
        if self.each_turn and self.beat is not None and cpu >= BUSY_SECONDS:
            self.begin_turn()
            self.beating = True
            self.beat()

    def _tell(self, cpu: float) -> None:
        collecting, samples = self.collecting, self.samples
        if not self.whole:
            samples = [one for one in samples if one[1] and one[1][0].startswith("gateway")]
            cpu = min(cpu, sum(weight for weight, _ in samples)) - collecting
        if cpu >= SHOWN_SECONDS:
            weights: Counter[str] = Counter()
            for weight, stack in samples:
                weights[stack[0].rpartition(":")[0] if stack else ""] += weight  # type: ignore[assignment]
            most = weights.most_common(1)[0][0] if weights else ""
            found = (stack for _, stack in samples if stack and stack[0].startswith(most))
            wall = time.monotonic() - self.wall
            self.report(Record("turn", cpu, wall, collecting, next(found, [])))

    def sample(self, thread: int) -> None:
        """Look at the loop from another thread."""
        cpu = time.clock_gettime(self.clock)
        taken = cpu - self.sampled_at
        if self.beat is not None and not self.beating:
            self.sampled_at = cpu
            if taken >= BUSY_SECONDS:
                self.samples, self.collecting, self.beating = [], 0.0, True
                self.began, self.wall = cpu, time.monotonic()
                self.beat()
        elif taken >= BUSY_SECONDS:
            self.sampled_at = cpu
            self.samples.append((taken, _own(_frame_of(thread))))


def _frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread.

    CPython before 3.11.5 takes a lock to list them: a garbage collection meanwhile may want that
    lock too, and the process stands still (python/cpython#106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if collects:
            gc.enable()


RUNNER = "gateway/app/event_loop.py:run_event_loop"
"""Below all callbacks of a gateway's process: as the innermost, it ends the loop's threads."""

_AWAITED = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_loops: dict[int, _Loop] = {}
"""By thread."""

_waits_seen: set[tuple[str, str]] = set()


def begin(report: Report, *, whole: bool = True, turns_only: bool = False) -> None:
    """Watch all loops that this process runs from now on; `whole`: as `_Loop.whole`.

    `turns_only`: no calls that may wait, but each turn of a busy loop.
    """
    import uvloop

    class WatchedLoop(uvloop.Loop):
        def run_forever(self) -> None:
            thread = threading.get_ident()
            watched = _Loop(report, whole, time.pthread_getcpuclockid(thread), None)
            watched.beat = partial(self.call_soon_threadsafe, watched.end_turn)
            watched.each_turn = turns_only
            _run(watched, thread, super().run_forever)

    def run_forever(self: asyncio.BaseEventLoop) -> None:
        thread = threading.get_ident()
        watched = _Loop(report, whole, time.pthread_getcpuclockid(thread), None)
        turn = type(self)._run_once  # type: ignore[attr-defined]

        def run_once() -> None:
            watched.begin_turn()
            turn(self)
            watched.end_turn()

        self._run_once = run_once  # type: ignore[attr-defined]
        _run(watched, thread, partial(plain, self))

    plain = asyncio.BaseEventLoop.run_forever
    asyncio.BaseEventLoop.run_forever = run_forever  # type: ignore[method-assign]
    uvloop.Loop = WatchedLoop  # type: ignore[misc]
    gc.callbacks.append(_on_collection)
    threading.Thread(target=_sample, name="loop watch", daemon=True).start()
    if turns_only:
        return
    sys.addaudithook(partial(_on_event, report))
    threading.Lock = partial(_new_lock, report)  # type: ignore[assignment]
    told: list[tuple[object, str]] = [(os, "fsync"), (os, "fdatasync")]
    told += [(threading.Condition, "wait"), (threading.Thread, "join")]
    for owner, name in told:
        setattr(owner, name, _told(report, name, getattr(owner, name)))


class _Lock:
    """A lock of the gateway, which tells when a loop must wait for it."""

    def __init__(self, report: Report) -> None:
        self._lock = _allocate_lock()
        self._report = report
        self.release, self.locked = self._lock.release, self._lock.locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(False):
            return True
        if blocking and threading.get_ident() in _loops:
            _on_wait(self._report, "lock")
        return self._lock.acquire(blocking, timeout)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_allocate_lock = threading.Lock


def _new_lock(report: Report) -> _Lock | threading.Lock:
    """A lock of the kind that its owner gets: only those of the gateway are watched."""
    owner = sys._getframe(1).f_globals.get("__name__", "")
    return _Lock(report) if owner.startswith("gateway") else _allocate_lock()


def in_file(folder: str) -> Report:
    """A report that appends to this process's file in the folder."""
    file = (Path(folder) / str(os.getpid())).open("a", buffering=1)
    return lambda record: print(json.dumps(asdict(record)), file=file)


def _run(watched: _Loop, thread: int, run: Callable[[], None]) -> None:
    before = _loops.get(thread)
    watched.begin_turn()
    _loops[thread] = watched
    try:
        run()
    finally:
        if before is None:
            del _loops[thread]
        else:
            _loops[thread] = before


def _sample() -> None:
    while True:
        time.sleep(INTERVAL)
        for thread, watched in list(_loops.items()):
            try:
                watched.sample(thread)
            except (OSError, RuntimeError):
                continue  # The thread or its loop has just ended.


def _own(frame: FrameType | None) -> list[str]:
    """The frames of code of this project, the innermost first.

    What a test calls itself, and does not await, is the test's work: then its frame is the first.
    """
    found: list[str] = []
    awaited = True
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(ROOT):
            name = code.co_filename.removeprefix(ROOT)
            if not name.startswith((".venv", "tests/loop_watch/watch")):
                is_test, is_awaited = name.startswith("tests"), bool(code.co_flags & _AWAITED)
                if is_test and not (awaited and is_awaited):
                    found.clear()
                awaited = is_test or is_awaited
                found.append(f"{name}:{code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def _on_collection(phase: str, _: dict[str, int]) -> None:
    watched = _loops.get(threading.get_ident())
    if watched is not None:
        watched.collecting += time.thread_time() * (1 if phase == "stop" else -1)


def _on_event(report: Report, event: str, args: Any) -> None:
    if event in WAITS and threading.get_ident() in _loops:
        if event == "socket.connect" and args[0].gettimeout() == 0:
            return
        _on_wait(report, event)


def _on_wait(report: Report, event: str) -> None:
    frame = sys._getframe(1)
    if event != "import":
        outer: FrameType | None = frame
        while outer is not None:
            if outer.f_code.co_filename.startswith(("<frozen importlib", linecache.__file__)):
                return  # Part of an import, or of a traceback's text, which only tests log.
            outer = outer.f_back
    stack = _own(frame)
    if not stack or not stack[0].startswith("gateway") or stack[0].startswith(RUNNER):
        return
    key = event, stack[0].rpartition(":")[0]
    if key not in _waits_seen:
        _waits_seen.add(key)
        report(Record(event, 0.0, 0.0, 0.0, stack))


def _told(report: Report, event: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def told(*args: Any, **named: Any) -> Any:
        # A thread's start waits for microseconds, and a wait of no seconds for nothing.
        if (
            threading.get_ident() in _loops
            and sys._getframe(2).f_code.co_name != "start"
            and (len(args) < 2 or args[1] is None or args[1] > 0)
        ):
            _on_wait(report, event)
        return call(*args, **named)

    return told
