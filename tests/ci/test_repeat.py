from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ci import repeat
from tests.ci.repeat import judge, known_flaky, read_run, touched

TEST = "tests/api/test_sse.py::test_one[a]"


SOURCE = """\
import pytest
from gateway.nodes import node

LIMIT = 3

@pytest.fixture
def folder(): ...

@pytest.mark.slow
def test_one(folder):
    assert LIMIT

def test_two(): ...

class TestThree:
    def prepare(self): ...
    def test_four(self): ...
    def test_five(self): ...
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A project with one file of tests."""
    path = tmp_path / "tests" / "api" / "test_sse.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "touched"),
    [("gateway/cli/keys.py", False), ("gateway/api/sse.py", True), ("gateway/nodes/node.py", True)],
    ids=["another", "mirrored", "imported"],
)
def test_a_flaky_test_fails_the_gate_if_its_module_changed(
    checkout: Path, module: str, touched: bool
) -> None:
    verdict = judge({TEST: True}, {module: set(), "README.md": {1}}, checkout)
    assert verdict.flaky == [TEST]
    assert verdict.touched == ([TEST] if touched else [])
    assert verdict.passed is not touched


def test_more_than_three_flaky_tests_fail_the_gate(checkout: Path) -> None:
    names = [f"tests/api/test_sse.py::test_{number}" for number in range(4)]
    assert judge(dict.fromkeys(names[:3], True), {}, checkout).passed
    assert not judge(dict.fromkeys(names, True), {}, checkout).passed


@pytest.mark.parametrize(
    ("test", "near", "far"),
    [
        ("test_one[a]", {4, 6, 7, 9, 10, 11}, {1, 2, 3, 13, 15, 16, 17, 18}),
        ("test_two", {4, 6, 7, 13}, {1, 2, 9, 10, 11, 15, 16, 17, 18}),
        ("TestThree::test_four", {4, 6, 7, 16, 17}, {1, 2, 9, 10, 11, 13, 18}),
    ],
)
def test_changed_lines_of_other_tests_do_not_count(
    checkout: Path, test: str, near: set[int], far: set[int]
) -> None:
    file = "tests/api/test_sse.py"
    assert {line for line in near if touched(f"{file}::{test}", {file: {line}}, checkout)} == near
    assert not touched(f"{file}::{test}", {file: far}, checkout)


def test_every_known_flaky_test_exists() -> None:
    for test in re.findall(r"^\| `([^`]+)`", known_flaky(), re.MULTILINE):
        path, name = test.split("::")[0], test.split("::")[-1]
        assert f"def {name}(" in (repeat.ROOT / path).read_text(), test


@pytest.mark.slow
def test_a_test_that_fails_first_and_passes_alone_is_flaky(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plugin, repetition and verdict together, on tests made for this."""
    (tmp_path / "test_made.py").write_text(
        "import pathlib, pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 'bad' == 'good'\n"
        "def test_stumbles():\n"
        "    mark = pathlib.Path('mark')\n"
        "    seen = mark.exists()\n"
        "    mark.touch()\n"
        "    assert seen, 'the first time'\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError('no disk')\n"
        "def test_without_its_fixture(broken): pass\n"
    )
    failures = tmp_path / "failures.json"
    plugin = ["-p", "tests.ci.repeat", "--failures", str(failures)]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", *plugin, "test_made.py"]
    root = str(Path(repeat.__file__).resolve().parents[2])
    monkeypatch.setenv("PYTHONPATH", root)
    assert subprocess.run(command, cwd=tmp_path, check=False, capture_output=True).returncode == 1

    run = read_run(failures)
    names = {test.split("::")[1]: text for test, text in run.failed.items()}
    assert set(names) == {"test_bad", "test_stumbles", "test_without_its_fixture"}
    assert "the first time" in names["test_stumbles"]
    assert "no disk" in names["test_without_its_fixture"]

    monkeypatch.setattr(repeat, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["repeat", str(failures), "--since", "HEAD"])
    monkeypatch.setattr(repeat, "change", lambda since: {})
    assert repeat.main() == 1
    output = capsys.readouterr().out
    assert "== FLAKY test_made.py::test_stumbles" in output
    assert "== FAILED twice: test_made.py::test_bad" in output
    assert "2 failed twice, 1 flaky" in output


MANY = {"status": 1, "failed": dict.fromkeys(map(str, range(11)), ""), "tests": 11}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "did not finish"),
        ("{", "did not finish"),
        ('{"status": 2, "failed": {}, "tests": 0}', "ended with status 2"),
        (json.dumps(MANY), "none is repeated"),
    ],
    ids=["no file", "half a file", "broken off", "many failures"],
)
def test_a_run_is_not_repeated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    told: str,
) -> None:
    failures = tmp_path / "failures.json"
    if text is not None:
        failures.write_text(text)
    monkeypatch.setattr(sys, "argv", ["repeat", str(failures)])
    assert repeat.main() == 1
    assert told in capsys.readouterr().out
