from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from setup import python_build
from tests.bench.report import BEGIN, END

ROOT = Path(__file__).parents[2]
LIMIT = 500.0

two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core for the proxy, one for the load"
)


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.bench.dataplane", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT)
@two_cores
def test_a_quick_run_without_a_proxy_is_valid(tmp_path: Path) -> None:
    """With one scenario of each kind; `.ci/run` makes a quick run of all of them."""
    page, file = tmp_path / "page.md", tmp_path / "bench.json"
    words = ["--quick", "--targets", "direct", "--streams", "20", "--markdown", str(page)]
    words += ["--only", "plain-c32,chunk,streams-20", "--json", str(file)]
    done = bench(*words)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    samples = {sample["scenario"]: sample for sample in report["samples"]}
    assert list(samples) == ["plain-c32", "chunk", "streams-20"]
    assert not any(sample["errors"] for sample in report["samples"])
    assert samples["plain-c32"]["figures"]["upstream_connections"] == 0
    delays = samples["streams-20"]["figures"]
    assert 0 < delays["p50_ms"] <= delays["p99_ms"] <= delays["max_ms"]
    assert page.read_text().startswith(BEGIN)
    assert "tests.bench.dataplane --quick --targets direct" in page.read_text()
    build = f"python: {platform.python_version()}, {python_build.described()}"
    assert f"- {build}\n" in page.read_text()
    assert f"{build}\n" in done.stderr
    assert build.endswith(report["machine"]["python"])
    assert done.stdout.strip() in page.read_text().partition(END)[0]
