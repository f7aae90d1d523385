"""A short, seeded piece of chaos; the long one is `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import a_kit, run_seed

SEEDS = (9, 10)
"""With faults of many kinds in a short time. What a run may leave behind is told by the second."""
SECONDS = 1.5


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_whatever_happens_each_request_has_one_honest_end_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    async with a_kit(servers=1, prompts=3) as kit:
        for seed in SEEDS:
            print(f"seed {seed}: python -m tests.chaos --runs 1 --seconds {SECONDS} --seed {seed}")
            outcome = await run_seed(kit, seed, SECONDS, machine=False, keep=tmp_path, least=21)
            assert outcome.violations == []
            assert outcome.outcomes["whole"] > 20
            assert outcome.faults.total() > 10
