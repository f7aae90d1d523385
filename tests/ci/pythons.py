"""Finds the supported Pythons on this machine, and runs fast tests on them.

Without `--test` it prints a line for each, newest last: its version, such as 3.12, and the path of
its program.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
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


def run_fast_tests(version: str, program: Path, every: int) -> int:
    """Run one in `every` fast tests of each file on a Python; the exit status.

    Of each test with many cases the first one runs: what one version of Python does otherwise than
    another shows in many tests of a file.
    """
    venv = f".venv/python{version}"
    make = ["make", f"{venv}/.test", f"VENV={venv}", f"PYTHON={program}"]
    options = f"-p tests.ci.first_cases --every {every} -m 'not smoke' --hypothesis-profile=few"
    test = ["make", "test", f"VENV={venv}", f"PYTHON={program}", f"ARGS={options}"]
    return (
        subprocess.run(make, check=False).returncode or subprocess.run(test, check=False).returncode
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the Pythons, or run tests on them; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.ci.pythons", description=__doc__)
    parser.add_argument("--test", choices=("newest", "all"), help="run fast tests on them")
    parser.add_argument("--every", type=int, default=3, help="run one of so many tests of a file")
    options = parser.parse_args(arguments)
    found = supported(candidates(os.environ.get("PATH", ""), Path.home()))
    if options.test is None:
        for (major, minor), program in found.items():
            print(f"{major}.{minor} {program}")
        return 0
    others = {
        version: program for version, program in found.items() if version != sys.version_info[:2]
    }
    if not others:
        print(f"SKIPPED: no supported Python here but {sys.version.split()[0]}")
    chosen = list(others.items())[-1 if options.test == "newest" else 0 :]
    statuses = [
        run_fast_tests(f"{major}.{minor}", program, options.every)
        for (major, minor), program in chosen
    ]
    return max(statuses, default=0)


if __name__ == "__main__":
    sys.exit(main())
