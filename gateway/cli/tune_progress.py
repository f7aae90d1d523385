"""Shows how `tune` measures, and its report."""

from __future__ import annotations

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from gateway.cli.progress import Progress
from gateway.cli.terminal import print_table
from gateway.config.errors import single_line
from gateway.local.memory import format_gib
from gateway.workshop.tune.benchmark import MOST_OTHER_WORK
from gateway.workshop.tune.report import SettingResult, TuningReport, format_figures
from gateway.workshop.tune.search import (
    PINNING_LABELS,
    Measurement,
    PlannedMeasurement,
    TuningSession,
)

# Short, so that a row fits into 80 characters.
REPORT_COLUMNS = (
    "THR",
    "BATCH",
    "SLOTS",
    "READS",
    "WRITES",
    "BUSY",
    "STALL",
    "MEM",
    "SCORE",
    "GAIN",
    "N",
)


class TuningProgress(Progress):
    """Prints a line for each measurement, and on a terminal a bar of the time used."""

    def __init__(self, session: TuningSession, minutes: float) -> None:
        super().__init__(
            BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
        )
        self._session = session
        self._seconds = self._seconds_left = minutes * 60
        self._bar = self.add_task("", total=self._seconds)
        self._estimated = False

    def measurement_started(self, planned: PlannedMeasurement) -> None:
        """A measurement begins."""
        self._seconds_left = planned.seconds_left
        if planned.seconds_each is not None and not self._estimated:
            self._estimated = True
            self._estimate(planned.seconds_each, planned.seconds_left)
        search = self._session.search
        knob = (
            "rule of thumb"
            if search.current_knob is None
            else search.current_knob.replace("_", "-")
        )
        self.update(
            self._bar,
            completed=self._seconds - planned.seconds_left,
            description=f"{knob}: {planned.setting}",
        )

    def measurement_done(self, measurement: Measurement) -> None:
        """A measurement is done."""
        left = max(0.0, self._seconds_left - measurement.seconds) / 60
        result = (
            format_figures(measurement.figures)
            if measurement.figures
            else f"does not run: {measurement.error}"
        )
        busy = (
            f"; other work took {measurement.other_work:.1f} CPUs"
            if (measurement.other_work or 0.0) > MOST_OTHER_WORK
            else ""
        )
        self.note(
            f"{len(self._session.measurements):>3}. {measurement.setting}: {result} "
            f"({measurement.seconds:.0f} s, {left:.1f} min left{busy})"
        )

    def _estimate(self, each: float, left: float) -> None:
        expected = self._session.search.expected_measurements()
        whole = expected * each
        verdict = (
            "the time is enough"
            if whole <= left
            else f"the time is for {int(left / each)} of them; more: --minutes"
        )
        self.note(
            f"A measurement takes about {each:.0f} s, about {expected} of them "
            f"{whole / 60:.0f} min: {verdict}."
        )


def print_report(report: TuningReport) -> None:
    """Print the table of all settings, the best first, and the verdict."""
    pinnings = len(report.session.search.space.pinning) > 1
    energy = any(row.figures.decode_joules is not None for row in report.results)
    print_table(
        (*REPORT_COLUMNS, *(["J/TOK"] if energy else []), *(["PINNED"] if pinnings else [])),
        (_cells(row, pinning=pinnings, energy=energy) for row in report.results),
        state_column=0,
    )
    request = report.session.request
    print(
        "\nREADS, WRITES (alone), BUSY (all slots): tokens/s of one server. STALL: seconds.\n"
        f"SCORE: seconds for {request.prompt} + {request.answer} tokens, goal "
        f"{report.session.goal}. GAIN: against the rule of thumb;\nin brackets where it may be "
        "noise. N: times measured."
        + (" J/TOK: joules for a token written in all slots.\n" if energy else "\n")
    )
    for setting, error in report.session.errors().items():
        print(f"Does not run: {setting}: {single_line(error)}")
    for line in report.verdict():
        print(line)


def _cells(row: SettingResult, *, pinning: bool, energy: bool) -> list[object]:
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
        None if figures.memory is None else format_gib(figures.memory),
        f"{row.score:.2f}",
        gain if row.significant else f"({gain})",
        str(row.repeats),
        *([_joules(figures.decode_joules)] if energy else []),
        *([PINNING_LABELS[setting.pinning]] if pinning else []),
    ]


def _joules(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


def _short(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 100 else f"{speed:.1f}"
