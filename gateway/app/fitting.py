"""Whether the models that both files want loaded fit the nodes that are to hold them.

Only what can't be is refused: a figure that nobody has written counts as nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from gateway.config.errors import ConfigError, Problem
from gateway.config.fields import format_size
from gateway.config.inventory import Inventory, NodeSpec, host_memory
from gateway.config.routing import ModelRule
from gateway.config.settings import Settings
from gateway.config.yaml_file import find_entry, read_yaml, unknown_key_remedy

NO_TEXTS: Mapping[Path, str] = {}
MOST_NAMED = 5
"""Models and hosts that a message names."""


class Misfit(NamedTuple):
    """What can't be, by the key to blame: of `models` in the settings, or of `nodes`."""

    place: tuple[str | int, ...]
    message: str
    remedy: str


def check_fit(
    settings: Settings,
    inventory: Inventory,
    settings_file: Path | None,
    inventory_file: Path,
    texts: Mapping[Path, str] = NO_TEXTS,
) -> None:
    """Check that both files fit together. Reads them again for the lines. Raises: ConfigError.

    `texts`: what to read in place of a file's own.
    """
    read = cache(lambda file: read_yaml(file, {}, texts.get(file)).root)
    problems = []
    for place, message, remedy in misfits(settings, inventory.nodes):
        file = (settings_file if place[0] == "models" else inventory_file) or Path()
        line, key = 0, ".".join(map(str, place))
        try:
            entry = find_entry(read(file), place)
            line, key = entry.line, entry.key
        except ConfigError:
            pass  # it has just been replaced
        problems.append(Problem(file, line, key, message, remedy))
    if problems:
        raise ConfigError(problems)


def misfits(settings: Settings, specs: Sequence[NodeSpec]) -> Iterator[Misfit]:
    """Pins of unknown nodes, too many copies, too little memory, or two sizes of one host's."""
    memory = host_memory(specs)
    for number, spec in enumerate(specs):
        if spec.memory not in {None, memory.get(spec.host)}:
            yield Misfit(
                ("nodes", number, "memory"),
                f"another node of the host {spec.host} says {format_size(memory[spec.host])}",
                "say it at one of them, or the same at each: nodes of one host share its memory",
            )
    rules = {name: rule for name, rule in settings.models.items() if rule.is_placed}
    if not rules or not specs:  # a fleet may be filled later
        return
    kept = _kept(rules, specs)
    by_name = {spec.name: spec for spec in specs}
    room: dict[str, Counter[str]] = {}
    for model, rule in rules.items():
        yield from _wrong_pins(model, rule, by_name)
        room[model] = _room(model, rule, specs, memory)
        copies, always = room[model].total(), sum(model in one for one in kept)
        if rule.memory is not None and room[model] and copies == 0:
            yield Misfit(
                ("models", model, "memory"),
                f"is {format_size(rule.memory)}, and no host that may hold {model} has more than "
                f"{format_size(max(memory[host] for host in room[model]))}",
                "correct it, or the `memory` of the nodes",
            )
        elif rule.replicas.min > copies:
            yield Misfit(
                ("models", model, "replicas", "min"),
                f"is {rule.replicas.min}, but {copies} nodes can hold {model}",
                "lower it, or add nodes that load models on demand and have the memory",
            )
        if rule.replicas.max is not None and always > rule.replicas.max:
            yield Misfit(
                ("models", model, "replicas", "max"),
                f"is {rule.replicas.max}, but {always} nodes always hold {model}",
                "raise it, or take the model out of a `pin` or `preload`",
            )
    yield from _full_hosts(rules, specs, kept, room)


def _is_placed(spec: NodeSpec) -> bool:
    """Whether a node may be one that loads models on demand."""
    given = spec.models_on_demand
    return given is True or (given is None and spec.kind == "llama.cpp")


def _kept(rules: Mapping[str, ModelRule], specs: Iterable[NodeSpec]) -> list[set[str]]:
    """The models that each node always holds."""
    pins: dict[str, set[str]] = {}
    for model, rule in rules.items():
        for name in rule.pin:
            pins.setdefault(name, set()).add(model)
    return [pins.get(one.name, set()) | set(one.preload) if one.enabled else set() for one in specs]


def _room(
    model: str, rule: ModelRule, specs: Iterable[NodeSpec], memory: Mapping[str, int]
) -> Counter[str]:
    """How many nodes can hold a model at a time, alone: of each host that may hold it."""
    nodes = Counter(
        spec.host
        for spec in specs
        if _is_placed(spec) and (spec.models is None or model in spec.models)
    )
    for host in nodes.keys() & memory.keys() if rule.memory is not None else ():
        nodes[host] = min(nodes[host], memory[host] // (rule.memory or 1))
    return nodes


def _wrong_pins(model: str, rule: ModelRule, by_name: Mapping[str, NodeSpec]) -> Iterator[Misfit]:
    for number, name in enumerate(rule.pin):
        spec = by_name.get(name)
        if spec is None:
            words = f"no node of the inventory is named {name}", unknown_key_remedy(name, by_name)
        elif spec.models is not None and model not in spec.models:
            words = f"the node {name} has no {model}", f"its `model` has {', '.join(spec.models)}"
        elif not _is_placed(spec):
            words = f"the node {name} is told to load nothing", "see its kind and models_on_demand"
        else:
            continue
        yield Misfit(("models", model, "pin", number), *words)


def _full_hosts(
    rules: Mapping[str, ModelRule],
    specs: Sequence[NodeSpec],
    kept: Sequence[set[str]],
    room: Mapping[str, Counter[str]],
) -> Iterator[Misfit]:
    """Hosts whose models that must always be there need more memory than they have."""
    needs: dict[str, Counter[str]] = {spec.host: Counter() for spec in specs}
    for spec, models in zip(specs, kept, strict=True):
        needs[spec.host].update(models & rules.keys())
    for model, nodes in room.items():
        for host, most in nodes.items():
            # What the other hosts have no room for must be here.
            forced = min(rules[model].replicas.min - nodes.total() + most, most)
            needs[host][model] = max(needs[host][model], forced)
    for number, spec in enumerate(specs):
        if spec.memory is None:
            continue
        copies = needs.pop(spec.host, Counter[str]())
        parts = {model: count * (rules[model].memory or 0) for model, count in copies.items()}
        if (total := sum(parts.values())) > spec.memory:
            largest = sorted(filter(parts.get, parts), key=lambda model: -parts[model])
            yield Misfit(
                ("nodes", number, "memory"),
                f"{spec.host} has {format_size(spec.memory)}, and always to be loaded there are "
                f"{_listed([f'{one} ({format_size(parts[one])})' for one in largest])}: "
                f"{format_size(total)}",
                "change `pin` and `replicas.min` in the settings, `preload` here, or the memory",
            )


def _listed(names: Iterable[str]) -> str:
    listed = sorted(names) if isinstance(names, set) else list(names)
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return ", ".join(listed[:MOST_NAMED]) + more
