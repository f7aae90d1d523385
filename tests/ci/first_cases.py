"""A pytest plugin that runs the first case of each test alone: -p tests.ci.first_cases

What one version of Python does otherwise than another shows in any case of a test.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all cases but the first of each parametrized test."""
    first: list[pytest.Item] = []
    others: list[pytest.Item] = []
    seen: set[str] = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        (others if test in seen else first).append(item)
        seen.add(test)
    config.hook.pytest_deselected(items=others)
    items[:] = first
