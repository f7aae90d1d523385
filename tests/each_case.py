"""A test over a table of cheap cases: one test, which names every case that fails.

A case of `pytest.mark.parametrize` costs milliseconds and a line of the report. That is for cases
that are worth a name; a table of texts that one function must refuse is one test.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

_FAILURES = (Exception, pytest.fail.Exception)
_MOST_SHOWN = 300
"""Characters of a case that are shown if it fails."""
Test = Callable[..., Any]
Failed = list[tuple[dict[str, Any], BaseException]]


def each_case(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test for every case, as one test; the arguments are those of `parametrize`.

    All cases run. The first failure is raised, with a note for each case that failed. Fixtures are
    made once, so this is not for a test that changes what it is given.
    """
    if isinstance(names, str):
        names, cases = (names,), ((case,) for case in cases)
    table: list[dict[str, Any]] = [dict(zip(names, case, strict=True)) for case in cases]
    assert table, "no cases"

    def decorate(test: Test) -> Test:
        async def run_async(*bound: Any, **fixtures: Any) -> None:
            failed: Failed = []
            for case in table:
                try:
                    await test(*bound, **fixtures, **case)
                except _FAILURES as error:
                    failed.append((case, error))
            _report(failed)

        def run(*bound: Any, **fixtures: Any) -> None:
            failed: Failed = []
            for case in table:
                try:
                    test(*bound, **fixtures, **case)
                except _FAILURES as error:
                    failed.append((case, error))
            _report(failed)

        made = functools.wraps(test)(run_async if inspect.iscoroutinefunction(test) else run)
        whole = inspect.signature(test)
        left = [each for name, each in whole.parameters.items() if name not in table[0]]
        made.__signature__ = whole.replace(parameters=left)  # type: ignore[attr-defined]
        return made

    return decorate


def _report(failed: Failed) -> None:
    if failed:
        first = failed[0][1]
        for case, error in failed:
            reason = str(error).partition("\n")[0]
            first.add_note(f"case {case!r:.{_MOST_SHOWN}}: {reason:.{_MOST_SHOWN}}")
        raise first
