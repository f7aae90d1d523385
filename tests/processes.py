"""Waits for processes that are not children of the test to end."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


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
