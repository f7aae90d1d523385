"""Writes the events of the bus as log lines; one per request is the access log."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any

import msgspec
import structlog

from gateway.events import (
    AttemptEnded,
    EdgeLost,
    EndedKind,
    EventBus,
    HookEnded,
    InventoryChanged,
    ModelLoadChanged,
    ModelsDiffer,
    NodeCalibrated,
    NodeChanged,
    NodeDrift,
    PromptsKept,
    RequestRecord,
    SettingsChanged,
    SlotYielded,
    StreamResumed,
)
from gateway.watch.logs import LEVELS, Logs, escape_unprintable, utc_second

# Outcomes of attempts that are no node's fault: logged at `debug` only.
BLAMELESS_OUTCOMES = frozenset(
    {
        *("ok", "client_closed", "cancelled", "stale", "context_overflow", "moved", "yielded"),
        "other_kind",
    }
)

_DEBUG = LEVELS["debug"]
_BAD_STATES = frozenset({"down", "ejected", "mute", "degraded"})
# What a router's model may be in for a reason of its own that no other line tells.
_OWN_STATES = frozenset({"ejected", "degraded", "draining"})


MOST_NAMED_REQUESTS = 16  # requests that broke off with an edge and that one line names


@dataclass(eq=False)
class EventLog:
    """Logs each event of `bus`. `draw`: a number from 0 to 1, for `configure`.

    `name_of`: the name of the key with this id; when names change, `bus.ended` forgets its kinds.
    """

    bus: InitVar[EventBus]
    logs: Logs
    draw: Callable[[], float] = random.random
    name_of: Callable[[str], str | None] = lambda _: None
    _share: float = 1.0

    def __post_init__(self, bus: EventBus) -> None:
        bus.ended.read_by(self.request)
        bus.subscribe(AttemptEnded, self.attempt)
        bus.subscribe(StreamResumed, self.resumed)
        bus.subscribe(SlotYielded, self.yielded)
        bus.subscribe(NodeChanged, self.node)
        bus.subscribe(NodeCalibrated, self.calibrated)
        bus.subscribe(PromptsKept, self.prompts_kept)
        bus.subscribe(NodeDrift, self.drift)
        bus.subscribe(ModelsDiffer, self.models_differ)
        bus.subscribe(ModelLoadChanged, self.model_load)
        bus.subscribe(HookEnded, self.hook)
        bus.subscribe(EdgeLost, self.edge_lost)
        bus.subscribe(InventoryChanged, self.inventory)
        bus.subscribe(SettingsChanged, self.settings)

    def configure(self, share: float) -> None:
        """Write the access log's line of so many requests, by chance; 0: of none.

        Unless it is 0, requests that the gateway or a node failed always have their line.
        """
        self._share = share

    def request(self, kind: EndedKind) -> Callable[[RequestRecord], None]:
        """What writes the access log's lines of requests of this kind.

        A request that the gateway or a node failed is a warning.
        """
        failed = kind.status >= 500
        level = "warning" if failed else "info"
        number, logs, name = LEVELS[level], self.logs, self.name_of(kind.caller)
        template = access_line_template(kind, level, name)

        def write(record: RequestRecord) -> None:
            share = self._share
            if share < 1 and (not share or (not failed and self.draw() >= share)):
                return
            if number < logs.level:
                return
            # The only line of every request. Built here, it costs a tenth of structlog's chain.
            line = access_log_line(template, record)
            if logs.json:
                logs.writer.write(line)
            else:
                told = msgspec.json.decode(line)
                fields = {word: told[word] for word in _ON_TERMINAL if word in told}
                self._write(level, "request", fields)

        return write

    def attempt(self, event: AttemptEnded) -> None:
        """An attempt that failed; the request may still succeed on another node."""
        if event.outcome == "ok" and self.logs.level > _DEBUG:
            return
        fields = {"id": event.x_request_id} | _values(event, "node", "outcome", "seconds")
        if event.status is not None:
            fields["status"] = event.status
        self._log("debug" if event.outcome in BLAMELESS_OUTCOMES else "warning", "attempt", fields)

    def resumed(self, event: StreamResumed) -> None:
        """A stream that was resumed on another node, or ends with an error as it could not be."""
        fields: dict[str, Any] = {
            "id": event.x_request_id, "failed": event.failed_node, "tokens": event.tokens
        }  # fmt: skip
        if event.resumed_on is not None:
            self._log("info", "stream goes on elsewhere", fields | {"node": event.resumed_on})
        else:
            self._log("warning", "stream can't go on elsewhere", fields | {"why": event.failure})

    def yielded(self, event: SlotYielded) -> None:
        """A batch request that gave up its slot, and where it went on."""
        fields: dict[str, Any] = {
            "id": event.x_request_id, "gave_up": event.node, "tokens": event.tokens,
            "seconds": round(event.waited_seconds, 4),
        }  # fmt: skip
        if event.resumed_on is not None:
            self._log("debug", "batch request goes on", fields | {"node": event.resumed_on})
        else:
            self._log("info", "batch request does not go on", fields)

    def node(self, event: NodeChanged) -> None:
        """A node's new state, with the reason."""
        level = "warning" if event.new_state in _BAD_STATES else "info"
        if "/" in event.node and _OWN_STATES.isdisjoint((event.old_state, event.new_state)):
            # A router's model: its loads have lines of their own, and the rest is its router's.
            level = "debug"
        fields = {
            "node": event.node,
            "old": event.old_state,
            "new": event.new_state,
            "reason": event.reason,
        }
        self._log(level, "node", fields)

    def drift(self, event: NodeDrift) -> None:
        """A node that differs from the inventory, or does so no longer."""
        fields = {"node": event.node, "differences": "; ".join(event.differences)}
        if event.differences:
            self._log("warning", "node differs from the inventory", fields)
        else:
            self._log("info", "node is as the inventory says again", {"node": event.node})

    def calibrated(self, event: NodeCalibrated) -> None:
        """A calibration has ended: of interest if it should have shown something."""
        level = "info" if event.outcome in {"failed", "timed_out"} else "debug"
        fields = _values(event, "node", "outcome", "seconds", "prefill_tps", "decode_tps")
        if event.detail:
            fields["detail"] = event.detail
        self._log(level, "calibration", fields)

    def prompts_kept(self, event: PromptsKept) -> None:
        """A model's prompts were saved or restored, or could not be."""
        fields = _values(event, "node", "action", "prompts")
        fields |= {"detail": event.detail} if event.detail else {"tokens": event.tokens}
        self._log("warning" if event.detail else "info", "saved prompts", fields)

    def models_differ(self, event: ModelsDiffer) -> None:
        """Nodes that serve one model differ, or do so no longer."""
        for difference in event.differences:
            self._log("warning", "nodes of one model differ", {"difference": difference})
        if not event.differences:
            self._log("info", "nodes of each model are alike again", {})

    def model_load(self, event: ModelLoadChanged) -> None:
        """A router has begun to load a model, has loaded it, or has it no longer."""
        level = "warning" if event.change in {"failed", "died"} else "info"
        fields: dict[str, Any] = {
            "node": event.node,
            "model": escape_unprintable(event.model),
            "change": event.change,
            "reason": escape_unprintable(event.reason),
        }
        if event.by_others:
            fields["by"] = "others"
        if event.cause:
            fields["cause"] = event.cause
        if event.seconds is not None:
            fields["seconds"] = round(event.seconds, 3)
        elif event.change == "loaded" and not event.by_others:
            level = "debug"  # It was loaded before the gateway looked, as at each start.
        self._log(level, "model", fields)

    def edge_lost(self, event: EdgeLost) -> None:
        """A process that relays has ended though it was not told to."""
        fields: dict[str, Any] = {"edge": event.edge, "reason": event.reason}
        if event.requests:
            # Each has a line of its own, too.
            named = ", ".join(event.requests[:MOST_NAMED_REQUESTS])
            fields |= {"requests": len(event.requests), "ids": escape_unprintable(named)}
        self._log("error", "edge died", fields)

    def hook(self, event: HookEnded) -> None:
        """A standby node was started or stopped, or that failed."""
        fields = _values(event, "node", "hook", "outcome", "seconds", "detail")
        if event.output:
            fields["output"] = escape_unprintable(event.output)
        self._log("info" if event.outcome == "ok" else "warning", "hook", fields)

    def inventory(self, event: InventoryChanged) -> None:
        """The inventory was reloaded."""
        if event.error is not None:
            self._log("error", "inventory is invalid, nothing changed", _problems(event.error))
            return
        self._log("info", "inventory", _values(event, "added", "changed", "removed"))
        for warning in event.warnings:
            self._log("warning", "inventory", {"warning": warning})

    def settings(self, event: SettingsChanged) -> None:
        """The settings were reloaded."""
        if event.error is not None:
            self._log("error", "settings are invalid, nothing changed", _problems(event.error))
        elif event.needs_restart:
            fields = {"needs_restart": event.needs_restart}
            self._log("warning", "settings changed, some need a restart", fields)
        else:
            self._log("info", "settings changed", {})

    def _log(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if LEVELS[level] >= self.logs.level:
            self._write(level, event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if self.logs.json:
            self.logs.write_json(level, event, fields)
        else:
            structlog.get_logger().log(LEVELS[level], event, **fields)


# The fields of a request's line in the order in which people read them.
_ON_TERMINAL = (
    *("id", "path", "status", "class", "model", "node", "attempts", "queue", "ttft", "duration"),
    *("prompt_tokens", "cached_tokens", "completion_tokens", "stream", "caller", "caller_name"),
    *("reason", "trace_id"),
)


def access_line_template(kind: EndedKind, level: str, caller_name: str | None = None) -> bytes:
    """The line of requests of this kind as JSON, but for what differs between them.

    `caller_name`: of the key, if they have one.
    """
    fixed = (
        b'"path":%b,"class":"%b","model":%b,"node":%b,"stream":%b,"caller":%b%b,'
        b'"status":%d,"attempts":%d'
    ) % (
        _quoted(kind.path),
        kind.priority.label.encode(),
        _quoted(kind.model),
        b"null" if kind.node is None else _quoted(kind.node),
        b"true" if kind.stream else b"false",
        _quoted(kind.caller),
        b"" if caller_name is None else b',"caller_name":' + _quoted(caller_name),
        kind.status,
        kind.attempts,
    )
    reason = b"" if kind.reason is None else b',"reason":' + _quoted(kind.reason)
    return (
        b'{"timestamp":"%%b.%%03dZ","level":"%b","event":"request","id":%%b,%b,"queue":%%b,"ttft":%%b,'
        b'"duration":%%.4f,"prompt_tokens":%%d,"cached_tokens":%%d,"completion_tokens":%%d%b%%b}\n'
    ) % (level.encode(), fixed.replace(b"%", b"%%"), reason.replace(b"%", b"%%"))


def access_log_line(template: bytes, record: RequestRecord) -> bytes:
    """A request's line as JSON; `template`: that of its kind."""
    queue, ttft, trace = record.queue_seconds, record.ttft, record.trace
    second, milliseconds = utc_second()
    return template % (
        second,
        milliseconds,
        _quoted(record.x_request_id),
        b"%.4f" % queue if queue else b"0.0000",
        b"null" if ttft is None else b"%.4f" % ttft,
        record.duration_seconds,
        record.prompt_tokens,
        record.cached_tokens,
        record.completion_tokens,
        b"" if trace is None else b',"trace_id":"%b"' % trace.trace_id.encode(),
    )


_encode_text = msgspec.json.Encoder().encode


def _quoted(text: str) -> bytes:
    return _encode_text(escape_unprintable(text))


def _values(event: object, *names: str) -> dict[str, Any]:
    """Attributes of an event, as lines have them."""
    values = ((name, getattr(event, name)) for name in names)
    return {name: round(one, 4) if isinstance(one, float) else one for name, one in values}


def _problems(error: str) -> dict[str, Any]:
    return {"error": "; ".join(error.splitlines())}
