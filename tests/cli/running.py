"""Runs a command in this process or another, and returns its status and output."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from unittest.mock import patch

from gateway.cli import main
from tests.gateways import Running

LIMIT = 120.0  # seconds for a process


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


def run(*arguments: str, stdin: str = "") -> Ran:
    """Run the command in this process; its output is no terminal."""
    out, err = io.StringIO(), io.StringIO()
    status: object = None
    with (
        patch.object(sys, "argv", ["llama-gateway", *arguments]),
        patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            status = ended.code
    assert isinstance(status, int)
    return Ran(status, out.getvalue(), err.getvalue())


def output(*arguments: str, stdin: str = "") -> str:
    """What a command that succeeds shows."""
    ran = run(*arguments, stdin=stdin)
    assert ran.status == 0, ran.err
    return ran.out


def refusal(*arguments: str, status: int = 2, stdin: str = "") -> str:
    """What a command says that ends with this status and has nothing to show."""
    ran = run(*arguments, stdin=stdin)
    assert (ran.status, ran.out) == (status, ""), ran
    assert "Traceback" not in ran.err
    return ran.err


async def run_beside(gateway: Running, *arguments: str) -> Ran:
    """Run a command that asks this gateway, which serves here."""
    given = ("--admin-url", gateway.admin_url, "--config", str(gateway.settings_file))
    return await asyncio.to_thread(run, *arguments, *given)


def run_process(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, code: str | None = None
) -> Ran:
    """Run the command, or `code` instead, in a process of its own."""
    command = ["-c", code] if code is not None else ["-m", "gateway"]
    ended = subprocess.run(
        [sys.executable, *command, *arguments],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    return Ran(ended.returncode, ended.stdout, ended.stderr)


def run_on_terminal(
    *arguments: str,
    question: bytes = b"",
    typed: str = "",
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run the command on a terminal of 80 columns, where `typed` answers a question.

    Returns its status and the terminal's output.
    """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", *arguments],
        env={**os.environ, "TERM": "xterm-256color", **(environment or {})},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    try:
        with contextlib.suppress(OSError):  # Linux: how a terminal whose other side is closed ends
            while part := os.read(ours, 65536):
                shown += part
                if typed and question in shown:
                    os.write(ours, f"{typed}\n".encode())
                    typed = ""
        return process.wait(LIMIT), shown.decode(errors="replace")
    finally:
        os.close(ours)
        process.kill()
        process.wait()
