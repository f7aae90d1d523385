"""A pytest plugin that chooses the tests of `make test` and of the groups in `groups.toml`.

Without a path it runs the fast tests and those marked `smoke`; with paths, everything below them;
with `--group NAME`, the tests of that group.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.ci.groups import Table, read_table

UNDER_GATE = "TESTS_UNDER_GATE"
"""Environment variable of `.ci/run`: `yes` if every smoke test must find its equipment."""
NOT_FAST = frozenset({"slow", "real", "net"})
POSTGRESQL = "postgresql"
"""A case with this parameter counts as marked so: it is the twin of one in SQLite."""


class _Selection:
    """Deselects what this run is not for."""

    def __init__(self, table: Table, group: str | None) -> None:
        self._table = table
        self._group = table.groups[group] if group is not None else None
        self._smoke: set[tuple[str, bool]] = set()
        self._homeless: set[str] = set()
        """Tests that nothing would run."""

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """Don't even import files of other groups."""
        if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
            return None
        path = collection_path.relative_to(config.rootpath).as_posix()
        owner = next((one for one in self._table.groups.values() if one.owns(path)), None)
        if owner is None or owner is self._group:
            return None
        return True if self._group or b"smoke" not in collection_path.read_bytes() else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        chosen = [item for item in items if self._is_chosen(item)]
        chosen_ids = set(map(id, chosen))
        config.hook.pytest_deselected(items=[one for one in items if id(one) not in chosen_ids])
        items[:] = chosen

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.nodeid in self._homeless:
            pytest.fail("slow or with real parts, and no group of tests/ci/groups.toml has it")

    def _is_chosen(self, item: pytest.Item) -> bool:
        marks = _marks(item)
        path = item.nodeid.partition("::")[0]
        is_fast = NOT_FAST.isdisjoint(marks)
        group = self._table.group_of(path, marks, is_fast=is_fast)
        if group is None and not is_fast:
            self._homeless.add(item.nodeid)
            return self._group is None
        if self._group is None:
            return group is None or ("smoke" in marks and self._is_first_case(item, marks))
        if self._group.is_second:
            return self._group.claims(path, marks, is_fast=is_fast)
        return group is self._group

    def _is_first_case(self, item: pytest.Item, marks: set[str]) -> bool:
        """Whether a smoke test has no earlier case; of those in PostgreSQL, too."""
        case = (item.nodeid.partition("[")[0], POSTGRESQL in marks)
        is_first = case not in self._smoke
        self._smoke.add(case)
        return is_first


def _marks(item: pytest.Item) -> set[str]:
    found = {mark.name for mark in item.iter_markers()}
    callspec = getattr(item, "callspec", None)
    if callspec is not None and POSTGRESQL in callspec.params.values():
        found.add(POSTGRESQL)
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--group", help="run only the tests of this group of tests/ci/groups.toml")
    parser.addoption("--everything", action="store_true", help="run the tests of all groups, too")


def pytest_configure(config: pytest.Config) -> None:
    group: str | None = config.getoption("--group")
    has_paths = config.args_source is pytest.Config.ArgsSource.ARGS
    workerinput: dict[str, bool] | None = getattr(config, "workerinput", None)
    if workerinput is not None:
        config.option.everything = workerinput["everything"]
    elif group is None and has_paths:
        config.option.everything = True
    if config.option.everything:
        return
    table = read_table()
    if group is not None and group not in table.groups:
        raise pytest.UsageError(f"--group {group}: there is none; {', '.join(table.groups)}")
    config.pluginmanager.register(_Selection(table, group))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist which tests were asked for."""
    node.workerinput["everything"] = node.config.option.everything


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a smoke test of `make test` that the gate would skip for want of its equipment."""
    report = yield
    is_strict = os.environ.get(UNDER_GATE) == "yes" and item.config.getoption("--group") is None
    if report.skipped and is_strict and item.get_closest_marker("smoke"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"a smoke test must not be skipped in the gate: {reason}"
    return report
