from __future__ import annotations

import pytest

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


def test_the_first_case_of_each_test_runs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FILE)
    ran = pytester.runpytest_inprocess(
        "-p", "tests.ci.first_cases", "-v", "-p", "no:xdist", "-p", "no:asyncio"
    )
    ran.assert_outcomes(passed=3, deselected=3)
    ran.stdout.fnmatch_lines(["*::test_cases*first* PASSED*", "*::test_alone PASSED*"])
