"""`python -m tests.chaos.inside`: a gateway in a process of its own, which says what is left in it.

Takes orders as lines of JSON on standard input, `{"do": "open", ...}`, and answers each with one
line on standard output. It ends with its input.

The wall clock can be made to jump: `time.time` and `time.time_ns` are replaced before anything of
the gateway is imported, so that whatever Python code asks for it gets the shifted one. The
monotonic clock is the machine's own.
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
    from gateway.events import AttemptEnded, RequestFinished
    from tests.gateways import Running

COUNTED = ("Live", "Attempt", "Lease", "Turn", "_Exchange", "Journey", "Rest")
"""Types whose objects live no longer than a request."""
FEW_TURNS = 4
TURNS = 40
"""Of the event loop, within which the objects must be gone."""
MOST_HOLDERS = 60
"""Lines that are told of what keeps one of them alive."""


class Shifted:
    """The wall clock, and how far it is off, in seconds."""

    def __init__(self) -> None:
        self.by = 0.0
        self._seconds, self._nanoseconds = time.time, time.time_ns

    def install(self) -> None:
        time.time = lambda: self._seconds() + self.by
        time.time_ns = lambda: self._nanoseconds() + int(self.by * 1e9)


class Inside:
    """One gateway at a time, and what it told of its requests."""

    def __init__(self, clock: Shifted) -> None:
        self._clock = clock
        self._stack = contextlib.AsyncExitStack()
        self._running: Running | None = None
        self._finished: list[RequestFinished] = []
        self._attempts: list[AttemptEnded] = []
        self._troubles: list[str] = []

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        match order.pop("do"):
            case "open":
                return await self.open(**order)
            case "rest":
                return await self.rest(**order)
            case "close":
                await self._stack.aclose()
                self._running = None
                return await self._closed(**order)
            case "look":
                return self.look()
            case "jump":
                self._clock.by += order["seconds"]
                return {}
            case other:
                raise ValueError(other)

    async def open(
        self, folder: str, nodes: list[dict[str, Any]], settings: dict[str, Any]
    ) -> dict[str, Any]:
        """Start a gateway; where it listens, and this process's id."""
        from gateway.events import AttemptEnded, RequestFinished
        from tests.gateways import running_gateway

        self._clock.by = 0.0
        self._finished, self._attempts, self._troubles = [], [], []
        asyncio.get_running_loop().set_exception_handler(self._trouble)
        self._stack = contextlib.AsyncExitStack()
        self._running = await self._stack.enter_async_context(
            running_gateway(Path(folder), nodes, settings)
        )
        bus = self._running.gateway.bus
        bus.subscribe(RequestFinished, self._finished.append)
        bus.subscribe(AttemptEnded, self._attempts.append)
        running = self._running
        return {"url": running.url, "admin": running.admin_url, "pid": os.getpid()}

    async def rest(self, limit: float) -> dict[str, Any]:
        """Wait until nothing is counted any more; what is left, and every request's record."""
        assert self._running is not None
        gateway = self._running.gateway
        until = time.monotonic() + limit
        while _counts(self._running) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        gateway.bus.flush()
        # What closes connections runs in the loop's next turns: these are counted, since seconds
        # are no measure where others have the core.
        turns = 0
        while (left := self.look())["objects"] and turns < TURNS:
            await asyncio.sleep(0.05)
            turns += 1
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
        objects = _objects()
        ours = {id(objects), *map(id, objects.values())}
        held = [_holders(thing, ours) for found in objects.values() for thing in found]
        return {**left, "held": held, "records": records, "attempts": outcomes}

    async def _closed(self, descriptors: int) -> dict[str, Any]:
        """What is left when nothing runs: within some turns, no more than so many descriptors."""
        left = self.look()
        for turn in range(TURNS):
            if turn > FEW_TURNS and not left["tasks"] and left["descriptors"] <= descriptors:
                break
            await asyncio.sleep(0.05)
            left = self.look()
        return left

    def look(self) -> dict[str, Any]:
        """Counters that are not zero, tasks, descriptors, memory, objects of requests."""
        gc.collect()
        return {
            "counts": {} if self._running is None else _counts(self._running),
            "tasks": sorted(
                task.get_name()
                for task in asyncio.all_tasks()
                if task is not asyncio.current_task() and task.get_name() != "orders"
            ),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "rss": _rss(),
            "objects": {name: len(found) for name, found in _objects().items()},
            "troubles": self._troubles,
        }

    def _trouble(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._troubles.append(f"{context.get('message')}: {context.get('exception')!r}"[:500])


def _counts(running: Running) -> dict[str, Any]:
    gateway = running.gateway
    counts: dict[str, Any] = {
        "requests": len(gateway.registry),
        "waiting": len(gateway.scheduler.queue_positions()),
        "buffered": gateway.handler.body_memory.total_bytes,
        "watched": len(gateway.timeout_monitor),
        "reclaiming": [
            task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("reclaim")
        ],
    }
    for node in gateway.fleet.nodes.values():
        counts[f"leased by {node.name}"] = node.leased
        counts[f"leases of {node.name}"] = len(node.leases)
    return {name: value for name, value in counts.items() if value}


def _rss() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _objects() -> dict[str, list[object]]:
    found: dict[str, list[object]] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if kind.__name__ in COUNTED and kind.__module__.startswith("gateway."):
            found.setdefault(kind.__name__, []).append(thing)
    return found


def _holders(thing: object, ours: set[int], depth: int = 5) -> str:
    """What keeps this alive, as words: each of what refers to it, with what refers to that.

    `ours`: ids of what looks at it now.
    """
    lines: list[str] = []
    seen = {id(thing), id(lines), *ours}

    def tell(what: object, indent: int) -> None:
        for holder in gc.get_referrers(what):
            if id(holder) in seen or isinstance(holder, types.FrameType) or indent > depth:
                continue
            seen.add(id(holder))
            lines.append("  " * indent + f"{type(holder).__qualname__} {_shown(holder)}")
            tell(holder, indent + 1)

    tell(thing, 1)
    return "\n".join([_shown(thing), *lines[:MOST_HOLDERS]])


def _shown(thing: object) -> str:
    return " ".join(repr(thing).split())[:300]


async def _serve(clock: Shifted) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.set_name("orders")
    inside = Inside(clock)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            answer = await inside.obey(json.loads(line))
        except Exception as error:  # noqa: BLE001 - told to who ordered it
            import traceback

            answer = {"failed": repr(error), "traceback": traceback.format_exc()}
        await asyncio.to_thread(_say, answer)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve orders until the input ends."""
    clock = Shifted()
    clock.install()
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(clock))


if __name__ == "__main__":
    main()
