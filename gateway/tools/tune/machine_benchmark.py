"""Measures one setting on this machine: starts the servers, benchmarks them, ends them.

Other work would distort the figures, so it is measured from `/proc`: the time that CPUs were not
idle, `nice` work and time stolen by a hypervisor included.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from gateway.tools.local import LocalFleetError
from gateway.tools.local.energy import EnergyMeter
from gateway.tools.local.memory import MEMORY_RESERVE, format_gib
from gateway.tools.local.plan import LocalFleetPlan, check_specs
from gateway.tools.local.supervisor import LocalFleet
from gateway.tools.local.topology import Topology, read_text, read_topology
from gateway.tools.tune.measurements import BenchmarkRequest, Figures, combine_servers
from gateway.tools.tune.server_benchmark import BenchmarkError, ServerBenchmark, run_concurrently
from gateway.tools.tune.setting import Setting, server_spec


class SettingFailedError(Exception):
    """Servers with this setting can't be started or measured. The text says why."""


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """The result of one measurement."""

    figures: Figures
    other_work: float | None  # CPUs' worth of other work meanwhile; None: unknown


class MachineBenchmark:
    """Measures settings on this machine: one server on each NUMA node, all under the same load.

    `context`: tokens of one slot. `known_memory`: a setting, and the bytes that a server took with
    it in an earlier run. `meter` measures the machine's energy; None where it shows none.
    `read_machine` reads the topology before each start.
    """

    def __init__(
        self,
        plan: LocalFleetPlan,
        request: BenchmarkRequest,
        *,
        context: int,
        force_memory: bool = False,
        known_memory: tuple[Setting, int] | None = None,
        meter: EnergyMeter | None = None,
        read_machine: Callable[[], Topology] = read_topology,
    ) -> None:
        self._plan = plan
        self._request = request
        self._context = context
        self._force_memory = force_memory
        self._read_machine = read_machine
        self._known_memory = known_memory
        self._meter = meter

    async def measure(self, setting: Setting, seconds: float) -> BenchmarkResult:
        """Start, benchmark and end the servers within `seconds`.

        Raises SettingFailedError, OSError where a log or a port can't be opened, and TimeoutError
        when the time is over.
        """
        topology = self._read_machine()
        specs = [server_spec(setting, spec, topology, self._context) for spec in self._plan.specs]
        try:
            check_specs(topology, self._plan.model, tuple(specs), force=self._force_memory)
            if not self._force_memory:
                self._check_growth(setting, topology)
            fleet = LocalFleet(
                specs,
                self._plan.log_folder,
                binary=self._plan.binary,
                start_timeout=seconds + 60,  # the limit of the whole applies first
            )
            async with asyncio.timeout(seconds), fleet:
                return await self._run(fleet, setting, topology)
        except (LocalFleetError, BenchmarkError) as error:
            raise SettingFailedError(str(error)) from error
        except httpx.HTTPError as error:
            raise SettingFailedError(
                f"a server went away: {type(error).__name__} {error}"
            ) from error

    async def _run(
        self, fleet: LocalFleet, setting: Setting, topology: Topology
    ) -> BenchmarkResult:
        cpus = [cpu for node in topology.nodes for cpu in node.cpus]
        before = read_cpu_times(cpus)
        meter = self._meter
        async with AsyncExitStack() as stack:
            # A server is silent throughout a prefill, so only the whole has a limit.
            client = await stack.enter_async_context(
                httpx.AsyncClient(timeout=None, trust_env=False, limits=_NO_REUSE)  # noqa: S113
            )
            if meter is not None:
                await stack.enter_async_context(meter.sampling())
            results = await run_concurrently(
                [
                    ServerBenchmark(
                        url,
                        client,
                        self._request,
                        slots=setting.slots,
                        context=self._context,
                        read_joules=meter.joules if meter is not None else lambda: None,
                        servers=len(fleet.urls),
                    ).run()
                    for url in fleet.urls
                ]
            )
        pids = [pid for pid in fleet.pids if pid is not None]
        other_work = other_work_between(before, read_cpu_times(cpus), own={os.getpid(), *pids})
        memories = [memory for pid in pids if (memory := peak_memory(pid)) is not None]
        if memories and self._known_memory is None:
            self._known_memory = (setting, max(memories))
        figures = replace(combine_servers(results), memory=sum(memories) if memories else None)
        return BenchmarkResult(figures, other_work.busy_cpus if before.cpus else None)

    def _check_growth(self, setting: Setting, topology: Topology) -> None:
        """Refuse a setting whose memory may not fit.

        Beyond the model, memory grows no faster than the slots and the micro-batch do.
        """
        if self._known_memory is None:
            return
        known, taken = self._known_memory
        size = self._plan.model.size
        growth = max(setting.slots / known.slots, setting.micro_batch / known.micro_batch, 1.0)
        needed = int(size + max(0, taken - size) * growth)
        servers = len(self._plan.specs)
        headrooms = [topology.memory_available - needed * servers]
        if len(topology.nodes) > 1:
            headrooms += [n.memory_available - needed for n in topology.nodes if n.memory_allowed]
        if min(headrooms) < MEMORY_RESERVE:
            raise SettingFailedError(
                f"not enough memory: each of {servers} servers may take {format_gib(needed)}, and "
                f"{format_gib(MEMORY_RESERVE)} must stay free"
            )


def measurement_subject(
    plan: LocalFleetPlan, topology: Topology, request: BenchmarkRequest, context: int
) -> dict[str, Any]:
    """Return all that figures depend on besides the setting, as JSON values."""
    if plan.binary is None:
        server = f"embedded server of xllamacpp {version('xllamacpp')}"
    else:
        stat = plan.binary.path.stat()
        server = f"{plan.binary.path} ({stat.st_size} bytes, {stat.st_mtime_ns})"
    return {
        "model": plan.model.path.name,
        "model_bytes": plan.model.size,
        "server": server,
        "processor": topology.processor.name or topology.processor.architecture,
        "cores": [len(node.performance_cores) for node in topology.nodes],
        "quota": topology.cpu_quota,
        "prompt": request.prompt,
        "answer": request.answer,
        "context": context,
    }


# A new connection for each request: llama.cpp may close an idle one at any time.
_NO_REUSE = httpx.Limits(max_keepalive_connections=0)

MOST_OTHER_WORK = 0.25
"""CPUs' worth of other work that is tolerated: llama.cpp's threads wait for the slowest one."""

SAMPLE_SECONDS = 3.0  # between the two readings of a sample

MOST_NAMED_PROCESSES = 3


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Ticks since the machine booted."""

    busy: int
    total: int
    cpus: int
    processes: dict[int, tuple[str, int]]  # name and ticks by PID


@dataclass(frozen=True, slots=True)
class OtherWork:
    """CPUs' worth of other work between two readings."""

    busy_cpus: float
    cpus: int
    top_processes: tuple[tuple[int, str, float], ...]  # PID, name, CPUs

    def __str__(self) -> str:
        names = ", ".join(f"{name} ({pid}) {share:.0%}" for pid, name, share in self.top_processes)
        return f"{self.busy_cpus:.1f} of {self.cpus} CPUs are busy" + (
            f": {names}" if names else ""
        )


def read_cpu_times(cpus: Collection[int], root: Path = Path("/")) -> CpuTimes:
    """Read the times of these CPUs; zeros where the system has no `/proc/stat`."""
    busy = total = found = 0
    for line in read_text(root / "proc/stat").splitlines():
        name, *words = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cpus:
            user, nice, system, idle, iowait, irq, softirq, steal = (
                [int(word) for word in words[:8]] + [0] * 8
            )[:8]
            working = user + nice + system + irq + softirq + steal
            busy += working
            total += working + idle + iowait
            found += 1
    return CpuTimes(busy, total, found, _processes(root))


def other_work_between(before: CpuTimes, after: CpuTimes, own: Collection[int] = ()) -> OtherWork:
    """Return the work of all processes but `own`, which still ran at the second reading."""
    ticks = (after.total - before.total) / max(1, after.cpus)  # of one CPU
    if ticks <= 0:
        return OtherWork(0.0, after.cpus, ())
    spent = {
        pid: (name, used - before.processes.get(pid, (name, 0))[1])
        for pid, (name, used) in after.processes.items()
    }
    own_ticks = sum(used for pid, (_, used) in spent.items() if pid in own)
    others = sorted(
        ((pid, name, used / ticks) for pid, (name, used) in spent.items() if pid not in own),
        key=lambda one: -one[2],
    )
    return OtherWork(
        max(0.0, (after.busy - before.busy - own_ticks) / ticks),
        after.cpus,
        tuple(one for one in others[:MOST_NAMED_PROCESSES] if one[2] >= 0.05),
    )


def peak_memory(pid: int, root: Path = Path("/")) -> int | None:
    """Return the peak resident bytes of a process; None where `/proc` does not show it."""
    for line in read_text(root / f"proc/{pid}/status").splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM" and (words := value.split()):
            return int(words[0]) * 1024
    return None


def _processes(root: Path) -> dict[int, tuple[str, int]]:
    found: dict[int, tuple[str, int]] = {}
    try:
        ids = [int(entry.name) for entry in (root / "proc").iterdir() if entry.name.isdecimal()]
    except OSError:
        return found
    for pid in ids:
        # `4711 (any (name)) R ...`: the fields follow the last bracket.
        head, bracket, rest = read_text(root / f"proc/{pid}/stat").rpartition(")")
        words = rest.split()
        if bracket and len(words) > 12:
            found[pid] = (head.partition("(")[2], int(words[11]) + int(words[12]))
    return found
