"""Programs on a small disk: a file system of their own, in a namespace of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def run_on_small_disk(program: str, size: str, disk: Path, *arguments: Path) -> str:
    """What a Python program prints whose first argument is a disk of this size.

    The test is skipped where this machine lets us mount none.
    """
    mount = f'mount -t tmpfs -o size={size} none "$2" && exec "$0" -c "$@"'
    unshare = shutil.which("unshare")

    def run(code: str) -> subprocess.CompletedProcess[str]:
        command: list[str | Path] = [str(unshare), "-rm", "sh", "-c", mount, sys.executable, code]
        command += [disk, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    if unshare is None or run("pass").returncode:
        pytest.skip("this machine lets us mount no file system")
    done = run(program)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout
