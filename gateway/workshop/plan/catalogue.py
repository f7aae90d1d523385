"""The catalogue: node types with their speeds and prices, from a commented YAML file.

A mistake in it is reported with its line and key, as in the gateway's other files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from gateway.config import yaml_file
from gateway.config.errors import ConfigError, Problem
from gateway.config.fields import ConfigModel, validation_error
from gateway.config.yaml_file import YamlList, YamlMapping
from gateway.workshop.simulate.fleets import GIB, SPEED_MEMORY, SimulatedModel
from gateway.workshop.simulate.simulation import (
    BATCH_COST,
    CACHE_RAM_MIB,
    KV_BYTES_PER_TOKEN,
    SimulatedMachine,
    tokens_in_host_memory,
)

HOURS_PER_MONTH = 730.0  # 365 days of 24 hours, by 12


FASTEST_TPS = 1e7
SLOWEST_TPS = 1e-3
MOST_SLOTS_OF_A_SERVER = 256  # below the 512 tokens of a step, of which each busy slot takes one
MIB_PER_GIB = 1024
CONTEXT_TOKENS = 4096  # tokens of a slot for which memory is counted
# Memory of a server by that of weights and keys and values: compute buffers and the system.
MEMORY_HEADROOM = 1.1
_Speed = Annotated[float, Field(ge=SLOWEST_TPS, le=FASTEST_TPS, allow_inf_nan=False)]
_Price = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Watts = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
_Gib = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
PRICES = ("price_per_hour", "price_per_month", "price_per_million_tokens")


class TokenPrice(ConfigModel):
    """The price of a million tokens."""

    prompt: _Price = 0.0
    completion: _Price = 0.0


class NodeType(ConfigModel):
    """A machine, or an endpoint, as one would order it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    about: Annotated[str, Field(max_length=400)] = ""
    tier: Literal["cpu", "gpu"] = "cpu"
    servers: Annotated[int, Field(ge=1, le=64)] = 1
    """llama.cpp servers on it; the figures are of each."""
    slots: Annotated[int, Field(ge=1, le=MOST_SLOTS_OF_A_SERVER)] = 1
    decode_tps: _Speed  # tokens per second of one request alone
    prefill_tps: _Speed
    batch_cost: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = BATCH_COST
    memory_gib: _Gib | None = None
    """Of each server; None: enough for one model, and unknown for models on demand."""
    price_per_hour: _Price | None = None
    price_per_month: _Price | None = None
    price_per_million_tokens: TokenPrice | None = None
    watts: _Watts = 0.0
    idle_watts: _Watts = 0.0
    sources: dict[str, str] = Field(default_factory=dict)  # where a figure is from, by its key

    @field_validator("sources")
    @classmethod
    def _sources_of_figures(cls, sources: dict[str, str]) -> dict[str, str]:
        for key in sources:
            if key not in cls.model_fields:
                raise validation_error(
                    f"{key!r} is no figure of a type", "name the key whose source it is"
                )
        return sources

    @field_validator("price_per_month", "price_per_million_tokens")
    @classmethod
    def _one_price(cls, value: object, info: ValidationInfo) -> object:
        for other in PRICES:
            if value is not None and info.data.get(other) is not None:
                raise validation_error(f"can't stand beside {other}", "keep one price")
        return value

    @field_validator("idle_watts")
    @classmethod
    def _idle_below_busy(cls, idle: float, info: ValidationInfo) -> float:
        if idle > (watts := info.data.get("watts", idle)):
            raise validation_error(
                f"must not be above watts ({watts:g})",
                "watts is what it takes while all slots are busy",
            )
        return idle

    @property
    def per_hour(self) -> float | None:
        """The price of an hour, without that of tokens; None: not known."""
        if self.price_per_million_tokens is not None:
            return 0.0
        if self.price_per_month is not None:
            return self.price_per_month / HOURS_PER_MONTH
        return self.price_per_hour

    def electricity(self, use: float, per_kwh: float) -> float:
        """Price of an hour's electricity, when so large a share of its capacity is used."""
        watts = self.idle_watts + (self.watts - self.idle_watts) * min(max(use, 0.0), 1.0)
        return watts / 1000.0 * per_kwh

    def machines(self, count: int) -> list[SimulatedMachine]:
        """The servers of so many of it, to be simulated."""
        servers = range(1, count * self.servers + 1)
        return [self.machine(f"{self.name}-{number}") for number in servers]

    def machine(self, name: str) -> SimulatedMachine:
        """One of its servers."""
        kept = CACHE_RAM_MIB
        if self.memory_gib is not None:
            kept = min(kept, int(self.memory_gib * MIB_PER_GIB / 4))
        return SimulatedMachine(
            name,
            self.slots,
            self.prefill_tps,
            self.decode_tps,
            self.batch_cost,
            cache_tokens=tokens_in_host_memory(kept),
            memory=int((self.memory_gib or 0) * GIB),
        )

    def scaled(self, factor: float) -> NodeType:
        """The same, so many times as fast."""
        speeds = {"decode_tps": self.decode_tps, "prefill_tps": self.prefill_tps}
        bounded = {
            key: min(max(speed * factor, SLOWEST_TPS), FASTEST_TPS) for key, speed in speeds.items()
        }
        return self.model_copy(update=bounded)

    def memory_needed(self, model_gib: float) -> float:
        """GiB that a server takes: weights, and keys and values of every slot, with headroom."""
        cells = self.slots * CONTEXT_TOKENS * KV_BYTES_PER_TOKEN / GIB
        return (model_gib + cells) * MEMORY_HEADROOM


@dataclass(frozen=True, slots=True)
class FleetPrice:
    """What a fleet costs. None: the price of a node is not known."""

    per_hour: float | None  # all together, in a mean hour
    electricity_per_hour: float  # part of it
    per_million_tokens: float | None = None  # of the prompt and completion tokens that are served

    @property
    def month(self) -> float | None:
        """Of a month in which it runs all the time."""
        return None if self.per_hour is None else self.per_hour * HOURS_PER_MONTH

    def as_dict(self) -> dict[str, float | None]:
        """For scripts."""
        return asdict(self) | {"per_month": self.month}


class ReferenceModel(ConfigModel):
    """The model that a catalogue's speeds are for."""

    name: Annotated[str, Field(max_length=200)] = ""
    gib: _Gib


class NodeCatalogue(ConfigModel):
    """Node types, and what their speeds and prices are in."""

    currency: Annotated[str, Field(max_length=20)] = ""
    model: ReferenceModel | None = None
    types: Annotated[tuple[NodeType, ...], Field(max_length=1000)]


def packaged_catalogue() -> NodeCatalogue:
    """The catalogue that comes with the package."""
    with as_file(files("gateway.workshop.plan").joinpath("catalogue.yaml")) as path:
        return read_catalogue(path)


def read_catalogue(path: Path) -> NodeCatalogue:
    """Read a catalogue. Raises ConfigError with every problem of the file."""
    source = yaml_file.read_yaml(path, {})
    root = source.root
    if not isinstance(root.tree, YamlMapping):
        raise ConfigError([Problem(path, root.line, "", "must be a mapping", "write types: [...]")])
    found, wrong = yaml_file.validate(NodeCatalogue, source, root, {})
    problems = [*source.problems, *wrong]
    listed = root.tree.entries.get("types")
    if listed is not None and isinstance(listed.tree, YamlList):
        entries = listed.tree.entries
        if not entries:
            problems.append(Problem(path, listed.line, "types", "is empty", "write one type"))
        problems += yaml_file.find_duplicates(source, entries, "name", "the type")
        for entry in entries:
            keys = entry.tree.entries if isinstance(entry.tree, YamlMapping) else {}
            if keys and keys.keys().isdisjoint(PRICES):
                remedy = f"write {', '.join(PRICES[:2])} or {PRICES[2]}; 0 if it costs nothing"
                problems.append(Problem(path, entry.line, entry.key, "has no price", remedy))
    if problems or found is None:
        raise ConfigError(yaml_file.first_of_each_place(problems))
    return found


class NoTypeFitsError(Exception):
    """No type of a catalogue can be planned with; the message has the remedy."""


def fitting_types(
    catalogue: NodeCatalogue,
    model_gib: float | None,
    names: tuple[str, ...] = (),
    models: Sequence[SimulatedModel] = (),
) -> tuple[tuple[NodeType, ...], tuple[str, ...]]:
    """The types to plan with, for a model of so many GiB, and notes on those left out.

    `names`: only these. `models`: that they load on demand, in place of the one. Raises
    NoTypeFitsError.
    """
    largest = max((one.memory / GIB for one in models), default=0.0)
    if largest:
        model_gib = SPEED_MEMORY / GIB  # of which a router's speeds are
    known = {one.name: one for one in catalogue.types}
    if missing := [name for name in names if name not in known]:
        raise NoTypeFitsError(
            f"the catalogue has no type {missing[0]!r}; it has {', '.join(known)}"
        )
    chosen = [known[name] for name in dict.fromkeys(names or known)]
    reference = None if catalogue.model is None else catalogue.model.gib
    size = model_gib or reference
    if model_gib is not None:
        if not 0 < model_gib <= 1e6:
            raise NoTypeFitsError("a model has more than 0 and at most 1,000,000 GiB")
        if reference is None:
            raise NoTypeFitsError("the catalogue says for no model what its speeds are: model.gib")
        # In inverse proportion to the size.
        chosen = [one.scaled(reference / model_gib) for one in chosen]
    notes, fitting = [], []
    for one in chosen:
        needed = largest or (one.memory_needed(size) if size is not None else 0.0)
        if largest and one.memory_gib is None:
            notes.append(f"{one.name} is left out: it says no memory_gib for models on demand")
        elif one.memory_gib is not None and needed > one.memory_gib:
            notes.append(
                f"{one.name} is left out: the model needs {needed:.1f} GiB, "
                f"it has {one.memory_gib:g}"
            )
        else:
            fitting.append(one)
    if not fitting:
        raise NoTypeFitsError(f"no type has the memory for it: {'; '.join(notes)}")
    return tuple(fitting), tuple(notes)
