"""Shows how a benchmark goes: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from gateway.config.errors import single_line
from gateway.tools.bench.exchange import RequestResult
from gateway.tools.bench.load import MOST_REQUESTS, Load
from gateway.tools.bench.report import LoadResult, milliseconds
from gateway.tools.cli.terminal import console, print_note

LINE_SECONDS = 15.0
"""Between two lines of progress, where the output is no terminal."""


class BenchProgress:
    """Shows the progress of a run within its context."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        output = console(sys.stderr)
        self._clock = clock
        self._on_terminal = output.is_terminal and not output.is_dumb_terminal
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=output,
            transient=True,
            disable=not self._on_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._load: Load | None = None
        self._done = self._failed = self._tokens = 0
        self._began = self._told = 0.0

    def phase(self, text: str) -> None:
        """What comes before the loads."""
        if self._on_terminal:
            self._bar.update(self._task, description=text, total=None)
        else:
            print_note(text)

    def load_started(self, load: Load) -> None:
        """A load begins."""
        self._load = load
        self._done = self._failed = self._tokens = 0
        self._began = self._told = self._clock()
        known = load.requests if load.requests < MOST_REQUESTS else None
        self._bar.reset(self._task, total=known, description=load.label)

    def request_done(self, result: RequestResult) -> None:
        """A request has ended."""
        if self._load is None:
            return
        self._done += 1
        self._failed += result.error is not None
        self._tokens += result.tokens if result.error is None else 0
        if self._on_terminal:
            self._bar.update(self._task, completed=self._done, description=self._line())
        elif self._clock() - self._told > LINE_SECONDS:
            self._told = self._clock()
            print_note(f"{self._line()}: {self._done} done")

    def load_done(self, result: LoadResult) -> None:
        """A load has ended."""
        found = result.figures
        ttft = "-" if found.ttft is None else milliseconds(found.ttft.p50)
        line = (
            f"{found.load.label}: {found.requests} requests in {found.seconds:.1f} s, "
            f"{found.failed} failed, TTFT {ttft}, {found.total_tokens_per_second:.1f} tokens/s"
        )
        if self._on_terminal:
            self._bar.console.print(Text(single_line(line)), soft_wrap=True)
        else:
            print_note(line)

    def _line(self) -> str:
        assert self._load is not None
        seconds = max(1e-3, self._clock() - self._began)
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._load.label}, {self._tokens / seconds:.1f} tokens/s{failed}"

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
