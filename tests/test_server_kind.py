"""`pytest --llama-server binary`, with a llama-server that only tells its build."""

from __future__ import annotations

from pathlib import Path

import pytest

from setup.llama_server import EXPECTED_BUILD
from tests.servers import BINARY_VARIABLE

pytestmark = pytest.mark.slow
pytest_plugins = ["pytester"]
FILE = f"""
import os
import pytest

pytestmark = pytest.mark.real

def test_passes(): assert os.environ[{BINARY_VARIABLE!r}].endswith("/llama-server")

def test_fails(): assert "one" == "other"

@pytest.fixture
def server(): raise AssertionError("no server")

def test_has_no_server(server): pass

@pytest.mark.wheel_only("reads the wheel's log")
def test_of_the_wheel(): pass
"""


@pytest.fixture
def checkout(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("TESTS_UNDER_GATE", "yes")
    pytester.makepyfile(FILE)
    return pytester


def install(checkout: pytest.Pytester, build: int) -> None:
    program = checkout.path / "cache/llama-gateway-tests/llama-server/llama-server"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'version: 0.7.0 (build {build}, commit x)'\n")
    program.chmod(0o755)


def run(checkout: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    plugins = ("-p", "tests.server_kind", "-p", "no:asyncio", "-rA")
    return checkout.runpytest_subprocess(*plugins, "--llama-server", "binary", *arguments)


def test_with_the_expected_build_failures_fail(checkout: pytest.Pytester) -> None:
    install(checkout, EXPECTED_BUILD)
    ran = run(checkout)
    ran.assert_outcomes(passed=1, failed=1, errors=1, skipped=1)
    assert "DRIFT" not in ran.stdout.str()
    assert "wheel_only: reads the wheel's log" in ran.stdout.str()


def test_with_another_build_failures_are_drift_in_the_gate(checkout: pytest.Pytester) -> None:
    install(checkout, 12)
    ran = run(checkout, "-n", "2")
    assert ran.ret == 0
    ran.assert_outcomes(passed=1, skipped=1)
    title = f"*DRIFT: llama-server is build 12, expected {EXPECTED_BUILD}*"
    failure = "*AssertionError: assert 'one' == 'other'*"
    ran.stdout.fnmatch_lines([title, "DRIFT *::test_fails", failure])
    ran.stdout.fnmatch_lines(["DRIFT *::test_has_no_server"])


def test_without_the_program_real_tests_fail_in_the_gate(checkout: pytest.Pytester) -> None:
    ran = run(checkout)
    ran.assert_outcomes(errors=3, skipped=1)
    assert "is missing or does not run: make llama-server" in ran.stdout.str()
