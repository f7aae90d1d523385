"""`--model URL`: its options, the download's progress, and the file that it ends in."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer

from gateway.tools.cli.terminal import CommandFailed, console, print_note

if TYPE_CHECKING:
    from gateway.tools.local.download import ModelWish
    from gateway.tools.local.gguf import ModelFile

_DOWNLOAD = "Download"

Sha256 = Annotated[
    list[str] | None,
    typer.Option(
        "--sha256",
        metavar="DIGEST",
        show_default="not checked",
        help="SHA-256 of the model behind a URL; once for each file of a split one.",
        rich_help_panel=_DOWNLOAD,
    ),
]

TokenEnv = Annotated[
    str | None,
    typer.Option(
        "--token-env",
        metavar="NAME",
        show_default="no token is sent",
        help=(
            "Variable of the environment, such as HF_TOKEN, whose token is sent to the URL's host "
            "(and to no other one)."
        ),
        rich_help_panel=_DOWNLOAD,
    ),
]

MaxBytes = Annotated[
    str | None,
    typer.Option(
        "--max-bytes",
        metavar="SIZE",
        show_default="what disk and memory have room for",
        help="Refuse a larger download, such as 8GiB.",
        rich_help_panel=_DOWNLOAD,
    ),
]

DIGEST = re.compile(r"[0-9a-f]{64}")

LINE_SECONDS = 10.0  # between two lines where stderr is no terminal

REDRAW_SECONDS = 0.1

LONGEST_TOKEN = 4096


def model_file(
    model: str | None,
    sha256: list[str] | None,
    token_env: str | None,
    max_bytes: str | None,
    check_fits: Callable[[ModelFile], None],
) -> Path | None:
    """Return the file of `--model`, downloaded where it is a URL. Raises LocalFleetError."""
    from gateway.tools.local.download import is_url

    if model is None or not is_url(model):
        given = {"--sha256": sha256, "--token-env": token_env, "--max-bytes": max_bytes}
        for name, value in given.items():
            if value:
                raise CommandFailed(f"{name} is for a download: --model names no URL", 2)
        return None if model is None else Path(model)
    return _download(_wish(model, sha256 or [], token_env, max_bytes, os.environ), check_fits)


def _wish(
    model: str,
    sha256: list[str],
    token_env: str | None,
    max_bytes: str | None,
    environment: Mapping[str, str],
) -> ModelWish:
    """Read the options of a download. Raises CommandFailed, whose text holds no secret."""
    from gateway.config.fields import parse_size
    from gateway.tools.local.download import ModelUrlError, ModelWish, parse_model_url, part_urls

    try:
        url = parse_model_url(model)
        files = len(part_urls(url))
    except ModelUrlError as error:
        raise CommandFailed(str(error), 2) from None
    digests = tuple(digest.strip().lower() for digest in sha256)
    if not all(DIGEST.fullmatch(digest) for digest in digests):
        raise CommandFailed("--sha256: not 64 hexadecimal digits", 2)
    if digests and len(digests) != files:
        raise CommandFailed(
            f"--sha256: given {len(digests)} times, but the model has {files} "
            f"{'file' if files == 1 else 'files'}; give it once for each, in order",
            2,
        )
    token = None
    if token_env is not None:
        token = environment.get(token_env, "").strip()
        if not token:
            raise CommandFailed(f"--token-env: the variable {token_env} is empty or not set", 2)
        if not (token.isascii() and token.isprintable()) or len(token) > LONGEST_TOKEN:
            raise CommandFailed(f"--token-env: the variable {token_env} holds no token", 2)
        if url.userinfo:
            raise CommandFailed("--token-env: the URL holds a password already; give one only", 2)
    most = None
    if max_bytes is not None:
        try:
            most = parse_size(max_bytes)
        except ValueError:
            most = 0
        if most <= 0:
            raise CommandFailed(f"--max-bytes {max_bytes}: not a size, such as 8GiB", 2)
    return ModelWish(url, digests, token, most)


def _download(wish: ModelWish, check_fits: Callable[[ModelFile], None]) -> Path:
    from gateway.tools.local.cache import cache_folder
    from gateway.tools.local.download import DownloadHooks, fetch_model, printable

    with DownloadBar(printable(wish.url)) as bar:
        hooks = DownloadHooks(progress=bar.update, note=bar.note)
        try:
            return fetch_model(wish, cache_folder(), hooks, check_fits=check_fits)
        except KeyboardInterrupt:
            bar.note("Interrupted: what has arrived is kept; the same command goes on from there")
            raise


class DownloadBar:
    """Shows a download: a bar on a terminal, else a line now and then."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        output = console(sys.stderr)
        self._on_terminal = output.is_terminal and not output.is_dumb_terminal
        self._name = name
        self._clock = clock
        self._bar = Progress(
            BarColumn(24),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=output,
            transient=True,
            disable=not self._on_terminal,
        )
        self._task = self._bar.add_task("", total=None, visible=False)
        self._began: tuple[float, int] | None = None  # when, and with how many bytes
        self._shown_at = 0.0

    def update(self, done: int, total: int | None) -> None:
        """So many bytes are there."""
        now = self._clock()
        if self._began is None or done < self._began[1]:  # it began, or starts over
            self._began = (now, done)
            self._shown_at = now
            self._bar.reset(self._task, total=total, completed=done, visible=True)
            if not self._on_terminal:
                print_note(f"Downloading {self._name}{_of(done, total)}")
            elif done == 0:
                self.note(f"Downloading {self._name}")
        elif self._on_terminal and (done == total or now - self._shown_at >= REDRAW_SECONDS):
            self._shown_at = now
            self._bar.update(self._task, completed=done, total=total)
        elif not self._on_terminal and now - self._shown_at >= LINE_SECONDS:
            self._shown_at = now
            print_note(
                f"  {describe_progress(done, total, done - self._began[1], now - self._began[0])}"
            )

    def note(self, text: str) -> None:
        """Print a line."""
        from rich.text import Text

        from gateway.config.errors import single_line

        if self._on_terminal:
            self._bar.console.print(Text(single_line(text)), soft_wrap=True)
        else:
            print_note(text)

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


def describe_progress(done: int, total: int | None, gained: int, seconds: float) -> str:
    """Say how far a download is, how fast, and when it ends."""
    from gateway.tools.local.memory import format_gib

    speed = gained / seconds if seconds > 0 else 0.0
    shown = format_gib(done)
    if total:
        shown += f" of {format_gib(total)} ({done / total:.0%})"
    shown += f", {speed / (1 << 20):.1f} MiB/s"
    if total and speed > 0:
        left = (total - done) / speed
        shown += f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"
    return shown


def _of(done: int, total: int | None) -> str:
    from gateway.tools.local.memory import format_gib

    size = "" if total is None else f", {format_gib(total)}"
    return size + (f", from {format_gib(done)} on" if done else "")
