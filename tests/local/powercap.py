"""Generates the energy counters that Linux shows in sysfs, under any root."""

from __future__ import annotations

from pathlib import Path

RANGE_UJ = 262_143_328_850  # of an Intel package


class PowercapTree:
    """A generated `/sys/class/powercap`, whose entries are links as the kernel makes them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._links = root / "sys/class/powercap"
        self._devices = root / "sys/devices/virtual/powercap"
        self._devices.mkdir(parents=True)
        (self._links / "intel-rapl").mkdir(parents=True)
        (self._links / "intel-rapl" / "enabled").write_text("1\n")

    def add(self, zone: str, name: str, energy_uj: int) -> None:
        """Add a counter."""
        folder = self._devices / zone
        folder.mkdir()
        (self._links / zone).symlink_to(folder)
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
        (folder / "energy_uj").write_text(f"{energy_uj}\n")

    def zone(self, zone: str) -> Path:
        """The folder of a counter."""
        return self._devices / zone

    def use(self, zone: str, microjoules: int) -> None:
        """Advance a counter, which begins at 0 again after its range."""
        counter = self._devices / zone / "energy_uj"
        value = int(counter.read_text()) + microjoules
        counter.write_text(f"{value % RANGE_UJ if value > RANGE_UJ else value}\n")
