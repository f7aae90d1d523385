"""Settings of a llama.cpp server, the values to search, and the rule of thumb to begin with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from gateway.tools.local.embedded import DEFAULT_BATCH, DEFAULT_MICRO_BATCH
from gateway.tools.local.plan import DEFAULT_SLOTS
from gateway.tools.local.server import ServerSpec
from gateway.tools.local.topology import NumaNode, Topology

Pinning = Literal["free", "node", "cores"]
"""free: any CPU. node: the performance CPUs of its NUMA node. cores: one CPU of each such core."""

KNOBS = ("threads", "micro_batch", "slots", "batch", "pinning")
"""In the order of the search: the knob that usually matters most comes first."""

BATCH_SIZES = (128, 256, 512, 1024, 2048)  # tokens of a step; 2048 is llama.cpp's own default

MICRO_BATCH_SIZES = (64, 128, 256, 512, 1024)  # tokens of a computation; llama.cpp's default is 512

SLOT_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting with which every server of the machine is started."""

    threads: int
    batch: int  # tokens of one step
    micro_batch: int  # tokens of one computation
    slots: int
    pinning: Pinning

    def __str__(self) -> str:
        return (
            f"threads {self.threads}, batch {self.batch}/{self.micro_batch}, slots {self.slots}, "
            f"{PINNING_LABELS[self.pinning]}"
        )

    def with_knob(self, knob: str, value: Any) -> Setting:
        """Return the setting with one knob changed; the micro-batch never exceeds the batch."""
        changed: Setting = replace(self, **{knob: value})
        if knob == "batch":
            return replace(changed, micro_batch=min(changed.micro_batch, changed.batch))
        return replace(changed, batch=max(changed.batch, changed.micro_batch))


PINNING_LABELS: dict[Pinning, str] = {
    "free": "not pinned",
    "node": "on its node",
    "cores": "on its cores",
}


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The values of each knob; numbers ascend."""

    threads: tuple[int, ...]
    batch: tuple[int, ...]
    micro_batch: tuple[int, ...]
    slots: tuple[int, ...]
    pinning: tuple[Pinning, ...]

    def values(self, knob: str) -> tuple[Any, ...]:
        """Return all values of a knob."""
        values: tuple[Any, ...] = getattr(self, knob)
        return values

    def directions(self, knob: str, value: Any) -> tuple[tuple[Any, ...], ...]:
        """Return the other values by direction from `value`, the nearest first."""
        values = self.values(knob)
        if knob == "pinning":
            return tuple((other,) for other in values if other != value)
        below = tuple(other for other in reversed(values) if other < value)
        above = tuple(other for other in values if other > value)
        return tuple(direction for direction in (below, above) if direction)

    @property
    def size(self) -> int:
        """Number of settings of the full grid."""
        pairs = sum(micro <= batch for batch in self.batch for micro in self.micro_batch)
        return len(self.threads) * pairs * len(self.slots) * len(self.pinning)


def rule_of_thumb(topology: Topology) -> Setting:
    """Return the setting of `llama-gateway up` and the role `llama_node`, where a search begins."""
    return Setting(
        _cores(topology),
        DEFAULT_BATCH,
        DEFAULT_MICRO_BATCH,
        DEFAULT_SLOTS,
        _usual_pinning(topology),
    )


def search_space(topology: Topology, *, context: int, max_slots: int) -> SearchSpace:
    """Return the values to try on this machine, with slots of `context` tokens.

    There are no more threads than physical cores of a NUMA node. With several NUMA nodes a server
    is always pinned to its own.
    """
    cores = _cores(topology)
    pinnings = [_usual_pinning(topology)]
    if len(topology.nodes) == 1 and any(
        len(core) > 1 for core in topology.nodes[0].performance_cores
    ):
        pinnings.append("cores")
    start = rule_of_thumb(topology)
    return SearchSpace(
        threads=tuple(sorted({max(1, n) for n in (cores // 2, cores * 3 // 4, cores - 1, cores)})),
        batch=tuple(size for size in BATCH_SIZES if size <= max(context, start.batch)),
        micro_batch=tuple(
            size for size in MICRO_BATCH_SIZES if size <= max(context, DEFAULT_MICRO_BATCH)
        ),
        slots=tuple(count for count in SLOT_COUNTS if count <= max(max_slots, start.slots)),
        pinning=tuple(pinnings),
    )


def server_spec(setting: Setting, spec: ServerSpec, topology: Topology, context: int) -> ServerSpec:
    """Return the planned server with this setting, and without a cache of evicted prompts."""
    numa_node = next(node for node in topology.nodes if node.number == spec.numa_node)
    return replace(
        spec,
        name=f"tune-{spec.numa_node}",
        slots=setting.slots,
        context=context,
        threads=setting.threads,
        batch=setting.batch,
        micro_batch=setting.micro_batch,
        cpus=pinned_cpus(setting.pinning, numa_node),
        prompt_cache_bytes=0,
    )


def pinned_cpus(pinning: Pinning, node: NumaNode) -> tuple[int, ...] | None:
    """Return the CPUs that a server on this node is pinned to; None for any."""
    match pinning:
        case "free":
            return None
        case "node":
            return node.performance_cpus
        case "cores":
            return tuple(sorted(core[0] for core in node.performance_cores))


def _cores(topology: Topology) -> int:
    """Cores of the smallest node, since all servers of a host get the same setting."""
    return min(topology.threads_per_server(node) for node in topology.nodes)


def _usual_pinning(topology: Topology) -> Pinning:
    pinned = len(topology.nodes) > 1 or any(node.efficiency_cpus for node in topology.nodes)
    return "node" if pinned else "free"
