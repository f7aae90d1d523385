"""What is simulated: the machines of an inventory with speeds, or a fleet given as text; routers.

**Routers** hold several models as far as their host's memory goes. Each model on each router is a
simulated server of its own, an instance, with its slots and caches. Those of one router that
compute at the same time share its speed in equal parts. A larger model is slower in proportion,
unless its speed is known: a router's speeds are those of a model of `SPEED_MEMORY`. Plain servers
may stand beside routers; each is an instance that is always loaded.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import msgspec
import yaml

from gateway.config.errors import single_line
from gateway.config.fields import parse_size
from gateway.config.inventory import Inventory, host_memory
from gateway.workshop.simulate.simulation import (
    BATCH_COST,
    BATCH_TOKENS,
    CACHE_RAM_MIB,
    NO_REQUESTS,
    Job,
    ModelSpeed,
    SimulatedFleet,
    SimulatedMachine,
    Trace,
    tokens_in_host_memory,
)

MOST_NODES = 100_000

_NUMBER = r"\d*\.?\d+"
_GROUP = re.compile(
    rf"(?P<count>\d{{1,9}})x(?P<slots>\d{{1,9}})@(?P<decode>{_NUMBER}):(?P<prefill>{_NUMBER})"
    rf"(?:\+(?P<cost>{_NUMBER}))?(?:/(?P<memory>[\w.]+))?"
)

MODELS_NEEDED = "routers need --models, such as 12x2GiB:30GiB, or `llama-gateway models --json`"
FLEET_SYNTAX = "COUNTxSLOTS@DECODE:PREFILL, such as 4x2@40:600"


class FleetError(Exception):
    """A fleet that can't be simulated; the message has the remedy."""


_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class NodeSpeeds(msgspec.Struct, frozen=True):
    """How fast one node is; None: not given."""

    name: str
    prefill_tps: _Positive | None = None
    decode_tps: _Positive | None = None
    batch_cost: Annotated[float, msgspec.Meta(ge=0)] | None = None
    slots: int | None = msgspec.field(default=None, name="slots_total")  # 0: not loaded
    router: str | None = None  # of which it is one model
    models: tuple[str, ...] = ()


def from_text(
    text: str, batch_tokens: int = BATCH_TOKENS, cache_ram_mib: int = CACHE_RAM_MIB
) -> list[SimulatedMachine]:
    """A fleet from text: groups of equal nodes, with commas between them.

    `1000x2@40:600` are 1,000 nodes of 2 slots that decode 40 and prefill 600 tokens/s; `+0.3`
    behind it: what one more busy slot adds to a step, as a share; `/64GiB`: they are routers, with
    so much memory for models. `batch_tokens` and `cache_ram_mib` are the servers' `--batch-size`
    and `--cache-ram`. Raises FleetError.
    """
    machines: list[SimulatedMachine] = []
    for part in text.replace(" ", "").split(","):
        found = _GROUP.fullmatch(part)
        if found is None:
            raise FleetError(f"{part!r} is no fleet: write {FLEET_SYNTAX}")
        count = int(found["count"])
        if not 1 <= count <= MOST_NODES - len(machines):
            raise FleetError(f"{part!r}: a fleet has 1 to {MOST_NODES} nodes")
        with _named(part):
            first = SimulatedMachine(
                "",
                int(found["slots"]),
                float(found["prefill"]),
                float(found["decode"]),
                float(found["cost"] or BATCH_COST),
                batch_tokens=batch_tokens,
                cache_tokens=tokens_in_host_memory(cache_ram_mib),
                memory=parse_size(found["memory"] or 0),
            )
        machines += [first] * count
    return [replace(one, name=f"node-{number}") for number, one in enumerate(machines, 1)]


def from_inventory(
    inventory: Inventory,
    speeds: Mapping[str, NodeSpeeds],
    usual: SimulatedMachine,
    *,
    on_demand: bool = False,
) -> tuple[list[SimulatedMachine], list[str]]:
    """The machines of an inventory, and notes on what had to be assumed about them.

    A node has the speeds in `speeds`, else those of `usual` times its `speed_hint`. Nodes that get
    no work (`enabled: false`, `standby: true`) are left out. `on_demand`: nodes that have models in
    `speeds`, and unknown ones with `memory`, are routers. Raises FleetError.
    """
    machines: list[SimulatedMachine] = []
    unsized: list[str] = []
    guessed: list[str] = []
    memory = host_memory(inventory.nodes)
    # By router: what is known of its models.
    held: defaultdict[str | None, dict[str, NodeSpeeds]] = defaultdict(dict)
    for name, one in speeds.items():
        held[one.router] |= dict.fromkeys(one.models or (name.partition("/")[2],), one)
    for node in inventory.nodes:
        if not node.enabled or node.standby:
            continue
        own, models = speeds.get(node.name, NodeSpeeds(node.name)), held[node.name]
        known = {
            model: (one.prefill_tps, one.decode_tps)
            for model, one in models.items()
            if one.prefill_tps and one.decode_tps
        }
        is_router = bool(models) or (on_demand and node.name not in speeds and node.host in memory)
        if is_router and not on_demand:
            raise FleetError(f"{node.name} is a router: {MODELS_NEEDED}")
        if is_router and node.host not in memory:
            raise FleetError(
                f"the inventory says no `memory` of {node.host}, whose models are loaded on demand"
            )
        slots = (
            node.slots or own.slots or max((one.slots or 0 for one in models.values()), default=0)
        )
        if not slots:
            unsized.append(node.name)
        if not known and (own.prefill_tps is None or own.decode_tps is None):
            guessed.append(node.name)
        costs = [one.batch_cost for one in (own, *(models[model] for model in known))]
        with _named(node.name):
            machine = replace(
                usual,
                name=node.name,
                slots=slots or 1,
                prefill_tps=own.prefill_tps or usual.prefill_tps * node.speed_hint,
                decode_tps=own.decode_tps or usual.decode_tps * node.speed_hint,
                batch_cost=next((cost for cost in costs if cost is not None), usual.batch_cost),
                host=node.host,
                calibrated=node.calibrate and node.kind == "llama.cpp",
                models=frozenset(models or node.models or own.models if on_demand else ()),
                memory=memory[node.host] if is_router else 0,
                model_speeds=known,
            )
        machines.append(machine)
    if not machines:
        raise FleetError("the inventory has no node that gets work")
    notes = []
    if unsized:
        notes.append(f"assumed one slot for {_some(unsized)}: no `slots` in the inventory")
    if guessed:
        notes.append(
            f"assumed {usual.decode_tps:g} and {usual.prefill_tps:g} tokens/s times `speed_hint` "
            f"for {_some(guessed)}: --speeds FILE tells more"
        )
    return machines, notes


def read_speeds(path: Path) -> dict[str, NodeSpeeds]:
    """Speeds by node, from what `llama-gateway nodes --json` writes or a file like it.

    A list of nodes (or a mapping with the key `nodes`), each with `name`, `prefill_tps`,
    `decode_tps` and, if known, `batch_cost` and `slots_total`; YAML or JSON. Raises FleetError.
    """
    value = _read_document(path)
    nodes = value.get("nodes") if isinstance(value, dict) else value
    try:
        return {one.name: one for one in msgspec.convert(nodes, list[NodeSpeeds])}
    except msgspec.ValidationError as error:
        raise FleetError(
            f"{path}: {error} (write a list of nodes, or take what `llama-gateway nodes --json` "
            "writes)"
        ) from None


def _read_document(path: Path) -> Any:
    read = json.loads if path.suffix == ".json" else yaml.safe_load
    try:
        return read(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise FleetError(f"{path}: can't be read: {single_line(str(error))}") from None


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Name what a machine was made of, where it can't be one. Raises FleetError."""
    try:
        yield
    except ValueError as error:
        raise FleetError(f"{source!r}: {error}") from None


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


GIB = 1 << 30
SPEED_MEMORY = 8 * GIB  # bytes of the model for which a router's speeds are given
LOAD_SPEED = GIB  # bytes of a model that are loaded in a second
UNLOAD_SECONDS = 1.0  # until a process has gone and its memory is free
MOST_MODELS = 1000

MODELS_SYNTAX = "COUNTxSMALLEST:LARGEST, such as 12x2GiB:30GiB"
_SIZES = re.compile(r"(?P<count>\d+)x(?P<least>[\w.]+):(?P<most>[\w.]+)")


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model that routers can load."""

    name: str
    memory: int
    load_seconds: float
    share: float | None = None  # of the requests, as a multiple of others' shares; None: not given


def models_from_text(text: str) -> list[SimulatedModel]:
    """Models from text, or of the file that it names.

    `12x2GiB:30GiB` are 12 models, each larger than the one before by the same factor. A file is a
    list of `name`, `memory` and, unless it is loaded with `LOAD_SPEED`, `load_seconds`; or what
    `llama-gateway models --json` writes. Raises FleetError.
    """
    found = _SIZES.fullmatch(text.replace(" ", ""))
    if found is None:
        return _read_models(Path(text))
    try:
        count, least, most = int(found["count"]), parse_size(found["least"]), parse_size(found[3])
    except ValueError:
        raise FleetError(f"{text!r} is no set of models: write {MODELS_SYNTAX}") from None
    if not (1 <= count <= MOST_MODELS and 0 < least <= most):
        raise FleetError(f"{text!r}: write 1 to {MOST_MODELS} models, the smallest size first")
    factor = (most / least) ** (1 / max(1, count - 1))
    sizes = enumerate((round(least * factor**place) for place in range(count)), 1)
    return [SimulatedModel(f"model-{place}", size, size / LOAD_SPEED) for place, size in sizes]


class _ModelEntry(msgspec.Struct):
    name: str
    memory: int | str
    load_seconds: _Positive | None = None
    share: _Positive | None = None


def _read_models(path: Path) -> list[SimulatedModel]:
    if not path.is_file():
        raise FleetError(f"{path}: no such file (name a YAML file, or write {MODELS_SYNTAX})")
    value = _read_document(path)
    if isinstance(value, dict) and isinstance(value.get("placements"), list):
        return placed_models(value["placements"])
    remedy = "write a list of {name: qwen3-8b, memory: 9GiB, load_seconds: 8, share: 2}"
    try:
        models = [
            SimulatedModel(
                one.name,
                size := parse_size(one.memory),
                one.load_seconds or size / LOAD_SPEED,
                one.share,
            )
            for one in msgspec.convert(value, list[_ModelEntry])
        ]
    except (msgspec.ValidationError, ValueError) as error:
        raise FleetError(f"{path}: {error} ({remedy})") from None
    if not 1 <= len({one.name for one in models if one.memory > 0}) == len(models) <= MOST_MODELS:
        raise FleetError(
            f"{path}: holds no model, one twice, one of no memory, or over {MOST_MODELS} ({remedy})"
        )
    if None in (shares := {one.share for one in models}) and len(shares) > 1:
        raise FleetError(f"{path}: give each model a `share`, or none")
    return models


def placed_models(placements: Sequence[Mapping[str, Any]]) -> list[SimulatedModel]:
    """The models of a running fleet's routers, from the `placements` that its gateway tells.

    One that was never loaded is taken to be as large as the largest. Raises FleetError.
    """
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    sizes = Counter[str]()
    try:
        for row in placements:
            name = str(row["model"])
            seconds[name].append(max(0.1, row["expected_load_seconds"]))
            sizes[name] = max(sizes[name], row["memory"] or 0)
        largest = max(sizes.values(), default=0)
        models = [
            SimulatedModel(name, sizes[name] or largest, fmean(found))
            for name, found in seconds.items()
        ]
    except (KeyError, TypeError, ValueError):
        raise FleetError("the placements are of another version of the gateway") from None
    if not largest:
        raise FleetError("the memory of no model is known yet: load one, or write models.X.memory")
    return models


def with_shares(models: Sequence[SimulatedModel], seed: int) -> list[SimulatedModel]:
    """Models with the share of each: as given, else by Zipf's law in an order drawn by the seed."""
    ranks = [*range(1, len(models) + 1)]
    random.Random(f"ranks of {seed}").shuffle(ranks)
    return [
        model if model.share is not None else replace(model, share=1.0 / rank)
        for model, rank in zip(models, ranks, strict=True)
    ]


def check_fit(nodes: Sequence[SimulatedMachine], models: Sequence[SimulatedModel]) -> None:
    """Raise FleetError unless each model fits on a router, or a plain server has it."""
    if not any(node.memory for node in nodes):
        raise FleetError(
            f"{nodes[0].name} has no memory for models: write 2x2@40:600/48GiB, `memory` in the "
            "inventory, or --memory 48GiB"
        )
    for model in models:
        able = (one.memory or model.memory for one in nodes if one.serves(model.name))
        most = max(able, default=0)
        if model.memory > most:
            raise FleetError(
                f"{model.name} takes {model.memory / GIB:.1f} GiB, the largest router has "
                f"{most / GIB:.1f} GiB: give one more memory, or leave the model out"
            )


def with_all_speeds(
    nodes: Sequence[SimulatedMachine], models: Sequence[SimulatedModel]
) -> list[SimulatedMachine]:
    """Machines with the speed of every model on every router: those not known follow from others.

    A model that was measured elsewhere is as much faster or slower there than others; of one that
    was measured nowhere its size tells.
    """
    sizes = {model.name: model.memory / SPEED_MEMORY for model in models}
    bases: list[ModelSpeed] = []  # of each node, with a model of `SPEED_MEMORY`
    factors: dict[str, list[ModelSpeed]] = {name: [] for name in sizes}
    for node in nodes:
        known = {name: speed for name, speed in node.model_speeds.items() if name in sizes}
        base = node.prefill_tps, node.decode_tps
        if known:
            base = _mean_speed([(r * sizes[one], w * sizes[one]) for one, (r, w) in known.items()])
        bases.append(base)
        for name, (read, write) in known.items():
            factors[name].append((read / base[0], write / base[1]))
    usual = {
        name: _mean_speed(found or [(1 / sizes[name],) * 2]) for name, found in factors.items()
    }
    found = []
    for node, (read, write) in zip(nodes, bases, strict=True):
        speeds = {
            name: node.model_speeds.get(name, (read * factor[0], write * factor[1]))
            for name, factor in usual.items()
            if node.serves(name)
        }
        full = replace(node, prefill_tps=read, decode_tps=write, model_speeds=speeds)
        found.append(full if node.memory else node)
    return found


def _mean_speed(speeds: Sequence[ModelSpeed]) -> ModelSpeed:
    return fmean(read for read, _ in speeds), fmean(write for _, write in speeds)


class SimulatedInstance(NamedTuple):
    """A model on a router, or a plain server."""

    machine: SimulatedMachine
    router: int  # its place among the nodes
    model: SimulatedModel | None  # None: a plain server


def instances_of(
    nodes: Sequence[SimulatedMachine], models: Sequence[SimulatedModel]
) -> list[SimulatedInstance]:
    """Each plain server, and each model on each router: those of the first router first."""
    found = []
    for place, node in enumerate(with_all_speeds(nodes, models)):
        if not node.memory:
            found.append(SimulatedInstance(node, place, None))
            continue
        for model in models:
            if model.name in node.model_speeds:
                prefill, decode = node.model_speeds[model.name]
                machine = replace(
                    node,
                    name=f"{node.name}/{model.name}",
                    prefill_tps=prefill,
                    decode_tps=decode,
                    host=node.host or node.name,
                    models=frozenset({model.name}),
                )
                found.append(SimulatedInstance(machine, place, model))
    return found


class RouterFleet(SimulatedFleet):
    """Routers, and plain servers beside them, whose servers are those of `instances_of`.

    It holds the fronts to what is possible: an instance takes jobs while it is loaded, is unloaded
    only while it has none, and all of a host fit into its memory.
    """

    def __init__(
        self,
        nodes: Sequence[SimulatedMachine],
        models: Sequence[SimulatedModel],
        trace: Trace = NO_REQUESTS,
        loaded: Collection[int] = (),
    ) -> None:
        """`loaded`: the instances of routers that are loaded from the start."""
        self.nodes, self.models, self.instances = nodes, models, instances_of(nodes, models)
        routers = [one.router for one in self.instances]
        plain = [index for index, one in enumerate(self.instances) if one.model is None]
        super().__init__([one.machine for one in self.instances], trace, routers, plain)
        self.hosts = [node.host or node.name for node in nodes]
        self.held: set[int] = set()  # those that take memory
        self.free = self.host_memory  # bytes of each host
        self._load_ends: list[tuple[float, int, bool]] = []  # when, which, whether it is a load
        for index in loaded:
            self.hold(index)
            self.loaded.add(index)

    def host_of(self, index: int) -> str:
        """The host of an instance."""
        return self.hosts[self.instances[index].router]

    def model_of(self, index: int) -> SimulatedModel:
        """The model of a router's instance."""
        model = self.instances[index].model
        assert model is not None
        return model

    @property
    def largest_first(self) -> list[SimulatedModel]:
        """The models in the order in which they are placed by hand."""
        return sorted(self.models, key=lambda one: -one.memory)

    @property
    def host_memory(self) -> dict[str, int]:
        """The memory of each host for models: that of its router with the most."""
        found: dict[str, int] = {}
        for host, node in zip(self.hosts, self.nodes, strict=True):
            found[host] = max(found.get(host, 0), node.memory)
        return found

    def load(self, index: int) -> None:
        """Load an instance, which takes jobs once `end_loads` has told that it has ended."""
        self.hold(index)
        seconds = self.model_of(index).load_seconds
        self.loads += 1
        self.load_seconds += seconds
        heappush(self._load_ends, (self.now + seconds, index, True))

    def unload(self, index: int) -> None:
        """Unload an idle instance, whose memory is free once `end_loads` has told it."""
        if self.servers[index].next_end >= 0 or index not in self.loaded:
            raise ValueError(f"{self.machines[index].name} works or is not loaded")
        self.loaded.discard(index)
        self.servers[index].restart()
        heappush(self._load_ends, (self.now + UNLOAD_SECONDS, index, False))

    @property
    def next_load_end(self) -> float:
        """When the next load or unload ends; infinity: none is under way."""
        return self._load_ends[0][0] if self._load_ends else math.inf

    def end_loads(self) -> list[tuple[int, bool]]:
        """End the loads and unloads that are due: which, and whether it was a load."""
        ended = []
        while self.next_load_end <= self.now:
            _, index, is_load = heappop(self._load_ends)
            if is_load:
                self.loaded.add(index)
            else:
                self.held.discard(index)
                self.free[self.host_of(index)] += self.model_of(index).memory
            ended.append((index, is_load))
        return ended

    def fits(self, index: int) -> bool:
        """Whether an instance is a model that is not held and for which its host has room."""
        model = self.instances[index].model
        if model is None or index in self.held:
            return False
        return model.memory <= self.free[self.host_of(index)]

    def places_for(self, model: str) -> list[int]:
        """The instances of a model that fit."""
        return list(filter(self.fits, self.able(model)))

    def hold(self, index: int) -> None:
        """Take the memory of an instance."""
        if not self.fits(index):
            raise ValueError(f"{self.machines[index].name} does not fit or is loaded")
        self.held.add(index)
        self.free[self.host_of(index)] -= self.model_of(index).memory

    def send(self, job: Job, node: int) -> None:
        """Send a job to a loaded instance, now."""
        if node not in self.loaded:
            raise ValueError(f"{self.machines[node].name} is not loaded")
        super().send(job, node)


# Placements by hand: sets of instances that stay.


def greedy_placement(fleet: RouterFleet, requests: Mapping[str, int]) -> frozenset[int] | None:
    """Each model once, the largest first, then copies where the most work falls on one.

    `requests`: of each model. None: the models don't fit.
    """
    placed, copies = RouterFleet(fleet.nodes, fleet.models), Counter[str]()
    # A larger model is slower in proportion.
    work = {one.name: requests.get(one.name, 0) * one.memory for one in fleet.models}

    def load(index: int) -> tuple[float, int]:
        """The work of an instance's router for its speed; of equals first that with most room."""
        router, seconds = placed.routers[index], 0.0
        for held in placed.held:
            if placed.routers[held] == router:
                model = placed.model_of(held).name
                share = requests.get(model, 0) / copies[model]
                seconds += share / placed.machines[held].decode_tps
        return seconds, -placed.free[placed.host_of(index)]

    def add(model: str) -> bool:
        """Hold a model where the load is least; whether it fits anywhere."""
        index = min(placed.places_for(model), key=load, default=None)
        if index is None:
            return False
        placed.hold(index)
        copies[model] += 1
        return True

    if not all(add(one.name) for one in fleet.largest_first):
        return None
    while any(add(name) for name in sorted(work, key=lambda name: -work[name] / copies[name])):
        pass
    return frozenset(placed.held)


def random_placements(
    fleet: RouterFleet, count: int, rng: random.Random
) -> Iterator[frozenset[int]]:
    """Each model once somewhere, then copies until nothing more fits; at most `count`."""
    for _ in range(count):
        placed = RouterFleet(fleet.nodes, fleet.models)
        for model in fleet.largest_first:
            possible = placed.places_for(model.name)
            if not possible:
                break
            placed.hold(rng.choice(possible))
        else:
            indexes = [index for index, one in enumerate(placed.instances) if one.model]
            rng.shuffle(indexes)
            for index in filter(placed.fits, indexes):
                placed.hold(index)
            yield frozenset(placed.held)


def describe_placement(fleet: RouterFleet, indexes: Collection[int]) -> dict[str, list[str]]:
    """The models of each router by their names."""
    found: dict[str, list[str]] = {node.name: [] for node in fleet.nodes if node.memory}
    for index in sorted(indexes):
        found[fleet.nodes[fleet.routers[index]].name].append(fleet.model_of(index).name)
    return found
