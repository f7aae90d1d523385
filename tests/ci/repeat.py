"""Repeats the failed tests of a run once, each alone, and judges what came of it.

    python -m pytest -p tests.ci.failures --failures FILE ...
    python -m tests.ci.repeat FILE

A test that fails again has failed. One that passes is FLAKY. It fails the gate if the change
touched the test, what its file holds for its tests, or a module that this file mirrors or imports:
the change may have brought a race. More than `MOST_FLAKY` fail the gate in any case. The others
belong into docs/flaky.md, each with its cause, until they are mended.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KNOWN_FLAKY = ROOT / "docs" / "flaky.md"
MOST_FLAKY = 3
MOST_REPEATED = 10
"""More failures than these are no stumble, and none of them is repeated."""
LIMIT = 900.0
"""Seconds for one test alone; pytest's own limit for a test is shorter."""
FAILED = 1
"""pytest's exit status when tests failed; every other one but 0 means that the run is void."""
HUNK = re.compile(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@")
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""git's name of the tree without a file."""
RECENT_HOURS = 4
"""If nothing else is known, what was committed within so many hours of HEAD is the change."""


@dataclass(frozen=True)
class Run:
    """What a run of pytest came to."""

    status: int
    failed: dict[str, str]
    """Node id of each failed test, and the text of its failure."""


@dataclass
class Verdict:
    """What the repetition of the failed tests says about a change."""

    failed: list[str] = field(default_factory=list)
    """Node ids of tests that failed twice."""
    touched: list[str] = field(default_factory=list)
    """Node ids of flaky tests that the change touched."""
    flaky: list[str] = field(default_factory=list)
    """Node ids of all flaky tests."""

    @property
    def passed(self) -> bool:
        return not self.failed and not self.touched and len(self.flaky) <= MOST_FLAKY


Change = Mapping[str, AbstractSet[int]]
"""Files of the repository that a change touched, and their changed lines (numbers from 1)."""


def judge(repeated: Mapping[str, bool], changed: Change, root: Path = ROOT) -> Verdict:
    """Judge by which tests passed alone and by what the change touched."""
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

    Its module is the one that its file mirrors, and those of the gateway that this file imports.
    Another test of the file, and an import, is not the test's affair.
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
    """Yield the lines of a test and of all that tests share."""
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
    """Return the modules of the gateway that a file of tests mirrors or imports.

    `test_wait_queue_order.py` mirrors `wait_queue.py`: what follows the module's name says which
    side of it is tested.
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
            # What is imported from a package may be a module of it.
            names = [statement.module]
            names += [f"{statement.module}.{name.name}" for name in statement.names]
        else:
            continue
        for name in names:
            if name.split(".", maxsplit=1)[0] == "gateway":
                found |= {name.replace(".", "/") + end for end in (".py", "/__init__.py")}
    return found


def change(since: str | None, root: Path = ROOT) -> dict[str, set[int]]:
    """Return what changed since a revision; a file that was only moved has no changed line.

    Without a revision: since this branch left its upstream; else what HEAD and the commits of the
    hours before it changed. Without any commit that is older, everything.
    """
    base = since or _left_upstream(root) or _before_recent_hours(root) or EMPTY_TREE
    found: dict[str, set[int]] = {}
    lines: set[int] = set()
    for line in _git(root, "diff", "--unified=0", "--find-renames", base).splitlines():
        if line.startswith("+++ "):
            lines = found.setdefault(line.removeprefix("+++ ").removeprefix("b/"), set())
        elif hunk := HUNK.match(line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            # What was taken out stood between two lines.
            lines |= set(range(first, first + count)) if count else {first, first + 1}
    for name in _git(root, "ls-files", "--others", "--exclude-standard").splitlines():
        found[name] = set(range(1, len((root / name).read_bytes().splitlines()) + 1))
    return found


def _left_upstream(root: Path) -> str | None:
    head = _git(root, "rev-parse", "HEAD").strip()
    try:
        base = _git(root, "merge-base", "HEAD", "@{upstream}").strip()
    except subprocess.CalledProcessError:
        return None
    return base if base != head else None


def _before_recent_hours(root: Path) -> str | None:
    when = int(_git(root, "log", "-1", "--format=%ct"))
    before = f"--before={when - RECENT_HOURS * 3600}"
    return _git(root, "rev-list", "-1", before, "HEAD").strip() or None


def _git(root: Path, *words: str) -> str:
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def known_flaky(page: Path = KNOWN_FLAKY) -> str:
    """Return the page of known flaky tests; empty where there is none."""
    return page.read_text() if page.exists() else ""


def passes_alone(test: str) -> bool:
    """Run one test in a process of its own, and show what it prints."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", test]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=LIMIT, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def read_run(path: Path) -> Run:
    """Read what `tests.ci.failures` wrote.

    Raises OSError or ValueError when the run did not come to its end.
    """
    data = json.loads(path.read_text())
    return Run(data["status"], data["failed"])


def report(verdict: Verdict, run: Run, listed: str) -> str:
    """Tell the verdict, with the first failure of each flaky test."""
    lines: list[str] = []
    for test in verdict.flaky:
        lines += [
            f"== FLAKY {test}",
            "It failed, and passed when it was repeated alone. It failed so:",
        ]
        lines += [run.failed[test], ""]
        if test in verdict.touched:
            lines.append(
                "The change touches this test or its module: that fails the gate. Mend it."
            )
        elif test.split("[", maxsplit=1)[0] in listed:
            lines.append("docs/flaky.md knows it.")
        else:
            lines.append("Remedy: mend it, or add it to docs/flaky.md with its cause.")
    lines += [f"== FAILED twice: {test}" for test in verdict.failed]
    if len(verdict.flaky) > MOST_FLAKY:
        lines.append(f"== {len(verdict.flaky)} flaky tests: more than {MOST_FLAKY} fail the gate.")
    count = f"{len(verdict.failed)} failed twice, {len(verdict.flaky)} flaky"
    lines.append(f"== repeated {len(run.failed)}: {count}, {len(verdict.touched)} of them touched")
    return "\n".join(lines)


def main() -> int:
    """Repeat and judge; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.ci.repeat", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("failures", type=Path, help="what the plugin tests.ci.failures wrote")
    parser.add_argument(
        "--since",
        default=os.environ.get("GATE_SINCE") or None,
        help="revision before the change (default: $GATE_SINCE, else the upstream branch, "
        f"else the last commit {RECENT_HOURS} hours older than HEAD)",
    )
    options = parser.parse_args()
    try:
        run = read_run(options.failures)
    except (OSError, ValueError, KeyError) as error:
        print(f"== the run did not come to its end, nothing is repeated: {error}")
        return 1
    if run.status == 0:
        return 0
    if run.status != FAILED or not run.failed:
        print(f"== pytest ended with status {run.status}: nothing is repeated")
        return 1
    if len(run.failed) > MOST_REPEATED:
        print(f"== {len(run.failed)} tests failed: too many to be stumbles, none is repeated")
        return 1
    repeated = {}
    for test in run.failed:
        print(f"== repeat {test}", flush=True)
        repeated[test] = passes_alone(test)
    verdict = judge(repeated, change(options.since))
    print(report(verdict, run, known_flaky()), flush=True)
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main())
