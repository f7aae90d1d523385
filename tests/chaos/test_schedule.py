from __future__ import annotations

import random

from tests.chaos.schedule import GATEWAY_FAULTS, PROCESS_FAULTS, schedule


def test_a_schedule_follows_from_its_seed() -> None:
    def faults(seed: int, *, process_faults: bool = True) -> list[str]:
        rng = random.Random(seed)
        return [
            str(fault)
            for fault in schedule(rng, 20.0, ["a", "b"], ["r"], process_faults=process_faults)
        ]

    assert faults(1) == faults(1) != faults(2)
    kinds = {line.split()[1] for seed in range(40) for line in faults(seed)}
    assert kinds >= {"once", "standing", "process", "stop", "link", *PROCESS_FAULTS}
    assert any(one in " ".join(faults(seed)) for seed in range(40) for one in GATEWAY_FAULTS)
    mild = {line.split()[1] for seed in range(40) for line in faults(seed, process_faults=False)}
    assert not mild & set(PROCESS_FAULTS)
