"""The display of progress that all commands share: bars on a terminal, else lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich import progress
from rich.text import Text

from gateway.cli.terminal import console
from gateway.config.errors import single_line
from gateway.local.memory import format_gib

LINE_SECONDS, REDRAW_SECONDS = 10.0, 0.1
"""Seconds between two lines; on a terminal between two changes of a download's bar."""


class Progress(progress.Progress):
    """Shows progress on stderr within its context.

    The bars are rich's, and are drawn on a terminal alone. Elsewhere the user reads notes, of which
    `due` spaces those that come now and then.
    """

    def __init__(
        self,
        *columns: progress.ProgressColumn,
        transient: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        output = console(sys.stderr)
        self.on_terminal = output.is_terminal and not output.is_dumb_terminal
        super().__init__(
            *columns, console=output, transient=transient, disable=not self.on_terminal
        )
        self.clock = clock
        self.ended = False
        self._due_from = 0.0

    def stop(self) -> None:
        """End the display."""
        super().stop()
        self.ended = True

    def note(self, text: str) -> None:
        """Print a line, on a terminal above the bars."""
        self.console.print(Text(single_line(text)), soft_wrap=True)

    def begin(self) -> None:
        """Let the time until the next note begin now."""
        self._due_from = self.clock()

    def due(self, seconds: float) -> bool:
        """Return True once `seconds` have passed since `begin`, or since it was last True."""
        if self.clock() - self._due_from < seconds:
            return False
        self.begin()
        return True


class StatusProgress(Progress):
    """Shows a thing with a status, such as a batch, and how much of it is done."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(
            progress.SpinnerColumn("line", finished_text=" "),
            progress.BarColumn(24),
            progress.TextColumn("{task.description}", markup=False),
            transient=False,
            clock=clock,
        )
        self._name = name
        self._bar = self.add_task(name, total=None)
        self._status: str | None = None
        self._between = LINE_SECONDS

    def show(self, text: str, status: str, done: int, total: int) -> None:
        """Show the text; without a terminal a line for each new status, and now and then."""
        if self.on_terminal:
            self.update(
                self._bar, total=total or None, completed=done, description=single_line(text)
            )
            return
        if status != self._status:
            self._status = status
            self.begin()
        elif self.due(self._between):
            self._between = min(1.2 * self._between, 6 * LINE_SECONDS)
        else:
            return
        self.note(f"{self._name}: {text}")


class DownloadProgress(Progress):
    """Shows a download."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(
            progress.BarColumn(24),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            clock=clock,
        )
        self._name = name
        self._bar = self.add_task("", total=None, visible=False)
        self._began: tuple[float, int] | None = None  # when, and with how many bytes

    def show(self, done: int, total: int | None) -> None:
        """Show that so many bytes are there."""
        if self._began is None or done < self._began[1]:  # it began, or starts over
            self._began = (self.clock(), done)
            self.begin()
            self.reset(self._bar, total=total, completed=done, visible=True)
            size = "" if total is None else f", {format_gib(total)}"
            rest = f", from {format_gib(done)} on" if done else ""
            if not self.on_terminal:
                self.note(f"Downloading {self._name}{size}{rest}")
            elif done == 0:
                self.note(f"Downloading {self._name}")
        elif self.on_terminal and (done == total or self.due(REDRAW_SECONDS)):
            self.update(self._bar, completed=done, total=total)
        elif not self.on_terminal and self.due(LINE_SECONDS):
            began, before = self._began
            self.note(f"  {describe_download(done, total, done - before, self.clock() - began)}")


def describe_download(done: int, total: int | None, gained: int, seconds: float) -> str:
    """Say how far a download is, how fast, and when it ends."""
    speed = gained / seconds if seconds > 0 else 0.0
    shown = format_gib(done)
    if total:
        shown += f" of {format_gib(total)} ({done / total:.0%})"
    shown += f", {speed / (1 << 20):.1f} MiB/s"
    if total and speed > 0:
        left = (total - done) / speed
        shown += f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"
    return shown
