"""Measures one setting on this machine: starts the servers, benchmarks them, ends them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import httpx

from gateway.tools.local import LocalFleetError
from gateway.tools.local.memory import MEMORY_RESERVE, check_memory, format_gib
from gateway.tools.local.plan import LocalFleetPlan
from gateway.tools.local.supervisor import LocalFleet
from gateway.tools.local.topology import Topology, read_topology
from gateway.tools.tune.measurements import BenchmarkRequest, Figures, combine_servers
from gateway.tools.tune.other_work import other_work_between, peak_memory, read_cpu_times
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
    it in an earlier run. `read_machine` reads the topology before each start.
    """

    def __init__(
        self,
        plan: LocalFleetPlan,
        request: BenchmarkRequest,
        *,
        context: int,
        force_memory: bool = False,
        known_memory: tuple[Setting, int] | None = None,
        read_machine: Callable[[], Topology] = read_topology,
    ) -> None:
        self._plan = plan
        self._request = request
        self._context = context
        self._force_memory = force_memory
        self._read_machine = read_machine
        self._known_memory = known_memory

    async def measure(self, setting: Setting, seconds: float) -> BenchmarkResult:
        """Start, benchmark and end the servers within `seconds`.

        Raises SettingFailedError, OSError where a log or a port can't be opened, and TimeoutError
        when the time is over.
        """
        topology = self._read_machine()
        specs = [server_spec(setting, spec, topology, self._context) for spec in self._plan.specs]
        try:
            bound = [spec.memory_node for spec in specs]
            check_memory(topology, self._plan.model, bound, force=self._force_memory)
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
        # A server is silent throughout a prefill, so only the whole has a limit.
        async with httpx.AsyncClient(timeout=None, trust_env=False, limits=_NO_REUSE) as client:  # noqa: S113
            results = await run_concurrently(
                [
                    ServerBenchmark(
                        url, client, self._request, slots=setting.slots, context=self._context
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
