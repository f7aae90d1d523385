"""One log line per request, per change of a node's state, and per thing that an operator awaits."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
import structlog

from gateway.events import (
    AttemptEnded,
    EventBus,
    HookEnded,
    InventoryChanged,
    NodeChanged,
    NodeDrift,
    RequestFinished,
    SettingsChanged,
    StreamResumed,
)
from gateway.observe.logs import LEVELS, Logs, escape_unprintable, utc_timestamp
from gateway.request import Priority

BLAMELESS_OUTCOMES = frozenset(
    {"ok", "client_closed", "cancelled", "stale", "context_overflow", "moved", "other_kind"}
)
"""Attempts that blame no node: worth a line at `debug` only."""

_DEBUG = LEVELS["debug"]

_TROUBLE = frozenset({"down", "ejected", "mute", "degraded"})


def log_events(bus: EventBus, logs: Logs, *, access_log: bool = True) -> EventLog:
    """Write a line for each event of `bus`; `access` False leaves out the one per request."""
    lines = EventLog(logs, access_log=access_log)
    bus.subscribe(RequestFinished, lines.request)
    bus.subscribe(AttemptEnded, lines.attempt)
    bus.subscribe(StreamResumed, lines.resumed)
    bus.subscribe(NodeChanged, lines.node)
    bus.subscribe(NodeDrift, lines.drift)
    bus.subscribe(HookEnded, lines.hook)
    bus.subscribe(InventoryChanged, lines.inventory)
    bus.subscribe(SettingsChanged, lines.settings)
    return lines


class EventLog:
    """Words events. `access` may be switched while it runs."""

    def __init__(self, logs: Logs, *, access_log: bool) -> None:
        self._logs = logs
        self.access_log = access_log

    def request(self, event: RequestFinished) -> None:
        """The access line; a request that failed for our own or a node's sake is a warning."""
        if not self.access_log:
            return
        level = "warning" if event.status >= 500 else "info"
        if not self._logs.is_enabled_for(LEVELS[level]):
            return
        if self._logs.json:
            self._logs.writer.write(access_log_line(event, level))
            return
        fields: dict[str, Any] = {
            "id": escape_unprintable(event.x_request_id),
            "path": escape_unprintable(event.path),
            "status": event.status,
            "class": event.priority.label,
            "model": event.model,
            "node": event.node,
            "attempts": event.attempts,
            "queue": round(event.queue_seconds, 4),
            "ttft": None if event.ttft is None else round(event.ttft, 4),
            "duration": round(event.duration_seconds, 4),
            "prompt_tokens": event.prompt_tokens,
            "cached_tokens": event.cached_tokens,
            "completion_tokens": event.completion_tokens,
            "stream": event.stream,
            "caller": event.caller,
        }
        if event.reason is not None:
            fields["reason"] = event.reason
        self._write(level, "request", fields)

    def attempt(self, event: AttemptEnded) -> None:
        """An attempt that failed; the request may yet succeed on another node."""
        if event.outcome == "ok" and not self._logs.is_enabled_for(_DEBUG):
            return
        fields: dict[str, Any] = {
            "id": event.x_request_id,
            "node": event.node,
            "outcome": event.outcome,
            "seconds": round(event.seconds, 4),
        }
        if event.status is not None:
            fields["status"] = event.status
        self._say("debug" if event.outcome in BLAMELESS_OUTCOMES else "warning", "attempt", fields)

    def resumed(self, event: StreamResumed) -> None:
        """A stream that goes on elsewhere, or ends with an error because it can't."""
        fields: dict[str, Any] = {
            "id": event.x_request_id, "failed": event.failed_node, "tokens": event.tokens
        }  # fmt: skip
        if event.resumed_on is not None:
            self._say("info", "stream goes on elsewhere", fields | {"node": event.resumed_on})
        else:
            self._say("warning", "stream can't go on elsewhere", fields | {"why": event.failure})

    def node(self, event: NodeChanged) -> None:
        """A node's change of state, with its reason."""
        level = "warning" if event.new_state in _TROUBLE else "info"
        fields = {
            "node": event.node,
            "old": event.old_state,
            "new": event.new_state,
            "reason": event.reason,
        }
        self._say(level, "node", fields)

    def drift(self, event: NodeDrift) -> None:
        """A node that is not what the inventory says."""
        fields = {"node": event.node, "differences": "; ".join(event.differences)}
        if event.differences:
            self._say("warning", "node differs from the inventory", fields)
        else:
            self._say("info", "node is as the inventory says again", {"node": event.node})

    def hook(self, event: HookEnded) -> None:
        """A standby node was started or stopped, or could not be."""
        fields = {
            "node": event.node,
            "hook": event.hook,
            "outcome": event.outcome,
            "seconds": round(event.seconds, 3),
            "detail": event.detail,
        }
        if event.output:
            fields["output"] = escape_unprintable(event.output)
        self._say("info" if event.outcome == "ok" else "warning", "hook", fields)

    def inventory(self, event: InventoryChanged) -> None:
        """The inventory was read again."""
        if event.error is not None:
            self._say("error", "inventory is invalid, nothing changed", _problems(event.error))
            return
        fields = {"added": event.added, "changed": event.changed, "removed": event.removed}
        self._say("info", "inventory", fields)
        for warning in event.warnings:
            self._say("warning", "inventory", {"warning": warning})

    def settings(self, event: SettingsChanged) -> None:
        """The settings were read again."""
        if event.error is not None:
            self._say("error", "settings are invalid, nothing changed", _problems(event.error))
        elif event.needs_restart:
            fields = {"needs_restart": event.needs_restart}
            self._say("warning", "settings changed, some need a restart", fields)
        else:
            self._say("info", "settings changed", {})

    def _say(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if self._logs.is_enabled_for(LEVELS[level]):
            self._write(level, event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if self._logs.json:
            self._logs.write_json(level, event, fields)
        else:
            structlog.get_logger().log(LEVELS[level], event, **fields)


_ACCESS = (
    b'{"timestamp":"%b","level":"%b","event":"request","id":%b,%b,"queue":%b,"ttft":%b,'
    b'"duration":%.4f,"prompt_tokens":%d,"cached_tokens":%d,"completion_tokens":%d%b}\n'
)


def access_log_line(event: RequestFinished, level: str) -> bytes:
    """A request's line as JSON, put together by hand: it is written once for each request."""
    return _ACCESS % (
        utc_timestamp().encode(),
        level.encode(),
        _quoted(event.x_request_id),
        _kind(
            event.path,
            event.priority,
            event.model,
            event.node,
            event.stream,
            event.caller,
            event.status,
            event.attempts,
        ),
        b"%.4f" % event.queue_seconds if event.queue_seconds else b"0.0000",
        b"null" if event.ttft is None else b"%.4f" % event.ttft,
        event.duration_seconds,
        event.prompt_tokens,
        event.cached_tokens,
        event.completion_tokens,
        b"" if event.reason is None else b',"reason":' + _quoted(event.reason),
    )


@lru_cache(maxsize=4096)
def _kind(
    path: str,
    priority: Priority,
    model: str,
    node: str | None,
    stream: bool,  # noqa: FBT001 - a part of a cache's key like the others
    caller: str,
    code: int,
    attempts: int,
) -> bytes:
    """What many requests have in common."""
    return (
        b'"path":%b,"class":"%b","model":%b,"node":%b,"stream":%b,"caller":%b,'
        b'"status":%d,"attempts":%d'
    ) % (
        _quoted(path),
        priority.label.encode(),
        _quoted(model),
        b"null" if node is None else _quoted(node),
        b"true" if stream else b"false",
        _quoted(caller),
        code,
        attempts,
    )


def _quoted(text: str) -> bytes:
    """A text as JSON."""
    return msgspec.json.encode(escape_unprintable(text))


def _problems(error: str) -> dict[str, Any]:
    return {"error": "; ".join(error.splitlines())}
