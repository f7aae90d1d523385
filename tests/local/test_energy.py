from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
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


class TestUnavailable:
    def test_a_machine_without_counters_or_with_bad_ones_is_told_what_to_try(
        self, server: PowercapTree, tmp_path: Path
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

    def test_a_counter_for_root_only_names_the_file_and_the_remedy(self, stranger: Path) -> None:
        tree = PowercapTree(stranger)
        tree.add("intel-rapl:0", "package-0", 1, mode=0o000)
        with pytest.raises(EnergyUnavailableError, match=r"intel-rapl:0/energy_uj") as one:
            open_meter(tree.root)
        assert "readable by root only" in str(one.value)
        assert "sudo chmod a+r" in str(one.value)


class TestMeter:
    def test_energy_counts_from_the_meters_making_also_where_a_counter_begins_again(
        self, server: PowercapTree
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
        # Readings are due before the smallest counter begins again.
        assert meter.longest_interval == pytest.approx(RANGE_UJ / 2e9, rel=0.01)

    def test_a_counter_that_goes_away_ends_the_measurement_and_says_why(
        self, server: PowercapTree
    ) -> None:
        meter = open_meter(server.root)
        counter = server.zone("intel-rapl:0").joinpath("energy_uj")
        text = counter.read_text()
        counter.unlink()
        assert meter.joules() is None
        counter.write_text(text)
        assert meter.joules() is None  # a gap can't be filled
        assert "energy_uj: no such file" in (meter.failure or "")

    async def test_a_long_measurement_is_read_often_enough(self, tmp_path: Path) -> None:
        tree = PowercapTree(tmp_path)
        small = 10_000_000  # 10 J: read every 5 ms
        tree.add("intel-rapl:0", "package-0", 0, range_uj=small)
        meter = open_meter(tree.root)
        seen = 0.0
        async with meter.sampling():
            for _ in range(4):
                tree.use("intel-rapl:0", 6_000_000)
                seen += 6.0
                async with asyncio.timeout(60):
                    while meter.counted < seen - 0.01:  # noqa: ASYNC110 - no event tells it
                        await asyncio.sleep(0.001)
        assert meter.joules() == pytest.approx(24.0)


@pytest.fixture
def stranger() -> Iterator[Path]:
    """A folder, and a process without root's rights meanwhile."""
    with tempfile.TemporaryDirectory(prefix="powercap-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(user)
