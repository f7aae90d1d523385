"""Processes of tests: one run to its end, a port for one, the end of those that are no children."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil


def ran(
    *command: str | Path, status: int | None = 0, limit: float = 60.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A command that has run to its end, with all that it printed.

    AssertionError with that if it ends with another status; None: any will do.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit, check=False, **options
    )
    assert status in {None, done.returncode}, f"{command}: {done.returncode}\n{done}"
    return done


def free_port() -> int:
    """A port of loopback that nobody has now, for a program that must be told one."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def gone(pid: int | None) -> bool:
    """Whether no such process runs; a zombie does not."""
    try:
        return pid is None or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pids: Iterable[int], limit: float = 60.0) -> None:
    """Wait until all have ended; AssertionError after `limit` seconds."""
    until = time.monotonic() + limit
    for pid in pids:
        while not gone(pid):
            assert time.monotonic() < until, f"process {pid} lives on"
            time.sleep(0.02)
