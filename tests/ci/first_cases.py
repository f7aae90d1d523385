"""A pytest plugin that leaves some tests out: -p tests.ci.first_cases --every 3

Of each parametrized test the first case runs, and of each file the first test and every third one
after it. What one version of Python does otherwise than another shows in many tests of a file.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest


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
