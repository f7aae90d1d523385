"""The running fleet: follows `/admin/live`, keeps what it tells, and makes tables of it.

Each cell of a table is plain text without control characters, whatever a node or a client has named
itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.cli.terminal import caller_text, format_cell, state_in_words

LIVE_PATH = "/admin/live"
Row = dict[str, Any]


@dataclass(slots=True)
class FleetPicture:
    """The state of the gateway as last heard of.

    A `snapshot` has everything, an `update` what has changed since.
    """

    at: float = 0.0  # Unix time of the last event; 0: there was none
    summary: Mapping[str, Any] = field(default_factory=dict)
    problems: list[Row] = field(default_factory=list)
    waiting: list[list[Any]] = field(default_factory=list)
    """Class, model, seconds waited and until the expected start, in the likely order."""
    nodes: dict[str, Row] = field(default_factory=dict)
    requests: dict[str, Row] | None = None  # by id; None: the key may not see them

    def apply(self, event: str, data: Mapping[str, Any]) -> None:
        """Take in an event; one of another kind is ignored."""
        if event == "snapshot":
            self.nodes, self.requests = {}, None
        elif event != "update":
            return
        self.at = data.get("at") or self.at
        self.summary = data.get("summary") or self.summary
        self.problems = data.get("problems", self.problems)
        self.waiting = data.get("waiting", self.waiting)
        _merge(self.nodes, "name", data.get("nodes", ()), data.get("gone_nodes", ()))
        if self.requests is None and data.get("requests") is not None:
            self.requests = {}
        if self.requests is not None:
            _merge(self.requests, "id", data.get("requests", ()), data.get("ended_requests", ()))


def _merge(rows: dict[str, Row], key: str, changed: Iterable[Row], gone: Iterable[str]) -> None:
    for row in changed:
        rows[row[key]] = {**rows.get(row[key], {}), **row}
    for name in gone:
        rows.pop(name, None)


# Tables: their columns, their order, and what a filter leaves.


# States of nodes, what needs a look first.
STATE_ORDER = (
    *("down", "ejected", "loading", "mute", "starting", "degraded", "draining"),
    *("failed", "unloading", "standby", "sleeping", "ready", "unloaded"),
)

CLASS_ORDER = ("urgent", "premium", "normal", "batch")
MOST_DRAWN_SLOTS = 8
# Free, reading, writing, held after its client has left, used by another client of the server.
_SLOTS = {"f": "·", "r": "R", "w": "W", "h": "H", "o": "o"}


class Line(NamedTuple):
    """A row of a table."""

    key: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, its text, and the value by which it sorts; None: as the text."""

    title: str
    text: Callable[[Row], str]
    order: Callable[[Row], Any] | None = None


def slots_drawn(row: Row) -> str:
    """The slots of a node, a letter each: `RW··`; more than eight end in `+`."""
    letters = [_SLOTS.get(one, "?") for one in str(row.get("cells") or "") if not one.isdigit()]
    shown = "".join(letters[:MOST_DRAWN_SLOTS])
    return shown + "+" if len(letters) > MOST_DRAWN_SLOTS else shown


def _number(name: str) -> Callable[[Row], float]:
    return lambda row: -math.inf if row.get(name) is None else row[name]


def _text(name: str) -> Callable[[Row], str]:
    return lambda row: format_cell(row.get(name))


def _by(order: Sequence[str], name: str) -> Callable[[Row], int]:
    places = {value: place for place, value in enumerate(order)}
    return lambda row: places.get(str(row.get(name)), len(order))


def _speed(name: str, share: str) -> Callable[[Row], str]:
    """Tokens a second, and how they compare with the node's own past if that is known."""

    def read(row: Row) -> str:
        text, part = format_cell(row.get(name)), row.get(share)
        return text if part is None or part >= 0.9 else f"{text} {part:.0%}"

    return read


def _busy(row: Row) -> str:
    return f"{format_cell(row.get('slots_busy'))}/{format_cell(row.get('slots_total'))}"


def _reason(row: Row) -> str:
    reason = "" if row.get("state") == "ready" else format_cell(row.get("reason"))
    return format_cell(row["drift"]) if row.get("drift") else reason


def _labels(row: Row) -> str:
    """The labels, as the filters of other commands take them: `rack=b`."""
    pairs = sorted((row.get("labels") or {}).items())
    return " ".join(f"{format_cell(name)}={format_cell(value)}" for name, value in pairs)


NODE_COLUMNS = (
    Column("NODE", _text("name")),
    Column("STATE", state_in_words, _by(STATE_ORDER, "state")),
    Column("SLOTS", slots_drawn, _number("slots_busy")),
    Column("BUSY", _busy, _number("slots_busy")),
    Column("READ/S", _speed("prefill_tps", "prefill_share"), _number("prefill_tps")),
    Column("WRITE/S", _speed("decode_tps", "decode_share"), _number("decode_tps")),
    Column("FAILED", _text("failures"), _number("failures")),
    Column("REASON", _reason),
    Column("MODELS", _text("models")),
    Column("CACHED", _text("cached_tokens"), _number("cached_tokens")),
    Column("HOST", _text("host")),
    Column("LABELS", _labels),
)


def request_columns(now: float) -> tuple[Column, ...]:
    """The columns of requests at this Unix time."""

    def age(row: Row) -> float:
        return max(0.0, now - float(row.get("received_at", now)))

    return (
        Column("REQUEST", _text("request_id")),
        Column("STATE", _text("state")),
        Column("CLASS", _text("class"), _by(CLASS_ORDER, "class")),
        Column("NODE", _text("node")),
        Column("AGE", lambda row: duration(age(row)), lambda row: -age(row)),
        Column("TTFT", lambda row: _seconds(row.get("ttft")), _number("ttft")),
        Column("TOKENS", _text("tokens"), _number("tokens")),
        Column("TOK/S", _text("tokens_per_second"), _number("tokens_per_second")),
        Column("CALLER", caller_text),
        Column("MODEL", _text("model")),
        Column("START IN", lambda row: _seconds(row.get("expected_start"))),
    )


QUEUE_TITLES = ("PLACE", "CLASS", "MODEL", "WAITED", "START IN")


def queue_lines(picture: FleetPicture, words: str = "") -> list[Line]:
    """The waiting requests in their likely order."""
    found = []
    for place, (priority, model, waited, start, *_) in enumerate(picture.waiting, 1):
        shown = format_cell(priority), format_cell(model), _seconds(waited), _seconds(start)
        found.append(Line(str(place), (str(place), *shown)))
    return [line for line in found if _matches(line.cells, words)]


def node_lines(
    picture: FleetPicture, sort: int = 1, words: str = "", *, descending: bool = False
) -> list[Line]:
    """The nodes, by the column of this number; `words` must all be in a row.

    A router's models follow it.
    """
    of = {name: str(row.get("router") or name) for name, row in picture.nodes.items()}
    rows = _lines(NODE_COLUMNS, picture.nodes.items(), sort, "", descending=descending)
    places = {line.key: place for place, line in enumerate(rows)}
    rows.sort(key=lambda line: (places.get(of[line.key], len(rows)), of[line.key] != line.key))
    return [line for line in rows if _matches(line.cells, words)]


def request_lines(
    picture: FleetPicture, sort: int = 4, words: str = "", *, descending: bool = False
) -> list[Line]:
    """The requests in flight, by the column of this number."""
    rows = (picture.requests or {}).items()
    return _lines(request_columns(picture.at), rows, sort, words, descending=descending)


def _lines(
    columns: Sequence[Column],
    rows: Iterable[tuple[str, Row]],
    sort: int,
    words: str,
    *,
    descending: bool,
) -> list[Line]:
    column = columns[sort]
    order = column.order or column.text
    chosen = sorted(rows, key=lambda row: order(row[1]), reverse=descending)
    lines = (Line(key, tuple(one.text(row) for one in columns)) for key, row in chosen)
    return [line for line in lines if _matches(line.cells, words)]


def _matches(cells: Iterable[str], words: str) -> bool:
    text = " ".join(cells).lower()
    return all(word in text for word in words.lower().split())


def duration(seconds: float) -> str:
    """A duration as people read it: `4.2s`, `3m10s`, `2h05m`."""
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _seconds(value: float | None) -> str:
    return "-" if value is None else duration(value)


def headline(picture: FleetPicture) -> str:
    """The gateway in one line."""
    if not picture.at:
        return "waiting for the gateway"
    get = picture.summary.get
    waiting = {name: count for name, count in (get("queue") or {}).items() if count}
    speed = sum(row.get("tokens_per_second") or 0 for row in (picture.requests or {}).values())
    states = get("states") or {}
    working = sum(states.get(name, 0) for name in ("ready", "degraded", "mute", "sleeping"))
    parts = [
        "ready" if get("ready") else f"not ready: {format_cell(get('reason'))}",
        f"{working} of {sum(states.values())} nodes work",
        f"slots {format_cell(get('slots_busy'))}/{format_cell(get('slots_total'))}",
        f"{sum(waiting.values())} wait" + "".join(f", {n} {c}" for c, n in waiting.items()),
        f"{format_cell(get('in_flight'))} in flight",
    ]
    if speed:
        parts.append(f"{speed:.0f} tokens/s")
    if edges := get("edges"):
        shares = "+".join(f"{100 * one['cpu_share']:.0f}" for one in edges)
        streams = "+".join(str(one["streams"]) for one in edges)
        parts.append(f"edges {streams} requests, {shares} % CPU")
    if cluster := get("cluster"):  # who leads, and what each member's edges serve
        told = [
            f"{format_cell(one.get('name'))} {format_cell(one.get('role'))} "
            + "+".join(str(edge.get("streams")) for edge in one.get("edges") or ())
            for one in cluster.get("members") or ()
        ]
        parts.append("; ".join(one.rstrip() for one in told))
    return " | ".join(parts)


def problem_lines(
    picture: FleetPicture, most: int, *, commands: bool = False
) -> list[tuple[str, str]]:
    """Severity and text of the first problems, with cause and remedy; the rest as a number.

    `commands`: the remedy's command lines as well.
    """
    found = []
    for one in picture.problems[:most]:
        told = (format_cell(one.get(key)) for key in ("severity", "title", "cause", "remedy"))
        severity, title, cause, remedy = told
        whose = f" Caller: {caller_text(one)}." if one.get("caller") else ""
        text = f"{title}: {cause}{whose} Do: {remedy}"
        if commands and (lines := one.get("commands")):
            text += " Run: " + "; ".join(format_cell(line) for line in lines)
        found.append((severity, text))
    left = len(picture.problems) - most
    return found if left <= 0 else [*found, ("notice", f"{left} more: key 4")]
