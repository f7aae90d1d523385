"""A short, seeded piece of chaos; the long one is `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import run_seed, running_testbed

SEEDS = (9, 10)
"""Seeds with many kinds of faults in a short time; the second run shows leaks of the first."""
SECONDS = 1.5


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_whatever_happens_each_request_has_one_honest_end_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    async with running_testbed(servers=1, prompts=3) as testbed:
        for seed in SEEDS:
            report = await run_seed(
                testbed, seed, SECONDS, process_faults=False, keep=tmp_path, min_whole=21
            )
            assert report.violations == []
            assert report.outcomes["whole"] > 20
            assert report.faults.total() > 10
