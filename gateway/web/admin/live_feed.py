"""`GET /admin/live`: the live view as server-sent events, once a second, for all who watch.

A watcher gets an event `snapshot`, then an event `update` with what has changed. Each is encoded
once for all watchers of a role. Nothing is queued for a watcher: one that was too slow for the last
update gets a snapshot, and one that reads nothing for `STALL_SECONDS` is cut off. While nobody
watches, the history's steps are counted, and problems are looked for, which the log is told of.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.access.admin_keys import AdminIdentity, AdminRole
from gateway.errors import GatewayError
from gateway.events import EventBus
from gateway.fleet.fleet import Fleet, GpuCosts
from gateway.observe.audit import AuditTrail
from gateway.observe.history import COLUMNS, FleetHistory, HistoryPoint
from gateway.observe.problem import Problem
from gateway.observe.problem_log import ProblemLog
from gateway.proxy.in_flight import InFlightRegistry
from gateway.scheduling.scheduler import Scheduler
from gateway.web.admin.configuration import GatewayControl
from gateway.web.admin.event_stream import EventStream, encode_event
from gateway.web.admin.guard import identity_of, is_still_admitted
from gateway.web.admin.live_view import (
    NODE_FIELDS,
    REQUEST_FIELDS,
    LiveState,
    LiveView,
    Row,
    in_steps,
)
from gateway.web.admin.nodes import DrainDeadlines
from gateway.web.asgi import HealthEndpoints

UPDATE_SECONDS = 1.0
"""Seconds between two updates."""

LOOK_SECONDS = 2.0
"""Seconds between two looks for problems while nobody watches."""

MOST_WATCHERS = 32
"""Streams at the same time."""

STALL_SECONDS = 15.0
"""Seconds after which a watcher that reads nothing is cut off."""

LIFE_SECONDS = 900.0
"""Seconds after which a stream ends; the page comes back."""

FIRST_SECONDS = 30.0
"""Most seconds until a first frame is there."""

RETRY_AFTER = 5.0
"""Seconds after which a place may be free for another watcher."""


class LiveFeed:
    """Reads the live view while somebody watches; `run` must run as long as the gateway serves."""

    def __init__(
        self,
        view: LiveView,
        *,
        update_seconds: float = UPDATE_SECONDS,
        look_seconds: float = LOOK_SECONDS,
        stall_seconds: float = STALL_SECONDS,
        life_seconds: float = LIFE_SECONDS,
        most_watchers: int = MOST_WATCHERS,
    ) -> None:
        self._view = view
        self._problem_log = ProblemLog(time.monotonic)
        self._update_seconds = update_seconds
        self._look_seconds = look_seconds
        self._stall_seconds = stall_seconds
        self._life_seconds = life_seconds
        self._most_watchers = most_watchers
        self._operators = self._watchers = 0
        self._frame: Frame | None = None
        self._wanted = asyncio.Event()
        """Somebody waits for a first frame."""
        self._published = asyncio.Event()
        """Set, and replaced, with each frame."""
        self._closed = False

    @property
    def watchers(self) -> int:
        """How many watch."""
        return self._watchers

    # What is read.

    @property
    def history(self) -> FleetHistory:
        """The last hour in numbers."""
        return self._view.history

    async def run(self) -> None:
        """Close steps of the history, publish frames, and tell of problems; never ends."""
        history, clock = self._view.history, time.monotonic
        next_step = clock() + history.step_seconds
        try:
            while True:
                pause = self._update_seconds if self._watchers else self._look_seconds
                await self._wait(min(next_step - clock(), pause))
                point = None
                if clock() >= next_step:
                    next_step = max(next_step + history.step_seconds, clock())
                    gauges = await self._view.gauges()
                    point = history.close_step(self._view.wall_clock(), clock(), gauges)
                if self._watchers:
                    problems = await self._publish(point)
                else:
                    self._frame = None
                    problems = await self._view.read_problems()
                # Until each node was asked once, all of them look as if they were out.
                if self._view.fleet.first_probes_done.is_set():
                    self._problem_log.take(problems)
        finally:
            self._closed = True
            self._published.set()

    async def _wait(self, seconds: float) -> None:
        """Wait so long, or until a first watcher wants a frame."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._wanted.wait()
        except TimeoutError:
            pass
        self._wanted.clear()

    async def _publish(self, point: HistoryPoint | None) -> list[Problem]:
        state = await self._view.read(with_requests=self._operators > 0)
        before = None if self._frame is None else self._frame.state
        self._frame = await Frame.between(before, state, point, self._view.history.as_json)
        published, self._published = self._published, asyncio.Event()
        published.set()
        return state.problems

    # Who watches.

    async def stream(self, request: Request) -> Response:
        """The events, for one watcher; with `once=1` a snapshot alone. Raises: GatewayError 429."""
        identity = identity_of(request)
        once = request.query_params.get("once", "0")
        if once not in {"0", "1"}:
            raise errors.invalid_request("'once' must be 0 or 1.", "once")
        if self._watchers >= self._most_watchers:
            raise GatewayError(
                429,
                "too_many_watchers",
                f"{self._watchers} watch already; more would cost the requests their time.",
                retry_after=RETRY_AFTER,
            )
        # Now: until its events begin, others may ask for a place.
        self._watchers += 1
        events = self._events(identity, lambda: is_still_admitted(request), once=once == "1")
        return EventStream(events, self._stall_seconds, self._watcher_left)

    async def _watcher_left(self) -> None:
        self._watchers -= 1

    async def _events(
        self, identity: AdminIdentity, is_admitted: Callable[[], bool], *, once: bool
    ) -> AsyncGenerator[bytes, None]:
        """Hello, a snapshot, updates; they end where the key is revoked or its role changes."""
        is_operator = identity.role >= AdminRole.OPERATOR
        until = time.monotonic() + self._life_seconds
        self._operators += is_operator
        try:
            hello = {
                "role": identity.role.label,
                "update_seconds": self._update_seconds,
                "history_columns": COLUMNS,
            }
            yield encode_event("hello", hello)
            async with asyncio.timeout(FIRST_SECONDS):
                seen = await self._first_frame(is_operator)
            yield await seen.snapshot(is_operator=is_operator)
            while time.monotonic() < until and not self._closed and not once:
                published = self._published
                if self._frame is seen:
                    await published.wait()
                frame = self._frame
                if frame is None or frame is seen:
                    continue
                if not is_admitted():
                    return
                follows, seen = frame.follows is seen.state, frame
                if follows:
                    yield frame.update(is_operator=is_operator)
                else:
                    yield await frame.snapshot(is_operator=is_operator)
        finally:
            self._operators -= is_operator

    async def _first_frame(self, is_operator: bool) -> Frame:  # noqa: FBT001
        """A frame that has what this watcher may see."""
        frame = self._frame
        while frame is None or (is_operator and frame.state.requests is None):
            published = self._published
            self._wanted.set()
            await published.wait()
            if self._closed:
                raise asyncio.CancelledError
            frame = self._frame
        return frame


def live_feed(
    gateway: GatewayControl,
    fleet: Fleet,
    scheduler: Scheduler,
    registry: InFlightRegistry,
    bus: EventBus,
    audit: AuditTrail,
    drain_deadlines: DrainDeadlines,
) -> LiveFeed:
    """The feed of a gateway, with a history of its own."""
    history = FleetHistory(bus, GpuCosts(fleet, gateway.clock).of)
    health = HealthEndpoints(fleet, scheduler, lambda: gateway.closing)
    return LiveFeed(
        LiveView(fleet, scheduler, registry, gateway, health, history, audit, drain_deadlines)
    )


class Frame:
    """The live view at one moment, and what has changed since the one before."""

    def __init__(self, state: LiveState, history: Callable[[], Mapping[str, Any]]) -> None:
        self.state = state
        self.follows: LiveState | None = None
        """The state that `update` begins from."""
        self._history = history
        self._changes: dict[str, Any] = {}
        self._request_changes: dict[str, Any] = {}
        self._snapshots: dict[bool, bytes] = {}
        self._updates: dict[bool, bytes] = {}
        self._encoding = asyncio.Lock()

    @classmethod
    async def between(
        cls,
        before: LiveState | None,
        after: LiveState,
        point: HistoryPoint | None,
        history: Callable[[], Mapping[str, Any]],
    ) -> Frame:
        """The frame of a state that follows another; `point`: a step of the history ended."""
        frame = cls(after, history)
        if before is None:
            return frame
        frame.follows = before
        changes = frame._changes
        changes["at"] = after.at
        nodes, gone = await changed_rows(NODE_FIELDS, before.nodes, after.nodes)
        if nodes:
            changes["nodes"] = nodes
        if gone:
            changes["gone_nodes"] = gone
        if after.summary != before.summary:
            changes["summary"] = after.summary
        if after.waiting != before.waiting:
            changes["waiting"] = after.waiting
        if point is not None:
            changes["point"] = point
        if after.requests is not None:
            requests, ended = await changed_rows(
                REQUEST_FIELDS, before.requests or {}, after.requests
            )
            if requests:
                frame._request_changes["requests"] = requests
            if ended:
                frame._request_changes["ended_requests"] = ended
        return frame

    def update(self, *, is_operator: bool) -> bytes:
        """The event with what has changed."""
        event = self._updates.get(is_operator)
        if event is None:
            changes, before, after = self._changes, self.follows, self.state
            if before is None or before.problems != after.problems:
                changes = {**changes, "problems": self._problems(is_operator=is_operator)}
            if is_operator:
                changes = {**changes, **self._request_changes}
            event = self._updates[is_operator] = encode_event("update", changes)
        return event

    async def snapshot(self, *, is_operator: bool) -> bytes:
        """The event with everything; a thousand nodes are encoded in steps."""
        async with self._encoding:
            event = self._snapshots.get(is_operator)
            if event is None:
                event = self._snapshots[is_operator] = await self._encode_all(is_operator)
        return event

    async def _encode_all(self, is_operator: bool) -> bytes:  # noqa: FBT001
        state = self.state
        rest = {
            "at": state.at,
            "summary": state.summary,
            "waiting": state.waiting,
            "problems": self._problems(is_operator=is_operator),
            "history": self._history(),
        }
        parts = [msgspec.json.encode(rest)[:-1]]
        parts.append(b',"nodes":[' + await _encode_rows(NODE_FIELDS, state.nodes) + b"]")
        if is_operator:
            rows = await _encode_rows(REQUEST_FIELDS, state.requests or {})
            parts.append(b',"requests":[' + rows + b"]")
        return b"event: snapshot\ndata: %b}\n\n" % b"".join(parts)

    def _problems(self, *, is_operator: bool) -> list[dict[str, Any]]:
        return [one.as_json(may_name_callers=is_operator) for one in self.state.problems]


async def changed_rows(
    fields: Sequence[str], before: Mapping[str, Row], after: Mapping[str, Row]
) -> tuple[list[dict[str, Any]], list[str]]:
    """What has changed of rows whose key is their first field, and the keys that have gone.

    A row that is new comes whole, another one as its key and the fields that differ.
    """
    changed: list[dict[str, Any]] = []
    async for key, row in in_steps(list(after.items())):
        old = before.get(key)
        if old is None:
            changed.append(dict(zip(fields, row, strict=True)))
        elif old != row:
            values = zip(fields, old, row, strict=True)
            change = {name: value for name, was, value in values if was != value}
            changed.append({fields[0]: key, **change})
    return changed, [key for key in before if key not in after]


async def _encode_rows(fields: Sequence[str], rows: Mapping[str, Row]) -> bytes:
    encoded = [
        msgspec.json.encode(dict(zip(fields, row, strict=True)))
        async for row in in_steps(list(rows.values()))
    ]
    return b",".join(encoded)
