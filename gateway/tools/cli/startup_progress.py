"""How far the servers of `llama-gateway up` are: a live list on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import structlog
from rich.progress import Progress as Display
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from gateway.tools.cli.terminal import console, print_note
from gateway.tools.local.supervisor import (
    ServerEvent,
    ServerExited,
    ServerLoading,
    ServerReady,
    ServerStarted,
)


class StartupProgress:
    """Takes every step of the servers: shown inside this context, logged afterwards."""

    def __init__(self, servers: Sequence[str]) -> None:
        output = console(sys.stderr)
        self._live = output.is_terminal and not output.is_dumb_terminal
        self._display = Display(
            TextColumn(" "),
            SpinnerColumn("line", finished_text=" "),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=output,
            disable=not self._live,
        )
        self._rows: dict[str, TaskID] = {
            name: self._display.add_task(name, total=1) for name in servers
        }
        self._over = False

    def update(self, event: ServerEvent) -> None:
        """One step of one server."""
        if self._over:
            _log(event)
        elif self._live:
            ready = isinstance(event, ServerReady)
            self._display.update(
                self._rows[event.name],
                description=f"{event.name}: {_words(event)}",
                completed=int(ready),
            )
        else:
            print_note(f"  {event.name}: {_words(event)}")

    def __enter__(self) -> Self:
        self._display.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._display.stop()
        self._over = True


def _words(step: ServerEvent) -> str:
    match step:
        case ServerStarted():
            return f"started on {step.url}"
        case ServerLoading():
            return "loading the model"
        case ServerReady():
            return f"ready after {step.seconds:.1f} s"
        case ServerExited():
            return f"{step.exit_description}, is started again in {step.restart_in:g} s"


def _log(step: ServerEvent) -> None:
    log = structlog.get_logger()
    match step:
        case ServerExited():
            log.warning(
                "server exited",
                server=step.name,
                how=step.exit_description,
                restart_in=step.restart_in,
            )
        case ServerReady():
            log.info("server ready", server=step.name, seconds=round(step.seconds, 1))
        case _:
            pass
