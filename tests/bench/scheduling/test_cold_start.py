from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.scheduling.cold_start import Start, ratios

COLD = Start(requests=12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        COLD,
        replace(COLD, wait=0.0),
        replace(COLD, wait=0.0, one_host=True),
        replace(COLD, wait=0.0, system_tokens=200),
    ],
    ids=["calibrated", "at once", "one host", "short prompts"],
)
def test_the_fifth_to_twelfth_request_of_a_cold_gateway_are_served_by_a_fast_node(
    tmp_path: Path, start: Start
) -> None:
    for seed in (1, 2, 3):
        (factor,), served = ratios(start, seed, tmp_path)
        assert factor <= 1.5, (seed, factor, served.by)


@pytest.mark.slow
def test_exploring_alone_finds_the_fastest_node(tmp_path: Path) -> None:
    start = Start(calibrate=False)
    for seed in (1, 2, 3):
        factors, served = ratios(start, seed, tmp_path)
        assert served.by[-6:] == [60.0] * 6, (seed, factors)
