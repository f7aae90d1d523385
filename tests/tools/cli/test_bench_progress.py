"""Lines, where the output is no terminal. The bar is in `test_bench.py`."""

from __future__ import annotations

import pytest

from gateway.tools.bench.exchange import RequestResult
from gateway.tools.cli.bench_progress import LINE_SECONDS, BenchProgress
from tests.tools.bench.reports import sample_report


def test_a_long_load_has_a_line_now_and_then_and_one_at_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    (first, _) = sample_report().loads
    with BenchProgress(clock=lambda: now[0]) as progress:
        progress.phase("warming up")
        progress.request_done(RequestResult(0, 0.0, events=10))
        progress.load_started(first.figures.load)
        for _ in range(10):
            now[0] += LINE_SECONDS * 0.6
            progress.request_done(RequestResult(1, 0.0, events=90))
        progress.request_done(RequestResult(1, 0.0, error="reset"))
        progress.load_done(first)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "warming up"
    assert lines[1] == "1 at a time, 10.0 tokens/s: 2 done"
    assert len(lines) == 1 + 5 + 1
    assert lines[-1].startswith("1 at a time: 5 requests in 5.0 s, 0 failed, TTFT 120 ms")
