"""An emulated node in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunningEmulator:
    process: subprocess.Popen[str]
    url: str
    commands: str  # where it takes them


@contextmanager
def emulator_process(*options: str) -> Iterator[RunningEmulator]:
    command = [sys.executable, "-m", "tests.emulator", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url, commands = (process.stdout.readline().strip() for _ in range(2))
            yield RunningEmulator(process, url, commands)
        finally:
            process.kill()
