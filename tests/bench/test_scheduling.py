from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.scheduling.__main__ import main
from tests.bench.scheduling.fronts import FRONTS, PEERS
from tests.bench.scheduling.report import MARKS

ROOT = Path(__file__).parents[2]
LIMIT = 500.0

two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core for the fronts, one for the load"
)


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT)
@two_cores
@pytest.mark.parametrize("front", ["gateway", *PEERS])
def test_a_quick_run_answers_every_request(front: str, tmp_path: Path) -> None:
    if FRONTS[front].target.program() is None:
        pytest.skip(f"{front} is not installed")
    page, file = tmp_path / "page.md", tmp_path / "bench.json"
    words = ["--quick", "--scale", "40", "--only", front]
    words += ["--json", str(file), "--markdown", str(page)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.scheduling", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output = json.loads(file.read_text())
    [played] = output["played"]
    assert len(played["records"]) == 16
    assert {record["problem"] for record in played["records"]} == {""}
    [figures] = output["figures"]
    assert 0 < figures["cached"] < 1
    assert figures["mean"] > played["bounds"]["alone"] > played["bounds"]["queued"] > 0
    assert page.read_text().startswith(MARKS[0])
    assert done.stdout.strip() in page.read_text().partition(MARKS[1])[0]


@pytest.mark.slow
def test_a_quick_run_in_virtual_time_answers_every_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, file = tmp_path / "page.md", tmp_path / "bench.json"
    assert main(["--virtual", "--quick", "--json", str(file), "--markdown", str(page)]) == 0
    played = json.loads(file.read_text())["played"]
    assert [one["front"] for one in played] == ["gateway", "gateway-unknown", "least_conn"]
    for one in played:
        assert [record["problem"] for record in one["records"]] == [""] * 16
    ours, _, theirs = (sum(record["cached"] for record in one["records"]) for one in played)
    assert ours > theirs > 0
    output = capsys.readouterr().out
    assert "| gateway, lengths unknown |" in output
    assert output.strip() in page.read_text()
