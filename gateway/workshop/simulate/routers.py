"""Simulated routers: servers that hold several models as far as their memory goes.

Each model on each router is a simulated server of its own, with its slots and caches. Those of one
router that compute at the same time share its speed in equal parts. A larger model is slower in
proportion: a router's speeds are those of a model of `SPEED_MEMORY`.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path

import yaml

from gateway.config.fields import parse_size
from gateway.workshop.simulate.fleets import FleetError
from gateway.workshop.simulate.simulation import SimulatedFleet, SimulatedMachine
from gateway.workshop.simulate.trace import Job

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


def models_from_text(text: str) -> list[SimulatedModel]:
    """Models from text, or of the file that it names.

    `12x2GiB:30GiB` are 12 models, each larger than the one before by the same factor. A file is a
    list of `name`, `memory` and, unless it is loaded with `LOAD_SPEED`, `load_seconds`. Raises
    FleetError.
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
    sizes = [round(least * factor**place) for place in range(count)]
    return [
        SimulatedModel(f"model-{place}", size, size / LOAD_SPEED)
        for place, size in enumerate(sizes, 1)
    ]


def _read_models(path: Path) -> list[SimulatedModel]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "problem", None) or "no YAML"
        raise FleetError(f"{path}: {reason} (name a YAML file, or write {MODELS_SYNTAX})") from None
    models: list[SimulatedModel] = []
    remedy = "write a list of {name: qwen3-8b, memory: 9GiB, load_seconds: 8}"
    for number, entry in enumerate(value if isinstance(value, list) else [None], 1):
        model = _model_of(entry)
        if model is None:
            raise FleetError(f"{path}: entry {number} is no model ({remedy})")
        models.append(model)
    if not models or len({one.name for one in models}) < len(models) or len(models) > MOST_MODELS:
        raise FleetError(
            f"{path}: holds no model, one twice, or more than {MOST_MODELS} ({remedy})"
        )
    return models


def _model_of(entry: object) -> SimulatedModel | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return None
    try:
        memory = parse_size(entry.get("memory"))
        seconds = float(entry.get("load_seconds", memory / LOAD_SPEED))
    except (TypeError, ValueError):
        return None
    sound = memory > 0 and 0.0 < seconds < math.inf
    return SimulatedModel(entry["name"], memory, seconds) if sound else None


def check_fit(routers: Sequence[SimulatedMachine], models: Sequence[SimulatedModel]) -> None:
    """Raise FleetError unless each model fits on some router."""
    plain = next((router.name for router in routers if not router.memory), None)
    if plain is not None:
        raise FleetError(f"{plain} has no memory for models: write it as 2x2@40:600/48GiB")
    most = max(router.memory for router in routers)
    for model in models:
        if model.memory > most:
            raise FleetError(
                f"{model.name} takes {model.memory / GIB:.1f} GiB, the largest router has "
                f"{most / GIB:.1f} GiB: give one more memory, or leave the model out"
            )


def instance_machines(
    routers: Sequence[SimulatedMachine], models: Sequence[SimulatedModel]
) -> list[SimulatedMachine]:
    """Each model on each router: those of the first router first."""
    return [
        replace(
            router,
            name=f"{router.name}/{model.name}",
            prefill_tps=router.prefill_tps * SPEED_MEMORY / model.memory,
            decode_tps=router.decode_tps * SPEED_MEMORY / model.memory,
            host=router.host or router.name,
            models=frozenset({model.name}),
            memory=model.memory,
        )
        for router in routers
        for model in models
    ]


class RouterFleet(SimulatedFleet):
    """Routers, whose instances are its servers in the order of `instance_machines`.

    It holds the fronts to what is possible: an instance takes jobs while it is loaded, is unloaded
    only while it has none, and all of a router fit into its memory.
    """

    __slots__ = (
        "_active",
        "_clocks",
        "_clocks_set",
        "_used",
        "_versions",
        "held",
        "load_seconds",
        "loaded",
        "loads",
        "models",
        "routers",
    )

    def __init__(
        self,
        routers: Sequence[SimulatedMachine],
        models: Sequence[SimulatedModel],
        jobs: Sequence[Job],
        loaded: Collection[int] = (),
    ) -> None:
        """`loaded`: the instances that are loaded from the start."""
        super().__init__(instance_machines(routers, models), jobs)
        self.routers, self.models = routers, models
        self.loads, self.load_seconds = 0, 0.0
        self.held: set[int] = set()  # those that take memory
        self.loaded: set[int] = set()
        self._used = [0] * len(routers)
        # A router's own clock runs slower the more of its instances compute.
        self._clocks = [0.0] * len(routers)
        self._clocks_set = [0.0] * len(routers)
        self._active: list[set[int]] = [set() for _ in routers]
        self._versions = [0] * len(routers)
        for index in loaded:
            self._hold(index)
            self.loaded.add(index)

    def router_of(self, index: int) -> int:
        """The router of an instance."""
        return index // len(self.models)

    def model_of(self, index: int) -> SimulatedModel:
        """The model of an instance."""
        return self.models[index % len(self.models)]

    def free(self, router: int) -> int:
        """Bytes of a router that are free."""
        return self.routers[router].memory - self._used[router]

    def begin_load(self, index: int) -> float:
        """Load an instance; returns when to call `end_load`."""
        self._hold(index)
        seconds = self.model_of(index).load_seconds
        self.loads += 1
        self.load_seconds += seconds
        return self.now + seconds

    def end_load(self, index: int) -> None:
        """It takes jobs from now on."""
        self.loaded.add(index)

    def begin_unload(self, index: int) -> float:
        """Unload an idle instance; returns when to call `end_unload`."""
        if self.servers[index].next_end >= 0 or index not in self.loaded:
            raise ValueError(f"{self.servers[index].machine.name} works or is not loaded")
        self.loaded.discard(index)
        self.servers[index].restart()
        return self.now + UNLOAD_SECONDS

    def end_unload(self, index: int) -> None:
        """Its memory is free from now on."""
        self.held.discard(index)
        self._used[self.router_of(index)] -= self.model_of(index).memory

    def _hold(self, index: int) -> None:
        router, memory = self.router_of(index), self.model_of(index).memory
        if index in self.held or memory > self.free(router):
            raise ValueError(f"{self.servers[index].machine.name} does not fit or is loaded")
        self.held.add(index)
        self._used[router] += memory

    # Time.

    def send(self, job: Job, node: int) -> None:
        """Send a job to a loaded instance, now."""
        if node not in self.loaded:
            raise ValueError(f"{self.servers[node].machine.name} is not loaded")
        job.send_to(node, self.now)
        router = self.router_of(node)
        self.servers[node].take(job, self._clock(router), self.now)
        self._active[router].add(node)
        self._schedule(router)

    def next_step_end(self) -> float:
        """When the next steps end; infinity while every node is idle."""
        ends = self._ends
        while ends:
            time, router, version = ends[0]
            if version == self._versions[router]:
                return time
            heappop(ends)
        return math.inf

    def end_steps(self) -> tuple[list[Job], list[Job]]:
        """End those steps, now: the jobs that have their first token, and those that have ended."""
        _, router, _ = heappop(self._ends)
        active = self._active[router]
        node = min(active, key=lambda index: (self.servers[index].next_end, index))
        server = self.servers[node]
        self._clock(router)
        self._clocks[router] = server.next_end  # Without the error of its floats.
        ended = server.end_steps(server.next_end, self.now)
        if server.next_end < 0:
            active.discard(node)
        self._schedule(router)
        return ended

    def _clock(self, router: int) -> float:
        passed = self.now - self._clocks_set[router]
        self._clocks_set[router] = self.now
        self._clocks[router] += passed / max(1, len(self._active[router]))
        return self._clocks[router]

    def _schedule(self, router: int) -> None:
        self._versions[router] += 1
        active = self._active[router]
        if active:
            left = min(self.servers[index].next_end for index in active) - self._clocks[router]
            end = self.now + max(0.0, left) * len(active)
            heappush(self._ends, (end, router, self._versions[router]))


# Placements by hand: sets of instances that stay.


def greedy_placement(
    routers: Sequence[SimulatedMachine],
    models: Sequence[SimulatedModel],
    requests: Mapping[str, int],
) -> frozenset[int] | None:
    """Each model once, the largest first, then copies where the most work falls on one.

    `requests`: of each model. None: the models don't fit.
    """
    placing = _Placing(routers, models)
    # A larger model is slower in proportion.
    work = {one.name: requests.get(one.name, 0) * one.memory for one in models}
    for place in sorted(range(len(models)), key=lambda place: -models[place].memory):
        router = placing.idlest(place, work)
        if router is None:
            return None
        placing.add(router, place)
    while True:
        order = sorted(
            range(len(models)),
            key=lambda place: -work[models[place].name] / placing.copies[place],
        )
        for place in order:
            router = placing.idlest(place, work)
            if router is not None:
                placing.add(router, place)
                break
        else:
            return frozenset(placing.indexes)


def random_placements(
    routers: Sequence[SimulatedMachine],
    models: Sequence[SimulatedModel],
    count: int,
    rng: random.Random,
) -> Iterator[frozenset[int]]:
    """Each model once somewhere, then copies until nothing more fits; at most `count`."""
    for _ in range(count):
        placing = _Placing(routers, models)
        for place in sorted(range(len(models)), key=lambda place: -models[place].memory):
            possible = [one for one in range(len(routers)) if placing.fits(one, place)]
            if not possible:
                break
            placing.add(rng.choice(possible), place)
        else:
            pairs = [(one, place) for one in range(len(routers)) for place in range(len(models))]
            rng.shuffle(pairs)
            for router, place in pairs:
                if placing.fits(router, place):
                    placing.add(router, place)
            yield frozenset(placing.indexes)


class _Placing:
    """A placement in the making."""

    def __init__(
        self, routers: Sequence[SimulatedMachine], models: Sequence[SimulatedModel]
    ) -> None:
        self.indexes: set[int] = set()
        self.copies = [0] * len(models)
        self._routers, self._models = routers, models
        self._free = [router.memory for router in routers]

    def fits(self, router: int, place: int) -> bool:
        """Whether a router has room for one more model."""
        index = router * len(self._models) + place
        return index not in self.indexes and self._models[place].memory <= self._free[router]

    def idlest(self, place: int, work: Mapping[str, int]) -> int | None:
        """Of the routers with room, the one with the least work for its speed."""
        loads = [0.0] * len(self._routers)
        for index in self.indexes:
            router, other = divmod(index, len(self._models))
            share = work[self._models[other].name] / self.copies[other]
            loads[router] += share / self._routers[router].decode_tps
        possible = [one for one in range(len(self._routers)) if self.fits(one, place)]
        return min(possible, key=lambda one: (loads[one], -self._free[one]), default=None)

    def add(self, router: int, place: int) -> None:
        """Place it."""
        self.indexes.add(router * len(self._models) + place)
        self.copies[place] += 1
        self._free[router] -= self._models[place].memory


def describe_placement(
    routers: Sequence[SimulatedMachine], models: Sequence[SimulatedModel], indexes: Collection[int]
) -> dict[str, list[str]]:
    """The models of each router by their names."""
    found: dict[str, list[str]] = {router.name: [] for router in routers}
    for index in sorted(indexes):
        router, place = divmod(index, len(models))
        found[routers[router].name].append(models[place].name)
    return found
