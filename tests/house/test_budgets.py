from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import budgets
from tests.house.source import ROOT

TEXT = f"""# What stands above stays.
reference_seconds = 0.1

[lines]
means = "lines of something"
limits = [
  {{ value = 100, date = 2026-11-01, reason = "the beginning" }},
  {{ value = 90, date = 2026-11-02 }},
]

[seconds]
means = "seconds of something"
tolerance = 0.1
python = {json.dumps(budgets.PYTHON)}
limits = [
  {{ value = 200, date = 2026-11-01, reason = "the beginning" }},
]
"""


def file_of(folder: Path, text: str = TEXT) -> budgets.BudgetFile:
    path = folder / "budgets.toml"
    path.write_text(text)
    return budgets.BudgetFile.read(path)


def test_what_is_above_its_limit_is_passed_and_told_with_the_line_that_raises_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of(tmp_path)
    assert budgets.judge(file, {"lines": 90, "seconds": 220}) == 0
    assert budgets.judge(file, {"lines": 91, "seconds": 220}) == 1
    assert "{ value = 91, date = " in capsys.readouterr().out
    assert budgets.judge(file, {"lines": 89, "seconds": 221}) == 1
    assert "--lower writes what was measured" in capsys.readouterr().out


@pytest.mark.parametrize("reason", ["", ', reason = " "'])
def test_a_raise_without_a_reason_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    last = "date = 2026-11-02 },"
    raised = f"{last}\n  {{ value = 95, date = 2026-11-03{reason} }},"
    path = tmp_path / "budgets.toml"
    path.write_text(TEXT.replace(last, raised))
    with pytest.raises(SystemExit, match="2"):
        budgets.main(["--file", str(path)])
    assert "lines: from 90 to 95 without a reason" in capsys.readouterr().err
    path.write_text(TEXT.replace(last, raised.replace(reason + " }", ', reason = "more tests" }')))
    assert budgets.BudgetFile.read(path).budgets["lines"].verdict(95) == "within"


def test_a_lowered_limit_takes_the_place_of_one_lowered_before(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    budgets.lower(file, {"lines": 80, "seconds": 181})
    again = budgets.BudgetFile.read(file.path)
    assert [limit.value for limit in again.budgets["lines"].limits] == [100, 80]
    assert [limit.value for limit in again.budgets["seconds"].limits] == [200]
    budgets.lower(again, {"lines": 85, "seconds": 179})
    last = budgets.BudgetFile.read(file.path).budgets
    assert [limit.value for limit in last["lines"].limits] == [100, 80]
    assert [limit.value for limit in last["seconds"].limits] == [200, 179]


def test_another_python_is_reported_only(tmp_path: Path) -> None:
    file = file_of(tmp_path, TEXT.replace(json.dumps(budgets.PYTHON), '"CPython 2.7"'))
    assert file.budgets["seconds"].verdict(500) == "reported"


def test_the_file_of_this_checkout_is_kept_when_it_is_written(tmp_path: Path) -> None:
    file = file_of(tmp_path, budgets.FILE.read_text())
    file.write()
    assert budgets.BudgetFile.read(file.path) == file


BUSY = "import time\nwhile time.process_time() < 0.3: pass"
ORPHAN = f"""
import os, time
if os.fork() == 0:
    if os.fork() == 0:
        {BUSY.replace(chr(10), chr(10) + " " * 8)}
        open("done", "w").close()
        os.closerange(0, 3)
        time.sleep(3)
    os._exit(0)
os.wait()
while not os.path.exists("done"):
    time.sleep(0.01)
"""


def run_cpu(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    file_of(folder)
    command = [sys.executable, "-m", "tests.house.budgets", "--cpu", "seconds"]
    command += ["--file", str(folder / "budgets.toml"), "--", sys.executable, "-c", program]
    path = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=path, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_cpu_time_of_a_process_left_behind_counts(tmp_path: Path) -> None:
    ended = run_cpu(tmp_path, ORPHAN)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stderr.split()[0]) >= 0.3


@pytest.mark.slow
def test_a_failed_command_gives_the_exit_status(tmp_path: Path) -> None:
    ended = run_cpu(tmp_path, "print('hello'); raise SystemExit(7)")
    assert (ended.returncode, ended.stdout) == (7, "hello\n")
