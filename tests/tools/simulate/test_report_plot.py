from __future__ import annotations

from pathlib import Path

import pytest

from gateway.tools.simulate.comparison import compare
from gateway.tools.simulate.report import PolicyReport, plot_reports
from gateway.tools.simulate.traffic import Traffic, generate
from tests.tools.simulate.build import machine


@pytest.fixture(scope="module")
def reports() -> list[PolicyReport]:
    machines = [machine(2, str(i)) for i in range(3)]
    return compare(generate(Traffic(requests=200, rate=0.2), 1), machines, ["nginx", "haproxy"])


def test_a_plot_is_drawn(reports: list[PolicyReport], tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    plot_reports(path, reports, "200 requests")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert 5_000 < path.stat().st_size < 200_000
    plot_reports(tmp_path / "plot.svg", reports, "200 requests")
    text = (tmp_path / "plot.svg").read_text()
    assert "<svg" in text
