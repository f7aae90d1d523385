"""Run a command in this process, or in one of its own, and look at what it did."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from unittest.mock import patch

from gateway.cli import main


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


def run(*arguments: str, stdin: str = "") -> Ran:
    """The command with these arguments; its output is no terminal."""
    out, err = io.StringIO(), io.StringIO()
    status: object = None
    with (
        patch.object(sys, "argv", ["llama-gateway", *arguments]),
        patch.object(sys, "stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            status = ended.code
    assert isinstance(status, int)
    return Ran(status, out.getvalue(), err.getvalue())


def run_process(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, code: str | None = None
) -> Ran:
    """The same as a process of its own; `code` instead of the command."""
    command = ["-c", code] if code is not None else ["-m", "gateway"]
    ended = subprocess.run(
        [sys.executable, *command, *arguments],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return Ran(ended.returncode, ended.stdout, ended.stderr)
