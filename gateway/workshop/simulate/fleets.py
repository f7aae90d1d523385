"""Which machines are simulated: those of an inventory with speeds, or a fleet given as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from gateway.config.fields import parse_size
from gateway.config.inventory import Inventory, host_memory
from gateway.workshop.simulate.simulation import (
    BATCH_COST,
    CACHE_RAM_MIB,
    KV_BYTES_PER_TOKEN,
    SimulatedMachine,
)

MOST_NODES = 100_000
MIB = 1024 * 1024

_GROUP = re.compile(
    r"(?P<count>\d+)x(?P<slots>\d+)@(?P<decode>[\d.]+):(?P<prefill>[\d.]+)(?:\+(?P<cost>[\d.]+))?"
    r"(?:/(?P<memory>[\w.]+))?"
)

MODELS_NEEDED = "routers need --models, such as 12x2GiB:30GiB, or `llama-gateway models --json`"
FLEET_SYNTAX = "COUNTxSLOTS@DECODE:PREFILL, such as 4x2@40:600"


class FleetError(Exception):
    """A fleet that can't be simulated; the message has the remedy."""


_Speed = Annotated[float, msgspec.Meta(gt=0)]


class NodeSpeeds(msgspec.Struct, frozen=True):
    """How fast one node is; None: not given."""

    prefill_tps: _Speed | None = None
    decode_tps: _Speed | None = None
    batch_cost: Annotated[float, msgspec.Meta(ge=0)] | None = None
    slots: int | None = msgspec.field(default=None, name="slots_total")  # 0: not loaded
    router: str | None = None  # of which it is one model
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """The settings of all servers."""

    batch_tokens: int = 512  # tokens of a step (`--batch-size`)
    cache_ram_mib: int = CACHE_RAM_MIB  # MiB of host memory for prompts (`--cache-ram`)
    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN  # bytes that a token takes there

    @property
    def cache_tokens(self) -> int:
        """Tokens that the host-memory cache holds."""
        return self.cache_ram_mib * MIB // self.kv_bytes_per_token


def from_text(text: str, setup: ServerSetup) -> list[SimulatedMachine]:
    """A fleet from text: groups of equal nodes, with commas between them.

    `1000x2@40:600` are 1,000 nodes of 2 slots that decode 40 and prefill 600 tokens/s; `+0.3`
    behind it: what one more busy slot adds to a step, as a share; `/64GiB`: they are routers, with
    so much memory for models. Raises FleetError.
    """
    machines: list[SimulatedMachine] = []
    for part in text.replace(" ", "").split(","):
        found = _GROUP.fullmatch(part)
        if found is None:
            raise FleetError(f"{part!r} is no fleet: write {FLEET_SYNTAX}")
        try:
            count, slots = int(found["count"]), int(found["slots"])
            decode, prefill = float(found["decode"]), float(found["prefill"])
            cost = BATCH_COST if found["cost"] is None else float(found["cost"])
            memory = parse_size(found["memory"]) if found["memory"] else 0
        except ValueError:
            raise FleetError(
                f"{part!r} holds something that is no number: write {FLEET_SYNTAX}"
            ) from None
        if not 1 <= count <= MOST_NODES - len(machines):
            raise FleetError(f"{part!r}: a fleet has 1 to {MOST_NODES} nodes")
        with _named(part):
            first = SimulatedMachine(
                "",
                slots,
                prefill,
                decode,
                cost,
                batch_tokens=setup.batch_tokens,
                cache_tokens=setup.cache_tokens,
                memory=memory,
            )
        before = len(machines)
        machines += [replace(first, name=f"node-{before + 1 + n}") for n in range(count)]
    return machines


def from_inventory(
    inventory: Inventory,
    speeds: Mapping[str, NodeSpeeds],
    default_speeds: NodeSpeeds,
    setup: ServerSetup,
    *,
    on_demand: bool = False,
) -> tuple[list[SimulatedMachine], list[str]]:
    """The machines of an inventory, and notes on what had to be assumed about them.

    A node has the speeds in `speeds`, else `default_speeds` times its `speed_hint`. Nodes that get
    no work (`enabled: false`, `standby: true`) are left out. `on_demand`: nodes that have models in
    `speeds`, and unknown ones with `memory`, are routers. Raises FleetError.
    """
    machines: list[SimulatedMachine] = []
    unsized: list[str] = []
    guessed: list[str] = []
    memory = host_memory(inventory.nodes)
    held: dict[str | None, dict[str, NodeSpeeds]] = {}  # by router: what is known of its models
    for name, one in speeds.items():
        for model in one.models or (name.partition("/")[2],):
            held.setdefault(one.router, {})[model] = one
    for node in inventory.nodes:
        if not node.enabled or node.standby:
            continue
        own, models = speeds.get(node.name, NodeSpeeds()), held.get(node.name, {})
        known = [one for one in models.values() if one.prefill_tps and one.decode_tps]
        is_router = bool(models) or (on_demand and node.name not in speeds and node.host in memory)
        if is_router and not on_demand:
            raise FleetError(f"{node.name} is a router: {MODELS_NEEDED}")
        if is_router and node.host not in memory:
            raise FleetError(
                f"the inventory says no `memory` of {node.host}, whose models are loaded on demand"
            )
        slots = node.slots or own.slots
        if is_router and not slots:
            slots = max((one.slots or 0 for one in models.values()), default=0)
        if not slots:
            unsized.append(node.name)
        if not known and (own.prefill_tps is None or own.decode_tps is None):
            guessed.append(node.name)
        prefill = own.prefill_tps or (default_speeds.prefill_tps or 0.0) * node.speed_hint
        decode = own.decode_tps or (default_speeds.decode_tps or 0.0) * node.speed_hint
        costs = [one.batch_cost for one in (own, *known, default_speeds)]
        with _named(node.name):
            machine = SimulatedMachine(
                node.name,
                slots or 1,
                prefill,
                decode,
                next((cost for cost in costs if cost is not None), BATCH_COST),
                host=node.host,
                calibrated=node.calibrate and node.kind == "llama.cpp",
                batch_tokens=setup.batch_tokens,
                cache_tokens=setup.cache_tokens,
                models=frozenset(models or node.models or own.models if on_demand else ()),
                memory=memory[node.host] if is_router else 0,
                model_speeds={
                    name: (one.prefill_tps or 0.0, one.decode_tps or 0.0)
                    for name, one in models.items()
                    if one in known
                },
            )
        machines.append(machine)
    if not machines:
        raise FleetError("the inventory has no node that gets work")
    notes = []
    if unsized:
        notes.append(f"assumed one slot for {_some(unsized)}: no `slots` in the inventory")
    if guessed:
        notes.append(
            f"assumed {default_speeds.decode_tps:g} and {default_speeds.prefill_tps:g} "
            f"tokens/s times `speed_hint` for "
            f"{_some(guessed)}: --speeds FILE tells more"
        )
    return machines, notes


def read_speeds(path: Path) -> dict[str, NodeSpeeds]:
    """Speeds by node, from what `llama-gateway nodes --json` writes or a file like it.

    A list of nodes (or a mapping with the key `nodes`), each with `name`, `prefill_tps`,
    `decode_tps` and, if known, `batch_cost` and `slots_total`; YAML or JSON. Raises FleetError.
    """
    value = read_document(path)
    nodes = value.get("nodes") if isinstance(value, dict) else value
    if not isinstance(nodes, list):
        raise FleetError(
            f"{path}: holds no list of nodes (take what `llama-gateway nodes --json` writes)"
        )
    speeds: dict[str, NodeSpeeds] = {}
    for number, node in enumerate(nodes):
        where = f"{path}: nodes[{number}]"
        if not isinstance(node, dict) or not isinstance(node.get("name"), str):
            raise FleetError(f"{where}: has no name (each node needs one)")
        try:
            speeds[node["name"]] = msgspec.convert(node, NodeSpeeds)
        except msgspec.ValidationError as error:
            raise FleetError(f"{where}: {error} (correct it, or leave it away)") from None
    return speeds


def read_document(path: Path) -> Any:
    """What a file of YAML or JSON holds. Raises FleetError."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FleetError(
            f"{path}: can't be read: {error.strerror} (check the path and its rights)"
        ) from None
    try:
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}:{error.colno}"
        raise FleetError(f"{place}: {error.msg} (write valid JSON)") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "is no YAML"
        raise FleetError(f"{place}: {problem} (write valid YAML)") from None


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
