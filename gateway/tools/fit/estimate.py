"""Whether a model fits a machine, what else would, and how fast it will be. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from gateway.tools.fit.quantizations import quantizations
from gateway.tools.fit.speed import Cores, Speed, expected_speed
from gateway.tools.local.gguf import ModelFile, ModelShape
from gateway.tools.local.memory import (
    CELL_PADDING,
    MEMORY_RESERVE,
    ServerMemory,
    ServerSettings,
    server_memory,
)

MOST_SLOTS = 256

MOST_CONTEXT = 1 << 22  # tokens, where the metadata has no trained context


@dataclass(frozen=True, slots=True)
class Place:
    """Memory that servers share: the machine's, or a NUMA node's."""

    name: str
    servers: int
    available: int  # bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, as far as a fit depends on it."""

    places: tuple[Place, ...]  # the whole machine first
    cores_per_server: int
    instructions: str
    bandwidth: float | None  # bytes/s of the whole machine; None: not known
    bandwidth_source: str

    @property
    def servers(self) -> int:
        """How many servers run on it."""
        return self.places[0].servers

    @property
    def room(self) -> int:
        """The bytes that one server may take, where the reserve stays free everywhere."""
        return min((one.available - MEMORY_RESERVE) // one.servers for one in self.places)


@dataclass(frozen=True, slots=True)
class Choice:
    """One quantisation of the model."""

    name: str
    size: int  # bytes of its weights
    needed: int  # by a server
    fits: bool
    largest_context: int  # tokens of each slot; 0: not even the shortest
    speed: Speed | None


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model fits a machine."""

    model: ModelFile
    shape: ModelShape
    settings: ServerSettings
    machine: Machine
    memory: ServerMemory  # of one server
    largest_context: int
    largest_slots: int
    speed: Speed | None
    choices: tuple[Choice, ...]

    @property
    def fits(self) -> bool:
        """Whether the servers leave the reserve free everywhere."""
        return self.memory.needed <= self.machine.room


def fit(model: ModelFile, shape: ModelShape, settings: ServerSettings, machine: Machine) -> Fit:
    """Compute how the model fits. Raises UnknownShapeError for settings that a server refuses."""
    return Fit(
        model=model,
        shape=shape,
        settings=settings,
        machine=machine,
        memory=server_memory(shape, settings),
        largest_context=largest_context(shape, settings, machine.room),
        largest_slots=largest_slots(shape, settings, machine.room),
        speed=_speed(shape, settings, machine),
        choices=tuple(
            Choice(
                name=one.name,
                size=one.size,
                needed=(needed := server_memory(one.shape, settings).needed),
                fits=needed <= machine.room,
                largest_context=largest_context(one.shape, settings, machine.room),
                speed=_speed(one.shape, settings, machine),
            )
            for one in quantizations(shape)
        ),
    )


def largest_context(shape: ModelShape, settings: ServerSettings, room: int) -> int:
    """Return the most tokens of each slot, at most as trained, that fit into `room`; 0: none."""
    most = min(shape.trained_context or MOST_CONTEXT, MOST_CONTEXT)
    shape, room = _without_weights(shape, room)

    def fits(steps: int) -> bool:
        context = min(steps * CELL_PADDING, most)
        return server_memory(shape, replace(settings, context=context)).needed <= room

    return min(_largest(math.ceil(most / CELL_PADDING), fits) * CELL_PADDING, most)


def largest_slots(shape: ModelShape, settings: ServerSettings, room: int) -> int:
    """Return the most slots of this context that fit into `room`; 0: none."""
    shape, room = _without_weights(shape, room)
    return _largest(
        MOST_SLOTS,
        lambda slots: server_memory(shape, replace(settings, slots=slots)).needed <= room,
    )


def _without_weights(shape: ModelShape, room: int) -> tuple[ModelShape, int]:
    """Return the shape without its tensors, which may be many, and the room beside them."""
    weights = sum(tensor.size for tensor in shape.tensors)
    return replace(shape, tensors=()), room - weights


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits, given that all smaller ones do; 0: none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _speed(shape: ModelShape, settings: ServerSettings, machine: Machine) -> Speed | None:
    if machine.bandwidth is None:
        return None
    share = machine.bandwidth / machine.servers
    cores = Cores(machine.cores_per_server, machine.instructions, share)
    return expected_speed(shape, settings, cores)
