from __future__ import annotations

import subprocess
import sys

from gateway import __version__


def test_the_package_can_be_run_as_the_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "gateway", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert __version__ in ran.stdout
