"""Progress where the output is no terminal: lines on stderr, and of servers the log afterwards."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from gateway.cli.progress import (
    DownloadProgress,
    StartupProgress,
)
from gateway.local.server import ServerEvent


def test_after_the_start_a_server_that_exits_and_returns_is_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StartupProgress(["one"]) as progress:
        pass
    with capture_logs() as logged:
        progress.show(ServerEvent("one", "exited", "exit status 1", 4.0))
        progress.show(ServerEvent("one", "loading"))
        progress.show(ServerEvent("one", "ready", seconds=3.14))
    assert capsys.readouterr().err.strip() == ""
    assert logged == [
        {"event": "server exited", "log_level": "warning", "server": "one",
         "how": "exit status 1", "restart_in": 4.0},
        {"event": "server ready", "log_level": "info", "server": "one", "seconds": 3.1},
    ]  # fmt: skip


def test_a_download_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    times = [0.0]
    with DownloadProgress("h/m.gguf", clock=lambda: times[0]) as progress:
        for done in range(26):
            times[0] = float(done)
            progress.show_bytes(done << 20, 40 << 20)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "Downloading h/m.gguf",
        "  0 MiB of 40 MiB (0%), 0.0 MiB/s",
        "  10 MiB of 40 MiB (25%), 1.0 MiB/s, about 30 s left",
        "  22 MiB of 40 MiB (55%), 1.0 MiB/s, about 18 s left",
    ]
