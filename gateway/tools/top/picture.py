"""Follows `/admin/live`, and what its events amount to: nodes, queue, requests, problems.

A `snapshot` has everything, an `update` what has changed since.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.tools.cli.client import AdminClient, GatewayRefused
from gateway.tools.cli.terminal import CommandFailed

LIVE_PATH = "/admin/live"
FIRST_PAUSE = 0.5  # seconds before the next try; it doubles with each that fails
LONGEST_PAUSE = 10.0

Publish = Callable[[str, Mapping[str, Any]], None]  # gets each event: its name and its data

Row = dict[str, Any]


@dataclass(slots=True)
class FleetPicture:
    """The state of the gateway as last heard of."""

    role: str = "viewer"
    at: float = 0.0  # Unix time of the last event; 0: there was none
    summary: Mapping[str, Any] = field(default_factory=dict)
    problems: list[Row] = field(default_factory=list)
    waiting: list[list[Any]] = field(default_factory=list)
    """Class, model, seconds waited and until the expected start, in the likely order."""
    nodes: dict[str, Row] = field(default_factory=dict)
    requests: dict[str, Row] | None = None  # by id; None: the key may not see them

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


@dataclass(slots=True)
class FeedFollower:
    """`publish` gets the events, `report` why there are none at the moment; None: there are."""

    admin: AdminClient
    publish: Publish
    report: Callable[[str | None], None]
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Follow until `stop`."""
        pause = FIRST_PAUSE
        while not self._stopped.is_set():
            try:
                for event, data in self.admin.events(LIVE_PATH):
                    if self._stopped.is_set():
                        return
                    pause = FIRST_PAUSE
                    self.report(None)
                    self.publish(event, data)
            except GatewayRefused as error:
                self.report(refusal(error))
            except CommandFailed as error:
                self.report(str(error))
            self._stopped.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def stop(self) -> None:
        """End soon: with the next event, or the pause."""
        self._stopped.set()


def refusal(error: GatewayRefused) -> str:
    """Why the gateway shows nothing, with a remedy."""
    if error.code == 404:
        return f"{error}: it is of an older version, which has no live view. Remedy: upgrade it"
    return str(error)
