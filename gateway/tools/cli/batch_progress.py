"""Shows how an upload and a batch go: live on a terminal, else in lines; and waits for the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from gateway.config.errors import single_line
from gateway.tools.cli.batch_client import BatchClient, Patience
from gateway.tools.cli.batch_results import ENDED
from gateway.tools.cli.terminal import console, print_note

FIRST_POLL, LONGEST_POLL = 0.25, 3.0
"""Seconds between questions for a batch's state; they double."""

LINE_SECONDS = 10.0
"""Seconds between two lines of progress, where the output is no terminal; they grow to six times
that."""


@dataclass(frozen=True, slots=True)
class ShownProgress:
    """How far a batch is. None: not known."""

    status: str
    total: int
    done: int
    failed: int
    tokens_per_second: float | None
    expected_end: float | None
    """Unix time."""
    cost: float | None
    expected_cost: float | None
    paused: str | None
    """Why it is paused; None: it is not."""


def progress_of(batch: Mapping[str, Any]) -> ShownProgress:
    """What a batch's object says of its progress."""
    counts, own = _mapping(batch.get("request_counts")), _mapping(batch.get("llama_gateway"))
    paused = own.get("paused")
    why = None
    if isinstance(paused, dict):
        why = str(paused.get("reason") or "paused")
    return ShownProgress(
        str(batch.get("status")),
        int(_number(counts.get("total")) or 0),
        int(_number(counts.get("completed")) or 0),
        int(_number(counts.get("failed")) or 0),
        _number(own.get("tokens_per_second")),
        _number(own.get("expected_end")),
        _number(own.get("cost")),
        _number(own.get("expected_cost")),
        why,
    )


@dataclass(slots=True)
class Estimate:
    """Fills in what the gateway does not tell: the expected end, from the lines done so far."""

    clock: Callable[[], float] = time.time
    _first: tuple[float, int] | None = field(default=None)
    """The time and the ended lines, when this was first asked."""

    def end(self, progress: ShownProgress) -> float | None:
        """The Unix time at which it ends, as expected."""
        if progress.expected_end is not None or progress.status != "in_progress":
            return progress.expected_end
        now, ended = self.clock(), progress.done + progress.failed
        if self._first is None:
            self._first = now, ended
            return None
        began, before = self._first
        if ended <= before or progress.paused is not None:
            return None
        return now + (progress.total - ended) * (now - began) / (ended - before)


def describe(progress: ShownProgress, expected_end: float | None, now: float) -> str:
    """Progress in one line."""
    parts = [progress.status.replace("_", " ")]
    if progress.total:
        parts.append(f"{progress.done:,} of {progress.total:,} done")
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    if progress.paused is not None:
        parts.append(f"paused ({progress.paused})" if progress.paused != "paused" else "paused")
    if progress.status not in ENDED:
        if progress.tokens_per_second is not None:
            parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
        if expected_end is not None:
            parts.append(f"ends {moment(expected_end, now)}")
    return single_line(", ".join(parts))


def moment(then: float, now: float) -> str:
    """A time to come in words: its clock time, and in how long."""
    left = max(0.0, then - now)
    form = "%H:%M:%S" if left < 3600 else "%H:%M" if left < 72_000 else "%d %b %H:%M"
    return f"about {time.strftime(form, time.localtime(then))} (in {span(left)})"


def span(seconds: float) -> str:
    """A time span in one or two units."""
    whole = round(seconds)
    for size, unit, below, small in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            first, rest = divmod(whole, size)
            return f"{first} {unit} {rest // below} {small}" if rest // below else f"{first} {unit}"
    return f"{whole // 60} min" if whole >= 120 else f"{whole} s"


class UploadProgress:
    """A file that shows how much of it was read, within its context."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars

        output = console(sys.stderr)
        self._file = file
        self._read = 0
        self._bars = Bars(
            TextColumn("uploading"),
            BarColumn(24),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=output,
            transient=True,
            disable=not output.is_terminal or output.is_dumb_terminal,
        )
        self._task = self._bars.add_task("", total=size)

    @property
    def file(self) -> BinaryIO:
        """The file, for the one who reads it."""
        return cast("BinaryIO", self)

    def read(self, size: int = -1) -> bytes:
        """Read some of it."""
        piece = self._file.read(size)
        self._read += len(piece)
        self._bars.update(self._task, completed=self._read)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place in it."""
        at = self._file.seek(offset, whence)
        self._read = at if whence == 0 else self._read
        return at

    def tell(self) -> int:
        """The place in it."""
        return self._file.tell()

    def fileno(self) -> int:
        """Its descriptor, by which its size is found out."""
        return self._file.fileno()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._bars.stop()


class BatchDisplay:
    """Shows the progress of one batch within its context."""

    def __init__(self, id_: str, clock: Callable[[], float] = time.time) -> None:
        from rich.progress import BarColumn, SpinnerColumn, TextColumn
        from rich.progress import Progress as Bars

        output = console(sys.stderr)
        self._id = id_
        self._clock = clock
        self._estimate = Estimate(clock)
        self._on_terminal = output.is_terminal and not output.is_dumb_terminal
        self._bars = Bars(
            SpinnerColumn("line", finished_text=" "),
            BarColumn(24),
            TextColumn("{task.description}", markup=False),
            console=output,
            disable=not self._on_terminal,
        )
        self._task = self._bars.add_task(id_, total=None)
        self._next_line = 0.0
        self._between = LINE_SECONDS
        self._status = ""

    def update(self, batch: Mapping[str, Any]) -> None:
        """Show what the batch's object says."""
        progress, now = progress_of(batch), self._clock()
        text = describe(progress, self._estimate.end(progress), now)
        if self._on_terminal:
            self._bars.update(
                self._task,
                total=progress.total or None,
                completed=progress.done + progress.failed,
                description=text,
            )
            return
        status = f"{progress.status} {progress.paused}"
        if status != self._status or now >= self._next_line:
            if status == self._status:
                self._between = min(1.2 * self._between, 6 * LINE_SECONDS)
            self._status, self._next_line = status, now + self._between
            print_note(f"{self._id}: {text}")

    def note(self, message: str) -> None:
        """Tell something beside the progress."""
        if self._on_terminal:
            from rich.text import Text

            self._bars.console.print(Text(single_line(message)), soft_wrap=True)
        else:
            print_note(message)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._bars.stop()


def wait_for_end(
    client: BatchClient,
    batch: dict[str, Any],
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """The batch when it has ended, shown meanwhile. Raises CommandFailed.

    A gateway that is away for less than `seconds` is waited for.
    """
    id_, interval = str(batch.get("id")), FIRST_POLL
    with BatchDisplay(id_) as display:
        patience = Patience(seconds, sleep=sleep, note=display.note)
        display.update(batch)
        while batch.get("status") not in ENDED:
            sleep(interval)
            interval = min(1.5 * interval, LONGEST_POLL)
            batch = patience.call(lambda: client.batch(id_))
            display.update(batch)
    return batch


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
