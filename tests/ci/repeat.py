"""Repeats the failed tests of a run once, each alone, and decides whether the gate fails.

    python -m pytest -p tests.ci.repeat --failures FILE ...
    python -m tests.ci.repeat FILE

The first records the failed tests in a file: this module is a plugin of pytest, too.

A test that fails again has failed. One that passes is FLAKY. It fails the gate if the change
touched the test, shared code of its file, or a module that this file mirrors or imports, since the
change may have introduced a race. More than `MOST_FLAKY` fail the gate in any case. The others
belong into docs/flaky.md, each with its cause, until they are fixed.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from tests.ci.change import Change, add_since, change

ROOT = Path(__file__).resolve().parents[2]
KNOWN_FLAKY = ROOT / "docs" / "flaky.md"
MOST_FLAKY = 3
MOST_REPEATED = 10
"""With more failures than these none is repeated, since they can't be flaky."""
LIMIT = 900.0
"""Seconds for one repeated test; pytest's own limit for a test is shorter."""
FAILED = 1
"""pytest's exit status when tests failed; any other one but 0 means that the run broke off."""


@dataclass(frozen=True)
class Run:
    """The result of a run of pytest."""

    status: int
    failed: dict[str, str]
    """Failed tests: node id -> text of the failure."""
    tests: int = 0
    """How many tests passed or failed."""


@dataclass
class Verdict:
    """The result of repeating the failed tests of a change."""

    failed: list[str] = field(default_factory=list)
    """Node ids of tests that failed twice."""
    touched: list[str] = field(default_factory=list)
    """Node ids of flaky tests that the change touched."""
    flaky: list[str] = field(default_factory=list)
    """Node ids of all flaky tests."""

    @property
    def passed(self) -> bool:
        return not self.failed and not self.touched and len(self.flaky) <= MOST_FLAKY


def judge(repeated: Mapping[str, bool], changed: Change, root: Path = ROOT) -> Verdict:
    """Sort the repeated tests by whether they passed and whether the change touched them."""
    verdict = Verdict()
    for test, passed in repeated.items():
        if not passed:
            verdict.failed.append(test)
            continue
        verdict.flaky.append(test)
        if touched(test, changed, root):
            verdict.touched.append(test)
    return verdict


def touched(test: str, changed: Change, root: Path = ROOT) -> bool:
    """Whether the change touched the test or its module.

    Its modules are the one that its file mirrors, and those of the gateway that the file imports.
    Other tests of the file and its imports don't count.
    """
    own, *names = test.split("::")
    try:
        tree = ast.parse((root / own).read_bytes())
    except (OSError, SyntaxError):
        return True
    if not _modules(own, tree).isdisjoint(changed):
        return True
    lines = changed.get(own, set())
    wanted = [name.split("[", maxsplit=1)[0] for name in names]
    return any(not lines.isdisjoint(span) for span in _spans(tree.body, wanted))


def _spans(body: Sequence[ast.stmt], wanted: Sequence[str]) -> Iterator[range]:
    """Yield the lines of a test, and of the code that all tests of the file share."""
    for statement in body:
        assert statement.end_lineno is not None
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        begin = statement.lineno
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            begin = min([begin, *(decorator.lineno for decorator in statement.decorator_list)])
            if isinstance(statement, ast.ClassDef) and statement.name.startswith("Test"):
                if statement.name == wanted[0]:
                    yield from _spans(statement.body, wanted[1:])
                continue
            if statement.name.startswith("test_") and statement.name not in wanted[:1]:
                continue
        yield range(begin, statement.end_lineno + 1)


def _modules(own: str, tree: ast.Module) -> set[str]:
    """Return the modules of the gateway that a test file mirrors or imports.

    `test_wait_queue_order.py` mirrors `wait_queue.py`; the rest of the name says which side of the
    module is tested.
    """
    path = Path(own)
    words = path.stem.removeprefix("test_").split("_")
    found = {
        str(Path("gateway", *path.parts[1:-1], "_".join(words[:count]) + ".py"))
        for count in range(1, len(words) + 1)
    }
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            names = [name.name for name in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            # A name imported from a package may be one of its modules.
            names = [statement.module]
            names += [f"{statement.module}.{name.name}" for name in statement.names]
        else:
            continue
        for name in names:
            if name.split(".", maxsplit=1)[0] == "gateway":
                found |= {name.replace(".", "/") + end for end in (".py", "/__init__.py")}
    return found


def known_flaky(page: Path = KNOWN_FLAKY) -> str:
    """Return the text of the page of known flaky tests; empty without one."""
    return page.read_text() if page.exists() else ""


def passes_alone(test: str, options: Sequence[str] = ()) -> bool:
    """Run one test in a process of its own, with its output shown."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", *options, test]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=LIMIT, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def read_run(path: Path) -> Run:
    """Read the file that the plugin wrote.

    Raises OSError or ValueError when the run did not finish.
    """
    data = json.loads(path.read_text())
    return Run(data["status"], data["failed"], data["tests"])


def report(verdict: Verdict, run: Run, listed: str) -> str:
    """Return the verdict as text, with the first failure of each flaky test."""
    lines: list[str] = []
    for test in verdict.flaky:
        lines += [
            f"== FLAKY {test}",
            "It failed, and passed when it was repeated alone. The failure:",
        ]
        lines += [run.failed[test], ""]
        if test in verdict.touched:
            lines.append("The change touches this test or its module: that fails the gate. Fix it.")
        elif test.split("[", maxsplit=1)[0] in listed:
            lines.append("It is listed in docs/flaky.md.")
        else:
            lines.append("Remedy: fix it, or add it to docs/flaky.md with its cause.")
    lines += [f"== FAILED twice: {test}" for test in verdict.failed]
    if len(verdict.flaky) > MOST_FLAKY:
        lines.append(f"== {len(verdict.flaky)} flaky tests: more than {MOST_FLAKY} fail the gate.")
    count = f"{len(verdict.failed)} failed twice, {len(verdict.flaky)} flaky"
    lines.append(f"== repeated {len(run.failed)}: {count}, {len(verdict.touched)} of them touched")
    return "\n".join(lines)


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


def main() -> int:
    """Repeat the failed tests; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.ci.repeat", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("failures", type=Path, help="the file of the plugin")
    add_since(parser)
    options = parser.parse_args()
    try:
        run = read_run(options.failures)
    except (OSError, ValueError, KeyError) as error:
        print(f"== the run did not finish, nothing is repeated: {error}")
        return 1
    if run.status == 0:
        print("== all tests passed: what failed is told above")
        return 1
    return int(not repeat_failed(run, options.since))


def repeat_failed(run: Run, since: str | None, options: Sequence[str] = ()) -> bool:
    """Repeat the failed tests of a run with its options of pytest; whether the gate passes."""
    if run.status != FAILED or not run.failed:
        print(f"== pytest ended with status {run.status}: nothing is repeated")
        return False
    if len(run.failed) > MOST_REPEATED:
        print(f"== {len(run.failed)} tests failed: too many to be flaky, none is repeated")
        return False
    repeated = {}
    for test in run.failed:
        print(f"== repeat {test}", flush=True)
        repeated[test] = passes_alone(test, options)
    verdict = judge(repeated, change(since))
    print(report(verdict, run, known_flaky()), flush=True)
    return verdict.passed


if __name__ == "__main__":
    sys.exit(main())
