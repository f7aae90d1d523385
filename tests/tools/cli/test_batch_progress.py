from __future__ import annotations

import io
import time
from typing import Any

import pytest

from gateway.tools.cli.batch_progress import (
    BatchDisplay,
    Estimate,
    UploadProgress,
    describe,
    progress_of,
    span,
)


def batch(done: int = 0, **own: Any) -> dict[str, Any]:
    return {
        "id": "batch_1",
        "status": "in_progress",
        "request_counts": {"total": 1000, "completed": done, "failed": 0},
        "llama_gateway": own,
    }


def test_progress_in_one_line() -> None:
    now = time.time()
    progress = progress_of(batch(250, tokens_per_second=1234.5))
    assert describe(progress, now + 90, now).startswith(
        "in progress, 250 of 1,000 done, 1,234 tokens/s, ends about "
    )
    assert describe(progress, now + 90, now).endswith("(in 90 s)")
    paused = progress_of(batch(paused={"at": 1, "reason": "over its budget"}))
    assert "paused (over its budget)" in describe(paused, None, now)


def test_of_another_gateway_only_what_its_api_tells_is_shown() -> None:
    assert describe(progress_of({"status": "validating"}), None, 0.0) == "validating"


def test_an_end_that_the_gateway_does_not_tell_is_estimated_from_the_lines_done() -> None:
    clock = iter([100.0, 110.0]).__next__
    estimate = Estimate(clock)
    assert estimate.end(progress_of(batch(100))) is None
    assert estimate.end(progress_of(batch(200))) == 110.0 + 80.0
    assert estimate.end(progress_of(batch(200, expected_end=500))) == 500.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (3600, "1 h"), (5400, "1 h 30 min"),
     (86_400, "1 d"), (180_000, "2 d 2 h")],
)  # fmt: skip
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_without_a_terminal_there_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = [0.0]
    with BatchDisplay("batch_1", lambda: times[0]) as display:
        for second in range(60):
            times[0] = float(second)
            display.update(batch(second))
        display.update({**batch(60), "status": "completed"})
    lines = capsys.readouterr().err.splitlines()
    assert 4 <= len(lines) <= 8
    assert lines[0].startswith("batch_1: in progress, 0 of 1,000 done")
    assert lines[-1] == "batch_1: completed, 60 of 1,000 done"


def test_an_upload_reads_as_its_file_does() -> None:
    with UploadProgress(io.BytesIO(b"12345"), 5) as progress:
        assert progress.read(3) == b"123"
        assert progress.seek(0) == progress.tell() == 0
        assert progress.read() == b"12345"
