"""Follows `/admin/live` in a thread, and comes back when the connection is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.tools.cli.client import AdminClient, GatewayRefused
from gateway.tools.cli.terminal import CommandFailed

LIVE_PATH = "/admin/live"

FIRST_PAUSE = 0.5
"""Seconds before the next try; it doubles with each that fails."""

LONGEST_PAUSE = 10.0

Publish = Callable[[str, Mapping[str, Any]], None]
"""Gets each event: its name and its data."""


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
