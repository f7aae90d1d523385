"""Logging to a file, for tests that read it back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gateway.events import EventBus
from gateway.watch.event_log import EventLog
from gateway.watch.logs import LogFormat, Logs, set_up_logging

PATIENT_SECONDS = 30.0
"""Closing waits for the last lines, however long a slow machine takes to write them."""


class Written:
    """Logging to a file, read back at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_CREAT | os.O_RDWR)
        self.logs: Logs | None = None
        self.bus = EventBus()

    def set_up(
        self,
        level: str = "info",
        form: LogFormat = "auto",
        *,
        draws: Iterable[float] = (),
        names: Mapping[str, str] | None = None,
    ) -> Logs:
        self.logs = set_up_logging(
            level, form, fd=self.fd, environment={}, flush_seconds=PATIENT_SECONDS
        )
        self.event_log = EventLog(
            self.bus, self.logs, iter(draws).__next__, name_of=(names or {}).get
        )
        return self.logs

    def text(self) -> str:
        assert self.logs is not None
        self.logs.close()
        return self.path.read_text()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]
