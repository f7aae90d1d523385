"""What the events of `/admin/live` amount to: the nodes, the queue, the requests, the problems.

A `snapshot` has everything, an `update` what has changed since. Pure: no terminal, no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(slots=True)
class FleetPicture:
    """The state of the gateway as last heard of."""

    role: str = "viewer"
    at: float = 0.0
    """Unix time of the last event; 0: there was none."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    problems: list[Row] = field(default_factory=list)
    waiting: list[list[Any]] = field(default_factory=list)
    """Class, model, seconds waited and until the expected start, in the likely order."""
    nodes: dict[str, Row] = field(default_factory=dict)
    requests: dict[str, Row] | None = None
    """By id; None: the key may not see them."""

    def apply(self, event: str, data: Mapping[str, Any]) -> None:
        """Take in an event; one of another kind is ignored."""
        if event == "hello":
            self.role = str(data.get("role", self.role))
        elif event == "snapshot":
            self.nodes, self.requests = {}, None
            self._take(data)
        elif event == "update":
            self._take(data)

    def _take(self, data: Mapping[str, Any]) -> None:
        self.at = float(data.get("at") or self.at)
        self.summary = _mapping(data.get("summary")) or self.summary
        if isinstance(problems := data.get("problems"), list):
            self.problems = list(_rows(problems))
        if isinstance(waiting := data.get("waiting"), list):
            self.waiting = [row for row in waiting if isinstance(row, list) and len(row) >= 4]
        _merge(self.nodes, "name", data.get("nodes"), data.get("gone_nodes"))
        if isinstance(data.get("requests"), list):
            self.requests = {} if self.requests is None else self.requests
        if self.requests is not None:
            _merge(self.requests, "id", data.get("requests"), data.get("ended_requests"))


def _merge(rows: dict[str, Row], key: str, changed: object, gone: object) -> None:
    for row in _rows(changed):
        name = str(row.get(key))
        rows[name] = {**rows.get(name, {}), **row}
    for name in gone if isinstance(gone, list) else ():
        rows.pop(str(name), None)


def _rows(value: object) -> Iterator[Row]:
    if isinstance(value, list):
        yield from (row for row in value if isinstance(row, dict))


def _mapping(value: object) -> Mapping[str, Any] | None:
    return value if isinstance(value, dict) else None
