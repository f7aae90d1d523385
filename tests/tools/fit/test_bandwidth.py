from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.tools.fit.bandwidth import StreamError, bandwidth_of_modules, measure_bandwidth
from gateway.tools.local.topology import read_topology
from tests.tools.local.machine import make_machine


def test_modules_give_three_quarters_of_their_peak() -> None:
    assert bandwidth_of_modules(12, 4800) == pytest.approx(345.6e9)


def test_memory_is_read_at_a_plausible_speed() -> None:
    assert 1e8 < measure_bandwidth(read_topology()) < 1e13


def test_a_machine_without_room_is_not_filled(tmp_path: Path) -> None:
    machine = read_topology(make_machine(tmp_path, [[[0], [1]]]))
    with pytest.raises(StreamError, match="--channels and --mt-per-s"):
        measure_bandwidth(replace(machine, memory_available=1 << 20))
