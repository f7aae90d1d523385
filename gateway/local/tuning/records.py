"""Measurements in a file, one a line, so that a search goes on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gateway.local.tuning.goals import Figures
from gateway.local.tuning.setting import Setting


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line: the figures of a setting, or why there are none."""

    setting: Setting
    figures: Figures | None
    error: str | None
    seconds: float  # that it took
    at: float  # Unix time of its end
    other_work: float | None = None  # CPUs' worth of others meanwhile


@dataclass(frozen=True, slots=True)
class Records:
    """The file at `path`, of which only lines about the same `subject` are used.

    The subject is everything that figures hang on besides the setting: model, server, machine and
    the sizes of the requests.
    """

    path: Path
    subject: dict[str, Any]

    def read(self) -> tuple[list[Measurement], int]:
        """The measurements of the subject in their order, and how many lines are broken."""
        if not self.path.exists():
            return [], 0
        found: list[Measurement] = []
        broken = 0
        for line in self._lines():
            try:
                value = json.loads(line)
                if value["subject"] == self.subject:
                    found.append(_measurement(value))
            except (ValueError, TypeError, KeyError):
                broken += 1
        return found, broken

    def add(self, one: Measurement) -> None:
        """Write a line at once. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"subject": self.subject, **asdict(one)}, sort_keys=True)
        with self.path.open("a+b") as file:
            # A line that a kill has cut short must not swallow this one.
            cut = file.tell() > 0 and not self._ends_whole()
            file.write(("\n" if cut else "").encode() + line.encode() + b"\n")

    def set_aside(self) -> None:
        """Begin anew; what was there stays as `<name>.1`."""
        if self.path.exists():
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))

    def _lines(self) -> Iterator[str]:
        for line in self.path.read_text(errors="replace").splitlines():
            if line.strip():
                yield line

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) == b"\n"


def _measurement(value: dict[str, Any]) -> Measurement:
    return Measurement(
        setting=Setting(**value["setting"]),
        figures=Figures(**value["figures"]) if value["figures"] is not None else None,
        error=value["error"],
        seconds=float(value["seconds"]),
        at=float(value["at"]),
        other_work=value["other_work"],
    )
