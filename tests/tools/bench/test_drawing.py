from __future__ import annotations

from pathlib import Path

import pytest

from gateway.tools.bench.drawing import draw_report
from tests.tools.bench.reports import sample_report


@pytest.mark.parametrize("fails", [False, True])
def test_a_plot_is_drawn(tmp_path: Path, fails: bool) -> None:
    path = tmp_path / "a.svg"
    draw_report(path, sample_report(fails=fails))
    assert "</svg>" in path.read_text()
    path = tmp_path / "a.png"
    draw_report(path, sample_report(fails=fails))
    assert path.read_bytes().startswith(b"\x89PNG")
