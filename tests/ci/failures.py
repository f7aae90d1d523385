"""A pytest plugin that records failed tests in a file: -p tests.ci.failures --failures FILE."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.ci.repeat import Run


class _Recorder:
    """Collects the failures of a run; with pytest-xdist it runs in the controlling process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed: dict[str, str] = {}
        self.tests = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests += report.when == "call"
        if report.failed:
            self.failed.setdefault(report.nodeid, report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, report.longreprtext)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        yield
        run = Run(int(session.exitstatus), self.failed, self.tests)
        self.path.write_text(json.dumps(asdict(run)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", type=Path, help="write the failed tests to this file (JSON)")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--failures")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(path))
