"""Processes of tests: a port for one, and the end of those that are not children of the test."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable

import psutil


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
