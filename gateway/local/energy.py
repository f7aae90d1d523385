"""Reads the energy that processors and memory take, from the RAPL counters in sysfs.

Linux shows the counters of Intel and AMD processors as `/sys/class/powercap/intel-rapl:*`. A
package's counter holds all of the processor (its `core` and `uncore` counters are parts of it),
`dram` is beside it, and `psys` is the whole platform, packages included. So packages and DRAM are
added up. `intel-rapl-mmio` shows the same packages a second time.

Untried on real hardware: the tests read sysfs trees that they generate.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.local.topology import read_number, read_text

ROOT = Path("/")
POWERCAP = "sys/class/powercap"
MICROJOULES = 1e-6
JOULES_PER_KWH = 3_600_000
# More than one package takes: how soon a counter may begin again is computed with it.
MOST_WATTS = 1000.0

NO_COUNTERS = (
    "this machine shows no energy counters in /sys/class/powercap (RAPL): virtual machines, "
    "containers and most ARM processors have none. Remedy on Intel and AMD hardware: sudo modprobe "
    "intel_rapl_msr"
)

FORBIDDEN_COUNTER = (
    "{path} is readable by root only. Remedy: run the command as root, or allow it until the next "
    "boot: sudo chmod a+r /sys/class/powercap/intel-rapl*:*/energy_uj (not on a machine with users "
    "whom you do not trust: the counters tell about the work of others, CVE-2020-8694)"
)


class EnergyUnavailableError(Exception):
    """Energy can't be measured here. The text says why, and the remedy where there is one."""


@dataclass(frozen=True, slots=True)
class EnergyDomain:
    """A counter, of which no part is counted by another one."""

    name: str  # such as "package-0" or "package-0 dram"
    counter: Path  # microjoules since some moment
    range_uj: int  # the counter's highest value, after which it begins at 0 again

    def read(self) -> int:
        """Return what it counts now. Raises EnergyUnavailableError."""
        try:
            text = self.counter.read_text(errors="replace").strip()
        except PermissionError:
            raise EnergyUnavailableError(FORBIDDEN_COUNTER.format(path=self.counter)) from None
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise EnergyUnavailableError(f"{self.counter}: {why}") from error
        if not (text.isascii() and text.isdecimal()) or not int(text) <= self.range_uj > 0:
            raise EnergyUnavailableError(
                f"{self.counter}: {text[:40]!r} is not a number up to its max_energy_range_uj "
                f"({self.range_uj})"
            )
        return int(text)


def find_energy_domains(sysroot: Path = ROOT) -> tuple[EnergyDomain, ...]:
    """Find the packages of this machine and their DRAM, in the order of their names.

    Raises EnergyUnavailableError where there is none, or one of them can't be read: a sum without
    it would be too low.
    """
    found: dict[str, EnergyDomain] = {}
    zones = (sysroot / POWERCAP).glob("intel-rapl*:*")
    for zone in sorted(zones, key=lambda one: ("mmio" in one.name, one.name)):
        name = read_text(zone / "name").strip()
        # A package has one number, its parts have two: `intel-rapl:0`, `intel-rapl:0:1`.
        whole, _, _ = zone.name.rpartition(":")
        if ":" in whole and name == "dram":
            name = f"{read_text(zone.with_name(whole) / 'name').strip()} dram"
        elif ":" in whole or not name.startswith("package"):
            continue
        range_uj = read_number(zone / "max_energy_range_uj") or 0
        # The same package by MMIO comes last.
        found.setdefault(name, EnergyDomain(name, zone / "energy_uj", range_uj))
    if not found:
        raise EnergyUnavailableError(NO_COUNTERS)
    for domain in found.values():
        domain.read()
    return tuple(found[name] for name in sorted(found))


class EnergyMeter:
    """Adds up the energy of some domains, over any number of times that a counter begins again.

    `joules` must be called at least every `longest_interval` seconds: `sampling` sees to it. A
    counter that can't be read any more ends the measurement: `joules` is None from then on, and
    `failure` says why. It is not for several threads.
    """

    def __init__(self, domains: Sequence[EnergyDomain]) -> None:
        """Begin at 0 joules. Raises EnergyUnavailableError where a counter can't be read."""
        self.domains = tuple(domains)
        self.failure: str | None = None
        self._last_uj = [domain.read() for domain in self.domains]
        self._total_uj = [0] * len(self.domains)

    @property
    def longest_interval(self) -> float:
        """Seconds within which no counter can pass its range twice; half of the shortest time."""
        return min(domain.range_uj for domain in self.domains) * MICROJOULES / MOST_WATTS / 2

    def joules(self) -> float | None:
        """Read the counters; return the energy since the meter was made, None after a failure."""
        if self.failure is None:
            try:
                for index, domain in enumerate(self.domains):
                    now_uj = domain.read()
                    # At most one new beginning at 0 lies between.
                    self._total_uj[index] += (now_uj - self._last_uj[index]) % domain.range_uj
                    self._last_uj[index] = now_uj
            except EnergyUnavailableError as error:
                self.failure = str(error)
        return sum(self._total_uj) * MICROJOULES if self.failure is None else None

    @asynccontextmanager
    async def sampling(self) -> AsyncGenerator[None, None]:
        """Read the counters often enough within this context, however long it lasts."""

        async def keep_reading() -> None:
            while self.joules() is not None:  # noqa: ASYNC110 - nothing tells that one advances
                await asyncio.sleep(self.longest_interval)

        task = asyncio.create_task(keep_reading())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def open_meter(sysroot: Path = ROOT) -> EnergyMeter:
    """Return a meter of this machine's packages and DRAM. Raises EnergyUnavailableError."""
    return EnergyMeter(find_energy_domains(sysroot))


def kwh_per_million(joules_per_token: float) -> float:
    """Return the energy of a million tokens in kWh."""
    return joules_per_token * 1_000_000 / JOULES_PER_KWH
