from __future__ import annotations

import pytest

from tests.ci.pythons import ROOT, SUPPORTED

pytest_plugins = ["pytester"]

INI = """
[pytest]
testpaths = tests
markers =
    slow:
    real:
    net:
    smoke:
"""
PLUGINS = ("-p", "tests.ci.tiers", "-p", "no:xdist", "-p", "no:asyncio")
FILE = """
import pytest

def test_fast(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("store", ["sqlite", "sqlite2", "postgresql", "postgresql2"])
def test_smoke(store): pass

@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
def test_twins(store): pass

@pytest.mark.real
def test_real(): pass
"""
SKIPPING = """
import pytest

@pytest.mark.smoke
@pytest.mark.slow
def test_smoke(): pytest.skip("no browser here")

def test_other(): pytest.skip("no browser here")
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project whose tests belong to the groups of the real table."""
    monkeypatch.delenv("TESTS_UNDER_GATE", raising=False)
    pytester.makefile(".ini", pytest=INI)
    for name in ("stored/test_kills", "fuzz/test_made"):
        path = pytester.path / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(FILE)
    return pytester


def outcome(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    """The tests that ran, by file and name."""
    ran = pytester.runpytest_inprocess(
        *PLUGINS, "-v", "--import-mode=importlib", "-p", "no:cacheprovider", *arguments
    )
    return [
        line.split(" PASSED")[0].removeprefix("tests/")
        for line in ran.outlines
        if " PASSED" in line
    ]


def test_without_a_path_fast_tests_run_and_smoke_tests_by_their_first_case(
    run: pytest.Pytester,
) -> None:
    assert outcome(run) == [
        # One file is of the tests' own equipment: of it the smoke test alone.
        "fuzz/test_made.py::test_smoke[sqlite]",
        "fuzz/test_made.py::test_smoke[postgresql]",
        "stored/test_kills.py::test_fast",
        "stored/test_kills.py::test_smoke[sqlite]",
        "stored/test_kills.py::test_smoke[postgresql]",
        "stored/test_kills.py::test_twins[sqlite]",
    ]


def test_a_group_has_its_slow_tests_and_all_of_its_own_files(run: pytest.Pytester) -> None:
    kills = outcome(run, "--group", "kills", "tests/stored/test_kills.py")
    stores = ("sqlite", "sqlite2", "postgresql", "postgresql2")
    smoke = [f"test_smoke[{store}]" for store in stores]
    assert [name.partition("::")[2] for name in kills] == ["test_slow", *smoke, "test_real"]
    # Cases in PostgreSQL belong to a group before it.
    assert len(outcome(run, "--group", "equipment", "tests")) == 7


def test_processes_of_xdist_run_what_was_asked_for(run: pytest.Pytester) -> None:
    plugins = ("-p", "tests.ci.tiers", "-p", "no:asyncio", "--import-mode=importlib")
    ran = run.runpytest_inprocess(*plugins, "-n", "1", "tests/stored/test_kills.py")
    ran.assert_outcomes(passed=9)
    ran = run.runpytest_inprocess(*plugins, "-n", "1")
    ran.assert_outcomes(passed=6)


def test_a_slow_test_that_no_group_has_fails(pytester: pytest.Pytester) -> None:
    pytester.makefile(".ini", pytest=INI)
    pytester.makepyfile(**{"tests/test_alone": FILE})
    ran = pytester.runpytest_inprocess(*PLUGINS, "tests", "--group", "kills")
    ran.assert_outcomes(deselected=9)
    ran = pytester.runpytest_inprocess(*PLUGINS)
    ran.stdout.fnmatch_lines(["*no group of tests/ci/groups.toml has it*"])


@pytest.mark.parametrize(
    ("gate", "options", "failed", "skipped"),
    [("", [], 0, 2), ("yes", [], 1, 1), ("yes", ["--group", "kills"], 0, 1)],
)
def test_under_the_gate_a_smoke_test_of_make_test_must_not_be_skipped(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    gate: str,
    options: list[str],
    failed: int,
    skipped: int,
) -> None:
    monkeypatch.setenv("TESTS_UNDER_GATE", gate)
    pytester.makefile(".ini", pytest=INI)
    path = pytester.path / "tests" / "stored" / "test_kills.py"
    path.parent.mkdir(parents=True)
    path.write_text(SKIPPING)
    ran = pytester.runpytest_inprocess(*PLUGINS, *options)
    ran.assert_outcomes(failed=failed, skipped=skipped, deselected=len(options) // 2)
    if failed:
        ran.stdout.fnmatch_lines(["*must not be skipped in the gate: *no browser here*"])


def test_an_unknown_group_is_told_with_the_known_ones(
    run: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome(run, "--group", "kils") == []
    assert "--group kils: there is none; chaos, kills" in capsys.readouterr().err


# Another Python.


def test_make_and_the_pages_name_the_same_versions() -> None:
    versions = [f"{major}.{minor}" for major, minor in SUPPORTED]
    statement = f"supported='{versions[0]} to {versions[-1]}'"
    assert statement in (ROOT / "setup" / "find-python").read_text()
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert [version for version in versions if f"| {version} |" not in page] == []


def test_of_each_file_the_first_test_and_every_second_one_after_it_run(
    pytester: pytest.Pytester,
) -> None:
    pytester.makefile(".ini", pytest=INI)
    pytester.makepyfile(test_one=FILE, test_two=FILE)
    plugins = ("-p", "tests.ci.pythons", *PLUGINS[2:])
    ran = pytester.runpytest_inprocess(*plugins, "-v", "--every", "2")
    ran.assert_outcomes(passed=6, deselected=12)
    for file in ("test_one", "test_two"):
        for name in ("test_fast", "test_smoke?sqlite?", "test_real"):
            ran.stdout.fnmatch_lines_random([f"{file}.py::{name} PASSED*"])
