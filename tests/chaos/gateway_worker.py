"""`python -m tests.chaos.gateway_worker`: runs gateways, one at a time, and reports their leaks.

`GatewayProcess` starts it. It reads commands as lines of JSON, `{"do": "open", ...}`: methods of
`GatewayWorker`. It answers each with one line, and exits at the end of its input.

The wall clock can be shifted: `time.time` and `time.time_ns` are replaced before anything of the
gateway is imported, so that all Python code reads the shifted clock. The monotonic clock is the
machine's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import resource
import sys
import time
import traceback
import types
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil
import uvloop

from tests.known import known

if TYPE_CHECKING:
    from gateway.events import RequestRecord
    from tests.gateways import Running

ANSWER_LIMIT = 180.0  # seconds within which the process must answer a command
REQUEST_OBJECTS = (
    *("HttpExchange", "_HandledRequest", "InFlightRequest"),
    *("Attempt", "GrantedLease", "LeaseRecord", "ResponseStream"),
)  # classes of the gateway whose objects must not outlive their request
MIN_POLLS, MAX_POLLS = 4, 40  # polls, 50 ms apart, within which these objects must be gone
MOST_HOLDERS = 20  # lines in the report on what keeps one object alive


class GatewayProcess:
    """The child process and its command pipe. An asynchronous context manager."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: Process

    async def __aenter__(self) -> Self:
        command = (sys.executable, "-m", "tests.chaos.gateway_worker")
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, limit=1 << 26
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        known(self._process.stdin).close()
        try:
            await asyncio.wait_for(self._process.wait(), ANSWER_LIMIT)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def command(self, do: str, **options: Any) -> dict[str, Any]:
        """Run a command there. Raises AssertionError with the traceback when it fails."""
        async with self._lock, asyncio.timeout(ANSWER_LIMIT):
            known(self._process.stdin).write(json.dumps({"do": do, **options}).encode() + b"\n")
            line = await known(self._process.stdout).readline()
        answer: dict[str, Any] = json.loads(line or b'{"failed": "the process has ended"}')
        assert "failed" not in answer, answer["failed"]
        return answer

    def limit_descriptors(self, more: int | None) -> None:
        """Limit the process to `more` further descriptors; None: to the system's hard limit."""
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
        soft = hard if more is None else psutil.Process(self.pid).num_fds() + more
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (soft, hard))


class GatewayWorker:
    """Executes commands on one gateway at a time, and records the events of its requests."""

    def __init__(self) -> None:
        self._offset = 0.0  # seconds by which the wall clock is shifted
        self._stack = contextlib.AsyncExitStack()
        self._running: Running | None = None
        self._finished: list[RequestRecord] = []
        self._loop_errors: list[str] = []

    def install_clock(self) -> None:
        seconds, nanoseconds = time.time, time.time_ns
        time.time = lambda: seconds() + self._offset
        time.time_ns = lambda: nanoseconds() + int(self._offset * 1e9)

    async def open(
        self, folder: str, nodes: list[dict[str, Any]], settings: dict[str, Any]
    ) -> dict[str, Any]:
        from gateway.events import RequestRecord
        from tests.gateways import running_gateway

        self._offset = 0.0
        self._finished, self._loop_errors = [], []
        asyncio.get_running_loop().set_exception_handler(self._record_loop_error)
        self._stack = contextlib.AsyncExitStack()
        gateway = running_gateway(Path(folder), nodes, settings)
        running = self._running = await self._stack.enter_async_context(gateway)
        running.gateway.bus.subscribe(RequestRecord, self._finished.append)
        return {"url": running.url, "admin": running.admin_url}

    async def wait_until_idle(self, limit: float) -> dict[str, Any]:
        """Wait until all counters are zero. Returns what is left, and a record of each request."""
        until = time.monotonic() + limit
        while self._held() and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        known(self._running).gateway.bus.flush()
        # Connections close in later iterations of the event loop. Polls are counted, not seconds,
        # because other processes may hold the core.
        left = await self.inspect()
        for _ in range(MAX_POLLS):
            if not left["objects"]:
                break
            await asyncio.sleep(0.05)
            left = await self.inspect()
        records = [
            (r.x_request_id, r.status, r.reason, r.attempts, r.node, r.duration_seconds)
            for r in self._finished
        ]
        objects = live_request_objects()
        own = {id(objects), *map(id, objects.values())}
        leaked = [_holders(one, own) for group in objects.values() for one in group]
        return {**left, "leaked": leaked, "records": records}

    async def close(self, descriptors: int) -> dict[str, Any]:
        """Close the gateway. Returns what is left.

        Polls until no task and at most `descriptors` descriptors are left, or `MAX_POLLS` times.
        """
        await self._stack.aclose()
        self._running = None
        left = await self.inspect()
        for poll in range(MAX_POLLS):
            if poll > MIN_POLLS and not left["tasks"] and left["descriptors"] <= descriptors:
                break
            await asyncio.sleep(0.05)
            left = await self.inspect()
        return left

    async def inspect(self) -> dict[str, Any]:
        """Counters that are not zero, tasks, descriptors, memory, and live request objects."""
        gc.collect()
        others = asyncio.all_tasks() - {known(asyncio.current_task())}
        process = psutil.Process()
        return {
            "counts": self._held(),
            "tasks": sorted(task.get_name() for task in others),
            "descriptors": process.num_fds(),
            "rss": process.memory_info().rss,
            "objects": {name: len(group) for name, group in live_request_objects().items()},
            "loop_errors": self._loop_errors,
        }

    async def shift_clock(self, seconds: float) -> dict[str, Any]:
        self._offset += seconds
        return {}

    def _held(self) -> dict[str, Any]:
        """What is held for requests, and the tasks that look whether a slot has become free."""
        tasks = [task.get_name() for task in asyncio.all_tasks()]
        reclaiming = [name for name in tasks if name.startswith("reclaim")]
        held = self._running.held() if self._running is not None else {}
        return {**held, **({"reclaiming": reclaiming} if reclaiming else {})}

    def _record_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._loop_errors.append(f"{context.get('message')}: {context.get('exception')!r}"[:500])


def live_request_objects() -> dict[str, list[object]]:
    """The live objects of `REQUEST_OBJECTS`, by the name of their class."""
    found: dict[str, list[object]] = {}
    for one in gc.get_objects():
        kind = type(one)
        if kind.__name__ in REQUEST_OBJECTS and kind.__module__.startswith("gateway."):
            found.setdefault(kind.__name__, []).append(one)
    return found


def _shown(one: object) -> str:
    return f"{type(one).__qualname__} {' '.join(repr(one).split())[:300]}"


def _holders(leaked: object, own: set[int]) -> str:
    """An object and what keeps it alive; `own` are the ids of this module's own containers."""
    holders = [
        one
        for one in gc.get_referrers(leaked)
        if id(one) not in own and not isinstance(one, types.FrameType)
    ]
    return "\n  ".join(map(_shown, [leaked, *holders[:MOST_HOLDERS]]))


async def _serve(worker: GatewayWorker) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command = json.loads(line)
        try:
            answer = await getattr(worker, command.pop("do"))(**command)
        except Exception:  # noqa: BLE001 - reported to the sender of the command
            answer = {"failed": traceback.format_exc()}
        await asyncio.to_thread(print, json.dumps(answer), flush=True)


def main() -> None:
    worker = GatewayWorker()
    worker.install_clock()
    uvloop.run(_serve(worker))


if __name__ == "__main__":
    main()
