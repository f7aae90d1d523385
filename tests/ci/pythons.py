"""Finds the newest supported Python on this machine, and runs fast tests on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

CLASSIFIER = re.compile(r'"Programming Language :: Python :: (\d+)\.(\d+)"')
SUPPORTED = [
    (int(major), int(minor))
    for major, minor in CLASSIFIER.findall(
        Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    )
]
LIMIT = 20.0
"""Seconds for a Python to print its version; a version manager's shim may have none to start."""
PROBE = "import ensurepip, sys, venv; print(*sys.version_info[:2]); print(sys.executable)"


def candidates(path: str, home: Path) -> Iterator[Path]:
    """Yield programs that may be Pythons: those on PATH, then those that pyenv has installed."""
    folders = [Path(folder) for folder in path.split(os.pathsep) if folder]
    folders += sorted((home / ".pyenv" / "versions").glob("*/bin"))
    for folder in folders:
        yield folder / "python3"
        yield from (folder / f"python3.{minor}" for _, minor in SUPPORTED)


def probe(program: Path) -> tuple[tuple[int, int], Path] | None:
    """Return version and path of a Python that can make environments, or None."""
    if not os.access(program, os.X_OK):
        return None
    try:
        done = subprocess.run(
            [program, "-c", PROBE], capture_output=True, text=True, timeout=LIMIT, check=True
        )
        version, executable = done.stdout.splitlines()
        major, minor = version.split()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return (int(major), int(minor)), Path(executable)


def supported(programs: Iterable[Path]) -> dict[tuple[int, int], Path]:
    """Return the first program found of each supported version."""
    found: dict[tuple[int, int], Path] = {}
    for program in dict.fromkeys(programs):
        probed = probe(program)
        if probed is not None and probed[0] in SUPPORTED:
            found.setdefault(*probed)
    return dict(sorted(found.items()))


def main() -> int:
    """Run one in three fast tests of each file on the newest Python but this one.

    Of each test with many cases the first one runs: what one version of Python does otherwise than
    another shows in many tests of a file.
    """
    found = supported(candidates(os.environ.get("PATH", ""), Path.home()))
    found.pop((sys.version_info.major, sys.version_info.minor), None)
    if not found:
        print(f"SKIPPED: no supported Python here but {sys.version.split()[0]}")
        return 0
    (major, minor), program = found.popitem()
    venv = f".venv/python{major}.{minor}"
    given = (f"VENV={venv}", f"PYTHON={program}")
    options = "-p tests.ci.first_cases --every 3 -m 'not smoke' --hypothesis-profile=few"
    for words in ((f"{venv}/.test",), ("test", f"ARGS={options}")):
        if status := subprocess.run(["make", *words, *given], check=False).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
