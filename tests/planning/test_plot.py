from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from gateway.planning.comparison import compare
from gateway.planning.generate import Traffic, generate
from gateway.planning.plot import NoPlotsError, draw
from gateway.planning.report import Report
from tests.planning.build import machine


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    machines = [machine(2, str(i)) for i in range(3)]
    return compare(generate(Traffic(requests=200, rate=0.2), 1), machines, ["nginx", "haproxy"])


def test_a_picture_is_drawn(reports: list[Report], tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    draw(path, reports, "200 requests")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert 5_000 < path.stat().st_size < 200_000
    draw(tmp_path / "plot.svg", reports, "200 requests")
    text = (tmp_path / "plot.svg").read_text()
    assert "<svg" in text


def test_a_missing_package_is_told_with_the_remedy(reports: list[Report], tmp_path: Path) -> None:
    with (
        patch.dict(sys.modules, {"matplotlib.figure": None}),
        pytest.raises(NoPlotsError, match=r"pip install 'llama-gateway\[plots\]'"),
    ):
        draw(tmp_path / "plot.png", reports, "title")
