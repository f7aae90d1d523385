"""Programs on a small disk: a file system of their own, in a namespace of its own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.processes import ran


def run_on_small_disk(program: str, size: str, disk: Path, *arguments: Path) -> str:
    """What a Python program prints whose first argument is a disk of this size.

    The test is skipped where this machine lets us mount none.
    """
    mount = f'mount -t tmpfs -o size={size} none "$2" && exec "$0" -c "$@"'
    unshare = shutil.which("unshare")

    command = (str(unshare), "-rm", "sh", "-c", mount, sys.executable)
    if unshare is None or ran(*command, "pass", disk, status=None).returncode:
        pytest.skip("this machine lets us mount no file system")
    return ran(*command, program, disk, *arguments, limit=200).stdout
