"""The display of progress that all commands share: bars on a terminal, else lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich import progress
from rich.text import Text

from gateway.cli.terminal import console
from gateway.config.errors import single_line
from gateway.local.memory import format_gib

if TYPE_CHECKING:
    from gateway.local.server import ServerEvent
    from gateway.workshop.bench.exchange import RequestResult
    from gateway.workshop.bench.load import Load
    from gateway.workshop.bench.report import LoadFigures
    from gateway.workshop.tune.search import Measurement, Setting, TuningSession

LINE_SECONDS = 10.0  # seconds until the second line; each further one comes a bit later
REDRAW_SECONDS = 0.1  # seconds between two changes of a download's bar


class Progress(progress.Progress):
    """Shows progress on stderr within its context.

    The bars are rich's, and are drawn on a terminal alone. Elsewhere the user reads notes.
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

    def note(self, text: str) -> None:
        """Print a line, on a terminal above the bars."""
        self.console.print(Text(single_line(text)), soft_wrap=True)


class StatusProgress(Progress):
    """Shows a thing with a status, such as a batch, and how much of it is done."""

    def __init__(
        self,
        name: str = "",
        *,
        transient: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            progress.SpinnerColumn("line", finished_text=" "),
            progress.BarColumn(24),
            progress.TextColumn("{task.description}", markup=False),
            transient=transient,
            clock=clock,
        )
        self._before = f"{name}: " if name else ""
        self._bar = self.add_task(name, total=None)
        self._status: str | None = None
        self._due_at, self._between = 0.0, LINE_SECONDS

    def show(self, text: str, status: str, done: int = 0, total: int = 0) -> None:
        """Show the text; without a terminal a line for each new status, and now and then."""
        if self.on_terminal:
            shown = single_line(text)
            self.update(self._bar, total=total or None, completed=done, description=shown)
        elif status != self._status or self.clock() >= self._due_at:
            is_new, self._status = status != self._status, status
            self._between = LINE_SECONDS if is_new else min(1.2 * self._between, 6 * LINE_SECONDS)
            self._due_at = self.clock() + self._between
            self.note(f"{self._before}{text}")


class DownloadProgress(StatusProgress):
    """Shows a download."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(transient=True, clock=clock)
        self._name = name
        self._began: tuple[float, int] | None = None  # when, and with how many bytes
        self._redraw_at = 0.0

    def show_bytes(self, done: int, total: int | None) -> None:
        """Show that so many bytes are there."""
        now = self.clock()
        if self._began is None or done < self._began[1]:  # it began, or starts over
            self._began = (now, done)
            self.note(f"Downloading {self._name}")
        elif now < self._redraw_at and done != total:
            return
        self._redraw_at = now + REDRAW_SECONDS
        began, before = self._began
        speed = (done - before) / (now - began) if now > began else 0.0
        told = f"  {format_gib(done)}"
        if total:
            told += f" of {format_gib(total)} ({done / total:.0%})"
        told += f", {speed / (1 << 20):.1f} MiB/s"
        if total and speed > 0:
            left = (total - done) / speed
            told += (
                f", about {left:.0f} s left" if left < 90 else f", about {left / 60:.0f} min left"
            )
        self.show(told, f"from {before}", done, total or 0)


class StartupProgress(Progress):
    """Shows how local servers start; what they do later is logged."""

    def __init__(self, servers: Sequence[str]) -> None:
        super().__init__(
            progress.TextColumn(" "),
            progress.SpinnerColumn("line", finished_text=" "),
            progress.TextColumn("{task.description}", markup=False),
            progress.TimeElapsedColumn(),
            transient=False,
        )
        self._rows = {name: self.add_task(name, total=1) for name in servers}
        self._ended = False

    def stop(self) -> None:
        """End the display."""
        super().stop()
        self._ended = True

    def show(self, event: ServerEvent) -> None:
        """Show what happened to a server, or log it after the start."""
        import structlog

        if self._ended:
            log = structlog.get_logger()
            if event.kind == "exited":
                how, restart_in = event.detail, event.seconds
                log.warning("server exited", server=event.name, how=how, restart_in=restart_in)
            elif event.kind == "ready":
                log.info("server ready", server=event.name, seconds=round(event.seconds, 1))
            return
        told = {
            "started": f"started on {event.detail}",
            "loading": "loading the model",
            "ready": f"ready after {event.seconds:.1f} s",
            "exited": f"{event.detail}, restarts in {event.seconds:g} s",
        }[event.kind]
        if self.on_terminal:
            done = int(event.kind == "ready")
            row = self._rows[event.name]
            self.update(row, description=f"{event.name}: {told}", completed=done)
        else:
            self.note(f"  {event.name}: {told}")


class BenchProgress(StatusProgress):
    """Shows the requests of each load of a benchmark."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(transient=True, clock=clock)
        self._load: Load | None = None
        self._done = self._failed = self._tokens = 0
        self._began = 0.0

    def phase(self, text: str) -> None:
        """What comes before the loads."""
        self.show(text, text)

    def load_started(self, load: Load) -> None:
        """A load begins."""
        self._load = load
        self._done = self._failed = self._tokens = 0
        self._began = self.clock()
        self.show(load.label, load.label)

    def request_done(self, result: RequestResult) -> None:
        """A request has ended."""
        from gateway.workshop.bench.load import MOST_REQUESTS

        if (load := self._load) is None:
            return
        self._done += 1
        self._failed += result.error is not None
        self._tokens += result.tokens if result.error is None else 0
        speed = self._tokens / max(1e-3, self.clock() - self._began)
        failed = f", {self._failed} failed" if self._failed else ""
        total = load.requests if load.requests < MOST_REQUESTS else 0
        of = f"/{total}" if total else ""
        told = f"{load.label}, {speed:.1f} tokens/s{failed}: {self._done}{of} done"
        self.show(told, load.label, self._done, total)

    def load_done(self, found: LoadFigures) -> None:
        """A load has ended."""
        from gateway.workshop.bench.report import milliseconds

        ttft = "-" if found.ttft is None else milliseconds(found.ttft.p50)
        self.note(
            f"{found.load.label}: {found.requests} requests in {found.seconds:.1f} s, "
            f"{found.failed} failed, TTFT {ttft}, {found.total_tokens_per_second:.1f} tokens/s"
        )


class TuningProgress(Progress):
    """Prints a line for each measurement, and on a terminal a bar of the time used."""

    def __init__(self, session: TuningSession, minutes: float) -> None:
        super().__init__(
            progress.BarColumn(24),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.description}", markup=False),
        )
        self._session = session
        self._seconds = self._seconds_left = minutes * 60
        self._bar = self.add_task("", total=self._seconds)
        self._estimated = False

    def measurement_started(self, setting: Setting, left: float, each: float | None) -> None:
        """A measurement begins: with so many seconds left, and for about so many."""
        self._seconds_left = left
        if each is not None and not self._estimated:
            self._estimated = True
            expected = self._session.search.expected_measurements()
            whole = expected * each
            verdict = "the time is enough"
            if whole > left:
                verdict = f"the time is for {int(left / each)} of them; more: --minutes"
            self.note(
                f"A measurement takes about {each:.0f} s, about {expected} of them "
                f"{whole / 60:.0f} min: {verdict}."
            )
        knob = (self._session.search.current_knob or "rule of thumb").replace("_", "-")
        self.update(self._bar, completed=self._seconds - left, description=f"{knob}: {setting}")

    def measurement_done(self, measurement: Measurement) -> None:
        """A measurement is done."""
        from gateway.workshop.tune.benchmark import MOST_OTHER_WORK
        from gateway.workshop.tune.report import format_figures

        left = max(0.0, self._seconds_left - measurement.seconds) / 60
        figures, other_work = measurement.figures, measurement.other_work or 0.0
        result = format_figures(figures) if figures else f"does not run: {measurement.error}"
        is_busy = other_work > MOST_OTHER_WORK
        busy = f"; other work took {other_work:.1f} CPUs" if is_busy else ""
        self.note(
            f"{len(self._session.measurements):>3}. {measurement.setting}: {result} "
            f"({measurement.seconds:.0f} s, {left:.1f} min left{busy})"
        )
