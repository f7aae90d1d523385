from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from gateway.local.energy import (
    EnergyUnavailableError,
    find_energy_domains,
    open_meter,
)
from tests.each_case import each_case
from tests.local.powercap import RANGE_UJ, PowercapTree


@pytest.fixture
def server(tmp_path: Path) -> PowercapTree:
    """Two sockets with DRAM counters, as an Intel server shows them."""
    tree = PowercapTree(tmp_path)
    for package in (0, 1):
        tree.add(f"intel-rapl:{package}", f"package-{package}", 1_000_000)
        tree.add(f"intel-rapl:{package}:0", "core", 500_000)
        tree.add(f"intel-rapl:{package}:1", "dram", 2_000_000)
    return tree


@each_case(
    ("zones", "counted"),
    [
        # Cores are parts of their package; the platform holds all packages.
        (("0 package-0", "0:0 core", "0:1 uncore", "1 psys"), {"0": "package-0"}),
        (
            ("0 package-0", "0:0 core", "0:1 dram", "1 package-1", "1:0 core", "1:1 dram"),
            {"0": "package-0", "0:1": "package-0 dram", "1": "package-1", "1:1": "package-1 dram"},
        ),
        # The same package by MMIO counts once, and where only MMIO shows it.
        (("-mmio:0 package-0", "0 package-0"), {"0": "package-0"}),
        (("-mmio:0 package-0",), {"-mmio:0": "package-0"}),
        # AMD's parts; two dies of one package.
        (("0 package-0", "0:0 core", "1 package-1"), {"0": "package-0", "1": "package-1"}),
        (
            ("0 package-0-die-0", "1 package-0-die-1"),
            {"0": "package-0-die-0", "1": "package-0-die-1"},
        ),
    ],
)
def test_packages_and_their_memory_count_once(
    zones: tuple[str, ...], counted: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = PowercapTree(Path(folder))
        for zone in zones:
            number, name = zone.split()
            tree.add(zone_name(number), name, 1)
        found = {one.counter.parent.name: one.name for one in find_energy_domains(tree.root)}
    assert found == {zone_name(number): name for number, name in counted.items()}


def zone_name(number: str) -> str:
    return f"intel-rapl{number}" if number.startswith("-mmio") else f"intel-rapl:{number}"


def test_a_machine_without_counters_or_with_bad_ones_is_told_what_to_try(
    server: PowercapTree, tmp_path: Path
) -> None:
    with pytest.raises(EnergyUnavailableError, match="sudo modprobe intel_rapl_msr"):
        open_meter(tmp_path / "none")
    energy = server.zone("intel-rapl:0") / "energy_uj"
    span = server.zone("intel-rapl:1") / "max_energy_range_uj"
    for file, text in (
        *((energy, text) for text in ("", "none", "-5", str(RANGE_UJ + 1), "²")),
        *((span, text) for text in ("", "0", "unknown")),
    ):
        good = file.read_text()
        file.write_text(text)
        with pytest.raises(EnergyUnavailableError, match=file.name):
            open_meter(server.root)
        file.write_text(good)
    # A part that can't be read is not left out of the sum.
    (server.zone("intel-rapl:1:1") / "energy_uj").unlink()
    with pytest.raises(EnergyUnavailableError, match=r"intel-rapl:1:1/energy_uj: no such file"):
        open_meter(server.root)


def test_energy_counts_from_the_meters_making_also_where_a_counter_begins_again(
    server: PowercapTree,
) -> None:
    meter = open_meter(server.root)
    assert meter.joules() == 0
    server.use("intel-rapl:0", 3_000_000)
    server.use("intel-rapl:0:0", 2_000_000)  # in the package's
    server.use("intel-rapl:1:1", 500_000)
    assert meter.joules() == pytest.approx(3.5)
    for _ in range(5):  # 2.5 times round
        server.use("intel-rapl:0", RANGE_UJ // 2)
        meter.joules()
    assert meter.joules() == pytest.approx(3.5 + 5 * (RANGE_UJ // 2) / 1e6)
    counter = server.zone("intel-rapl:0") / "energy_uj"
    text = counter.read_text()
    counter.unlink()
    assert meter.joules() is None
    counter.write_text(text)
    assert meter.joules() is None, "a gap can't be filled"
    # Readings are due before the smallest counter begins again.
    assert meter.longest_interval == pytest.approx(RANGE_UJ / 2e9, rel=0.01)
