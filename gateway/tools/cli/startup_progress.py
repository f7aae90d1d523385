"""Shows the progress of the servers of `llama-gateway up`: live on a terminal, else in lines."""

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
    """Shows the events of servers within its context, and logs them afterwards."""

    def __init__(self, servers: Sequence[str]) -> None:
        output = console(sys.stderr)
        self._on_terminal = output.is_terminal and not output.is_dumb_terminal
        self._display = Display(
            TextColumn(" "),
            SpinnerColumn("line", finished_text=" "),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=output,
            disable=not self._on_terminal,
        )
        self._rows: dict[str, TaskID] = {
            name: self._display.add_task(name, total=1) for name in servers
        }
        self._ended = False

    def update(self, event: ServerEvent) -> None:
        """Show or log an event of one server."""
        if self._ended:
            _log(event)
        elif self._on_terminal:
            ready = isinstance(event, ServerReady)
            self._display.update(
                self._rows[event.name],
                description=f"{event.name}: {_describe(event)}",
                completed=int(ready),
            )
        else:
            print_note(f"  {event.name}: {_describe(event)}")

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
        self._ended = True


def _describe(event: ServerEvent) -> str:
    match event:
        case ServerStarted():
            return f"started on {event.url}"
        case ServerLoading():
            return "loading the model"
        case ServerReady():
            return f"ready after {event.seconds:.1f} s"
        case ServerExited():
            return f"{event.exit_description}, restarts in {event.restart_in:g} s"


def _log(event: ServerEvent) -> None:
    log = structlog.get_logger()
    match event:
        case ServerExited():
            log.warning(
                "server exited",
                server=event.name,
                how=event.exit_description,
                restart_in=event.restart_in,
            )
        case ServerReady():
            log.info("server ready", server=event.name, seconds=round(event.seconds, 1))
        case _:
            pass
