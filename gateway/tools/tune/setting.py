"""What can be set on a llama.cpp server, which values are worth a try, and where to begin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from gateway.tools.local.embedded import DEFAULT_BATCH, DEFAULT_MICRO_BATCH
from gateway.tools.local.plan import DEFAULT_SLOTS, ServerSpec
from gateway.tools.local.topology import NumaNode, Topology

Pinning = Literal["free", "node", "cores"]
"""free: any CPU. node: the strong CPUs of its NUMA node. cores: one CPU of each of their cores."""

KNOBS = ("threads", "micro_batch", "slots", "batch", "pinning")
"""In the order in which they are searched: what usually matters most comes first."""

BATCH_SIZES = (128, 256, 512, 1024, 2048)  # tokens of a step; 2048 is llama.cpp's own default

MICRO_BATCH_SIZES = (64, 128, 256, 512, 1024)  # tokens of a computation; llama.cpp's default is 512

SLOT_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class Setting:
    """How every server of the machine is started."""

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
        """The setting with one knob turned; a computation never holds more than a step."""
        made: Setting = replace(self, **{knob: value})
        if knob == "batch":
            return replace(made, micro_batch=min(made.micro_batch, made.batch))
        return replace(made, batch=max(made.batch, made.micro_batch))


PINNING_LABELS: dict[Pinning, str] = {
    "free": "not pinned",
    "node": "on its node",
    "cores": "on its cores",
}


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The values of each knob; those of numbers ascend."""

    threads: tuple[int, ...]
    batch: tuple[int, ...]
    micro_batch: tuple[int, ...]
    slots: tuple[int, ...]
    pinning: tuple[Pinning, ...]

    def values(self, knob: str) -> tuple[Any, ...]:
        """All values of a knob."""
        found: tuple[Any, ...] = getattr(self, knob)
        return found

    def directions(self, knob: str, value: Any) -> tuple[tuple[Any, ...], ...]:
        """The other values, as ways that lead away from `value`, the nearest first."""
        values = self.values(knob)
        if knob == "pinning":
            return tuple((other,) for other in values if other != value)
        below = tuple(other for other in reversed(values) if other < value)
        above = tuple(other for other in values if other > value)
        return tuple(way for way in (below, above) if way)

    @property
    def size(self) -> int:
        """Settings of the full grid."""
        pairs = sum(micro <= batch for batch in self.batch for micro in self.micro_batch)
        return len(self.threads) * pairs * len(self.slots) * len(self.pinning)


def rule_of_thumb(topology: Topology) -> Setting:
    """What `llama-gateway up` and the role `llama_node` would do: where the search begins."""
    return Setting(
        _cores(topology),
        DEFAULT_BATCH,
        DEFAULT_MICRO_BATCH,
        DEFAULT_SLOTS,
        _usual_pinning(topology),
    )


def search_space(topology: Topology, *, context: int, max_slots: int) -> SearchSpace:
    """What is worth a try on this machine, with slots of `context` tokens.

    Threads go up to the physical cores of a NUMA node and no further. With several NUMA nodes a
    server always keeps to its own.
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
    """The planned server, set this way. It keeps no evicted prompts: each is to be read."""
    home = next(node for node in topology.nodes if node.number == spec.numa_node)
    return replace(
        spec,
        name=f"tune-{spec.numa_node}",
        slots=setting.slots,
        context=context,
        threads=setting.threads,
        batch=setting.batch,
        micro_batch=setting.micro_batch,
        cpus=pinned_cpus(setting.pinning, home),
        prompt_cache_bytes=0,
    )


def pinned_cpus(pinning: Pinning, node: NumaNode) -> tuple[int, ...] | None:
    """The CPUs that a server on this node is kept to; None for any."""
    match pinning:
        case "free":
            return None
        case "node":
            return node.performance_cpus
        case "cores":
            return tuple(sorted(core[0] for core in node.performance_cores))


def _cores(topology: Topology) -> int:
    """Of the smallest node: one number holds for all servers of a host."""
    return min(topology.threads_per_server(node) for node in topology.nodes)


def _usual_pinning(topology: Topology) -> Pinning:
    kept = len(topology.nodes) > 1 or any(node.efficiency_cpus for node in topology.nodes)
    return "node" if kept else "free"
