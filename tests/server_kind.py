"""A pytest plugin: which llama.cpp server the tests marked `real` start.

    pytest --llama-server wheel     # the one in the xllamacpp wheel, as `make run` does by default
    pytest --llama-server binary    # the program that `make llama-server` has fetched

Without the program real tests skip. In the gate (`TESTS_UNDER_GATE=yes`) they fail, since nobody
reads a gate's skips. There another build than the expected one is no fault of the change that is
judged: what fails with it is reported as DRIFT, and the tests with the wheel decide.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from setup.llama_server import EXPECTED_BUILD, PROGRAM, build_of, cache_folder
from tests.servers import BINARY_VARIABLE

_DRIFT = "drift"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--llama-server",
        choices=["wheel", "binary"],
        default="wheel",
        help="the llama.cpp server of tests marked `real`",
    )


def pytest_configure(config: pytest.Config) -> None:
    # With pytest-xdist each worker has the option too.
    if config.getoption("--llama-server") == "binary":
        config.pluginmanager.register(_BinaryRun(under_gate=_is_under_gate()))
    else:
        os.environ.pop(BINARY_VARIABLE, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unfit = {"wheel": "binary_only", "binary": "wheel_only"}[config.getoption("--llama-server")]
    for item in items:
        if (mark := item.get_closest_marker(unfit)) is not None:
            item.add_marker(pytest.mark.skip(reason=f"{unfit}: {mark.args[0]}"))


def _is_under_gate() -> bool:
    return os.environ.get("TESTS_UNDER_GATE") == "yes"


class _BinaryRun:
    """A run with the binary."""

    def __init__(self, *, under_gate: bool) -> None:
        self.program = cache_folder() / PROGRAM
        self.build = build_of(self.program)
        self.under_gate = under_gate
        self.drifts = under_gate and self.build not in {None, EXPECTED_BUILD}
        if self.build is not None:
            os.environ[BINARY_VARIABLE] = str(self.program)

    def pytest_report_header(self) -> str:
        return f"llama-server: {self.program}, build {self.build or 'missing'}"

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.build is None and _is_real(item):
            reason = f"{self.program} is missing or does not run: make llama-server"
            if self.under_gate:
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if self.drifts and report.failed and _is_real(item):
            report.outcome = "skipped"
            report.wasxfail = _DRIFT
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if getattr(report, "wasxfail", None) == _DRIFT:
            return _DRIFT, "D", "DRIFT"
        return None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.drifts:
            return
        terminalreporter.section(
            f"DRIFT: llama-server is build {self.build}, expected {EXPECTED_BUILD}"
        )
        for report in terminalreporter.getreports(_DRIFT):
            terminalreporter.write_line(f"DRIFT {report.nodeid}")
            terminalreporter.write_line(report.longreprtext)


def _is_real(item: pytest.Item) -> bool:
    return item.get_closest_marker("real") is not None
