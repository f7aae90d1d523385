from __future__ import annotations

from pathlib import Path

import pytest

from tests.ci.pythons import SUPPORTED, supported


def program(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines)))
    path.chmod(0o755)
    return path


def test_make_and_the_pages_name_the_same_versions() -> None:
    versions = [f"{major}.{minor}" for major, minor in SUPPORTED]
    root = Path(__file__).resolve().parents[2]
    statement = f"supported='{versions[0]} to {versions[-1]}'"
    assert statement in (root / "setup" / "find-python").read_text()
    page = (root / "CONTRIBUTING.md").read_text()
    assert [version for version in versions if f"| {version} |" not in page] == []


def test_each_version_is_found_once_and_broken_programs_are_left_out(tmp_path: Path) -> None:
    first = program(tmp_path / "a" / "python3.13", "echo 3 13", 'echo "$0"')
    second = program(tmp_path / "b" / "python3", "echo 3 13", 'echo "$0"')
    shim = program(tmp_path / "b" / "python3.12", "echo 'no such version' >&2", "exit 127")
    old = program(tmp_path / "b" / "python3.9", "echo 3 9", 'echo "$0"')
    found = supported([tmp_path / "none", first, shim, old, second])
    assert found == {(3, 13): first}


FILE = """
import pytest

@pytest.mark.parametrize("case", ["first", "second"])
def test_cases(case): print("case", case)

def test_alone(): pass

class TestOthers:
    @pytest.mark.parametrize("case", [1, 2, 3])
    def test_cases(self, case): pass
"""

pytest_plugins = ["pytester"]
PLUGINS = ("-p", "tests.ci.first_cases", "-v", "-p", "no:xdist", "-p", "no:asyncio")


def test_of_each_file_the_first_test_and_every_second_one_after_it_run(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(test_one=FILE, test_two=FILE)
    ran = pytester.runpytest_inprocess(*PLUGINS, "--every", "2")
    ran.assert_outcomes(passed=4, deselected=8)
    ran.stdout.fnmatch_lines(
        [
            "test_one.py::test_cases*first* PASSED*",
            "test_one.py::TestOthers::test_cases*1* PASSED*",
            "test_two.py::test_cases*first* PASSED*",
            "test_two.py::TestOthers::test_cases*1* PASSED*",
        ]
    )
