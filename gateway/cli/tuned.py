"""What `llama-gateway tune` shows: how far it is, and what it has found."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from gateway.cli.terminal import console, note, put_table
from gateway.config.problems import printable
from gateway.local.memory import gib
from gateway.local.tuning.host_vars import figures_text
from gateway.local.tuning.other_work import LIMIT
from gateway.local.tuning.records import Measurement
from gateway.local.tuning.report import Report, Row
from gateway.local.tuning.session import Session, Step
from gateway.local.tuning.setting import PINNED

# Short, so that a terminal of 80 characters shows them in one line.
COLUMNS = ("THR", "BATCH", "SLOTS", "READS", "WRITES", "BUSY", "STALL", "MEM", "SCORE", "GAIN", "N")


class Telling:
    """A line for each measurement, and on a terminal a bar of the time that is used up."""

    def __init__(self, session: Session, minutes: float) -> None:
        output = console(sys.stderr)
        self._live = output.is_terminal and not output.is_dumb_terminal
        self._session = session
        self._seconds = minutes * 60
        self._left = self._seconds
        self._bar = Progress(
            BarColumn(24),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=output,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task("", total=self._seconds)
        self._estimated = False

    def begins(self, step: Step) -> None:
        """A measurement begins."""
        self._left = step.seconds_left
        if step.seconds_each is not None and not self._estimated:
            self._estimated = True
            self._estimate(step.seconds_each, step.seconds_left)
        search = self._session.search
        knob = "rule of thumb" if search.turning is None else search.turning.replace("_", "-")
        self._bar.update(
            self._task,
            completed=self._seconds - step.seconds_left,
            description=f"{knob}: {step.setting}",
        )

    def ends(self, one: Measurement) -> None:
        """A measurement is done."""
        left = max(0.0, self._left - one.seconds) / 60
        what = figures_text(one.figures) if one.figures else f"does not run: {one.error}"
        busy = (
            f"; meanwhile others used {one.other_work:.1f} CPUs"
            if (one.other_work or 0.0) > LIMIT
            else ""
        )
        self._say(
            f"{len(self._session.done):>3}. {one.setting}: {what} "
            f"({one.seconds:.0f} s, {left:.1f} min left{busy})"
        )

    def _estimate(self, each: float, left: float) -> None:
        expected = self._session.search.steps_expected()
        whole = expected * each
        verdict = (
            "the time is enough"
            if whole <= left
            else f"the time is for {int(left / each)} of them; more: --minutes"
        )
        self._say(
            f"A measurement takes about {each:.0f} s, about {expected} of them "
            f"{whole / 60:.0f} min: {verdict}."
        )

    def _say(self, line: str) -> None:
        if self._live:
            self._bar.console.print(Text(printable(line)), soft_wrap=True)
        else:
            note(line)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()


def put_report(found: Report) -> None:
    """The table of all settings, the best first, and what it allows to say."""
    pinnings = len(found.session.search.space.pinning) > 1
    put_table(
        (*COLUMNS, "PINNED") if pinnings else COLUMNS,
        (_cells(row, pinning=pinnings) for row in found.rows),
        state=0,
    )
    request = found.session.request
    print(
        "\nREADS, WRITES (alone), BUSY (all slots): tokens/s of one server. STALL: seconds.\n"
        f"SCORE: seconds for {request.prompt} + {request.answer} tokens, goal "
        f"{found.session.goal}. GAIN: against the rule of thumb;\nin brackets where it can't be "
        "told from noise. N: times measured.\n"
    )
    for setting, error in found.session.errors().items():
        print(f"Does not run: {setting}: {printable(error)}")
    for line in found.verdict():
        print(line)


def _cells(row: Row, *, pinning: bool) -> list[object]:
    setting, figures = row.setting, row.figures
    gain = f"{row.gain:+.1%}"
    return [
        str(setting.threads),
        f"{setting.batch}/{setting.micro_batch}",
        str(setting.slots),
        _short(figures.prefill),
        _short(figures.decode),
        _short(figures.decode_busy),
        None if figures.stall is None else f"{figures.stall:.2f}",
        None if figures.memory is None else gib(figures.memory),
        f"{row.score:.2f}",
        gain if row.told_apart else f"({gain})",
        str(row.times),
        *([PINNED[setting.pinning]] if pinning else []),
    ]


def _short(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 100 else f"{speed:.1f}"
