"""Runs fast tests on the newest supported Python of this machine but this one.

It is also a pytest plugin that leaves some tests out: -p tests.ci.pythons --every 3
Of each parametrized test the first case runs, and of each file the first test and every third one
after it. What one version of Python does otherwise than another shows in many tests of a file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLASSIFIER = re.compile(r'"Programming Language :: Python :: (\d+)\.(\d+)"')
SUPPORTED = [
    (int(major), int(minor))
    for major, minor in CLASSIFIER.findall((ROOT / "pyproject.toml").read_text())
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--every", type=int, default=1, help="run one of so many tests of a file")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect further cases of a parametrized test, and the tests between those that run."""
    every: int = config.getoption("every")
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    seen: set[str] = set()
    number: Counter[Path] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in seen or number[item.path] % every:
            others.append(item)
        else:
            chosen.append(item)
        if test not in seen:
            number[item.path] += 1
        seen.add(test)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


def newest() -> tuple[str, str] | None:
    """Version and program of the newest supported Python here but this one."""
    folders = os.environ["PATH"].split(os.pathsep)
    # Shims of pyenv may have none to start.
    folders += map(str, sorted(Path.home().glob(".pyenv/versions/*/bin")))
    for version in sorted(set(SUPPORTED) - {sys.version_info[:2]}, reverse=True):
        for folder in folders:
            program = f"{folder}/python{version[0]}.{version[1]}"
            find = subprocess.run(
                [ROOT / "setup" / "find-python"], env=os.environ | {"PYTHON": program},
                capture_output=True, check=False,
            )  # fmt: skip
            if find.returncode == 0:
                return "{}.{}".format(*version), program
    return None


def main() -> int:
    if (found := newest()) is None:
        print(f"SKIPPED: no supported Python here but {sys.version.split()[0]}")
        return 0
    version, program = found
    venv = f".venv/python{version}"
    given = (f"VENV={venv}", f"PYTHON={program}")
    options = "-p tests.ci.pythons --every 3 -m 'not smoke' --hypothesis-profile=few"
    for words in ((f"{venv}/.test",), ("test", f"ARGS={options}")):
        if status := subprocess.run(["make", *words, *given], check=False).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
