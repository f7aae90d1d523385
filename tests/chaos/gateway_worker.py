"""`python -m tests.chaos.gateway_worker`: runs gateways, one at a time, and reports their leaks.

Reads commands as lines of JSON from standard input, `{"do": "open", ...}`, and answers each with
one line on standard output. It exits at the end of its input.

The wall clock can be shifted: `time.time` and `time.time_ns` are replaced before anything of the
gateway is imported, so that all Python code reads the shifted clock. The monotonic clock is the
machine's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.events import AttemptEnded, RequestRecord
    from tests.gateways import Running

REQUEST_OBJECTS = (
    *("HttpExchange", "_HandledRequest", "InFlightRequest"),
    *("Attempt", "GrantedLease", "LeaseRecord", "ResponseStream"),
)
"""Classes of the gateway whose objects must not outlive their request."""
MIN_POLLS = 4
MAX_POLLS = 40
"""Polls, 50 ms apart, within which these objects must be gone."""
MAX_REFERRERS = 60
"""Lines in the report on what keeps one object alive."""


class ShiftedClock:
    """The wall clock, shifted by `offset` seconds."""

    def __init__(self) -> None:
        self.offset = 0.0
        self._seconds, self._nanoseconds = time.time, time.time_ns

    def install(self) -> None:
        time.time = lambda: self._seconds() + self.offset
        time.time_ns = lambda: self._nanoseconds() + int(self.offset * 1e9)


class GatewayWorker:
    """Executes commands on one gateway at a time, and records the events of its requests."""

    def __init__(self, clock: ShiftedClock) -> None:
        self._clock = clock
        self._stack = contextlib.AsyncExitStack()
        self._running: Running | None = None
        self._finished: list[RequestRecord] = []
        self._attempts: list[AttemptEnded] = []
        self._loop_errors: list[str] = []

    async def execute(self, command: dict[str, Any]) -> dict[str, Any]:
        match command.pop("do"):
            case "open":
                return await self.open(**command)
            case "wait_until_idle":
                return await self.wait_until_idle(**command)
            case "close":
                await self._stack.aclose()
                self._running = None
                return await self._leaks_after_close(**command)
            case "inspect":
                return self.inspect()
            case "shift_clock":
                self._clock.offset += command["seconds"]
                return {}
            case other:
                raise ValueError(other)

    async def open(
        self, folder: str, nodes: list[dict[str, Any]], settings: dict[str, Any]
    ) -> dict[str, Any]:
        """Start a gateway. Returns its URLs and this process's id."""
        from gateway.events import AttemptEnded, RequestRecord
        from tests.gateways import running_gateway

        self._clock.offset = 0.0
        self._finished, self._attempts, self._loop_errors = [], [], []
        asyncio.get_running_loop().set_exception_handler(self._record_loop_error)
        self._stack = contextlib.AsyncExitStack()
        self._running = await self._stack.enter_async_context(
            running_gateway(Path(folder), nodes, settings)
        )
        bus = self._running.gateway.bus
        bus.subscribe(RequestRecord, self._finished.append)
        bus.subscribe(AttemptEnded, self._attempts.append)
        running = self._running
        return {"url": running.url, "admin": running.admin_url, "pid": os.getpid()}

    async def wait_until_idle(self, limit: float) -> dict[str, Any]:
        """Wait until all counters are zero. Returns what is left, and a record of each request."""
        assert self._running is not None
        gateway = self._running.gateway
        until = time.monotonic() + limit
        while _held(self._running) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        gateway.bus.flush()
        # Connections close in later iterations of the event loop. Polls are counted, not seconds,
        # because other processes may hold the core.
        polls = 0
        while (left := self.inspect())["objects"] and polls < MAX_POLLS:
            await asyncio.sleep(0.05)
            polls += 1
        records = [
            [
                r.x_request_id,
                r.status,
                r.reason,
                r.attempts,
                r.node,
                r.completion_tokens,
                r.duration_seconds,
            ]
            for r in self._finished
        ]
        outcomes: dict[str, int] = {}
        for attempt in self._attempts:
            outcomes[attempt.outcome] = outcomes.get(attempt.outcome, 0) + 1
        objects = live_request_objects()
        own_ids = {id(objects), *map(id, objects.values())}
        leaked = [_referrers(obj, own_ids) for group in objects.values() for obj in group]
        return {**left, "leaked": leaked, "records": records, "attempts": outcomes}

    async def _leaks_after_close(self, descriptors: int) -> dict[str, Any]:
        """What is left once the gateway is closed.

        Polls until no task and at most `descriptors` descriptors are left, or `MAX_POLLS` times.
        """
        left = self.inspect()
        for poll in range(MAX_POLLS):
            if poll > MIN_POLLS and not left["tasks"] and left["descriptors"] <= descriptors:
                break
            await asyncio.sleep(0.05)
            left = self.inspect()
        return left

    def inspect(self) -> dict[str, Any]:
        """Counters that are not zero, tasks, descriptors, memory, and live request objects."""
        gc.collect()
        return {
            "counts": {} if self._running is None else _held(self._running),
            "tasks": sorted(
                task.get_name()
                for task in asyncio.all_tasks()
                if task is not asyncio.current_task() and task.get_name() != "commands"
            ),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "rss": _rss(),
            "objects": {name: len(group) for name, group in live_request_objects().items()},
            "loop_errors": self._loop_errors,
        }

    def _record_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._loop_errors.append(f"{context.get('message')}: {context.get('exception')!r}"[:500])


def _held(running: Running) -> dict[str, Any]:
    """What is held for requests, and the tasks that look whether a slot has become free."""
    tasks = [task.get_name() for task in asyncio.all_tasks()]
    reclaiming = [name for name in tasks if name.startswith("reclaim")]
    return {**running.held(), **({"reclaiming": reclaiming} if reclaiming else {})}


def _rss() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def live_request_objects() -> dict[str, list[object]]:
    """The live objects of `REQUEST_OBJECTS`, by the name of their class."""
    objects_found: dict[str, list[object]] = {}
    for obj in gc.get_objects():
        kind = type(obj)
        if kind.__name__ in REQUEST_OBJECTS and kind.__module__.startswith("gateway."):
            objects_found.setdefault(kind.__name__, []).append(obj)
    return objects_found


def _referrers(obj: object, own_ids: set[int], depth: int = 5) -> str:
    """What keeps an object alive: its referrers, each with its own referrers, `depth` levels deep.

    `own_ids` are the ids of this module's own containers, which don't count.
    """
    lines: list[str] = []
    seen = {id(obj), id(lines), *own_ids}

    def add_referrers(target: object, indent: int) -> None:
        for referrer in gc.get_referrers(target):
            if id(referrer) in seen or isinstance(referrer, types.FrameType) or indent > depth:
                continue
            seen.add(id(referrer))
            lines.append(
                "  " * indent + f"{type(referrer).__qualname__} {_one_line_repr(referrer)}"
            )
            add_referrers(referrer, indent + 1)

    add_referrers(obj, 1)
    return "\n".join([_one_line_repr(obj), *lines[:MAX_REFERRERS]])


def _one_line_repr(obj: object) -> str:
    return " ".join(repr(obj).split())[:300]


async def _serve(clock: ShiftedClock) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.set_name("commands")
    worker = GatewayWorker(clock)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            answer = await worker.execute(json.loads(line))
        except Exception as error:  # noqa: BLE001 - reported to the sender of the command
            import traceback

            answer = {"failed": repr(error), "traceback": traceback.format_exc()}
        await asyncio.to_thread(_write_answer, answer)


def _write_answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Execute commands until the input ends."""
    clock = ShiftedClock()
    clock.install()
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(clock))


if __name__ == "__main__":
    main()
