from __future__ import annotations

import pytest

from tests.ci.pythons import ROOT, SUPPORTED


def test_make_and_the_pages_name_the_same_versions() -> None:
    versions = [f"{major}.{minor}" for major, minor in SUPPORTED]
    statement = f"supported='{versions[0]} to {versions[-1]}'"
    assert statement in (ROOT / "setup" / "find-python").read_text()
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert [version for version in versions if f"| {version} |" not in page] == []


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
PLUGINS = ("-p", "tests.ci.pythons", "-v", "-p", "no:xdist", "-p", "no:asyncio")


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
