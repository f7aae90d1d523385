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

MOST_NAMED = 5
"""Models and hosts that a message names."""


class Misfit(NamedTuple):
    """What one file says and can't be with the other."""

    in_settings: bool  # else the inventory is to blame
    places: Sequence[tuple[str | int, ...]]  # of the key; the first that the file has counts
    message: str
    remedy: str


def check_fit(
    settings: Settings, inventory: Inventory, settings_file: Path | None, inventory_file: Path
) -> None:
    """Check that both files fit together. Reads them again for the lines. Raises: ConfigError."""
    found = list(misfits(settings, inventory.nodes))
    tree = cache(lambda path: read_yaml(path, {}).root)
    problems = []
    for one in found:
        file = (settings_file or Path()) if one.in_settings else inventory_file
        try:
            entries = [find_entry(tree(file), place) for place in one.places]
        except ConfigError:  # it has just been replaced
            entries = []
        place = max(entries, key=lambda entry: len(entry.key), default=None)
        key = ".".join(map(str, one.places[0])) if place is None else place.key
        line = 0 if place is None else place.line
        problems.append(Problem(file, line, key, one.message, one.remedy))
    if problems:
        raise ConfigError(problems)


def misfits(settings: Settings, specs: Sequence[NodeSpec]) -> Iterator[Misfit]:
    """All that can't be: pins of unknown nodes, too many copies, too little memory."""
    rules = {name: rule for name, rule in settings.models.items() if rule.is_placed}
    if not rules or not specs:  # a fleet may be filled later
        return
    memory = host_memory(specs)
    kept = _kept(rules, specs)
    by_name = {spec.name: spec for spec in specs}
    room: dict[str, Counter[str]] = {}
    for model, rule in rules.items():
        yield from _wrong_pins(model, rule, by_name)
        room[model] = _room(model, rule, specs, memory)
        copies, sizes = room[model].total(), [memory.get(host) for host in room[model]]
        known = [size for size in sizes if size is not None]
        if rule.memory is not None and known and copies == 0:
            yield _misfit(
                model,
                ("memory",),
                f"{model} needs {format_size(rule.memory)}, and no host that may hold it has more "
                f"than {format_size(max(known))}",
                "correct it, or the `memory` of the nodes",
            )
        elif rule.replicas.min > copies:
            yield _misfit(
                model,
                ("replicas", "min"),
                f"is {rule.replicas.min}, but {copies} nodes can hold {model}",
                "lower it, or add nodes: such as load models on demand, whose `model` (if they "
                "have one) names it, and whose memory it fits",
            )
        always = sum(model in one for one in kept)
        if rule.replicas.max is not None and always > rule.replicas.max:
            yield _misfit(
                model,
                ("replicas", "max"),
                f"is {rule.replicas.max}, but {always} nodes always hold {model} by `pin` or "
                "`preload`",
                "raise it, or take the model from one of them",
            )
    yield from _full_hosts(rules, specs, memory, kept, room)


def fit_warnings(settings: Settings, specs: Sequence[NodeSpec]) -> Iterator[str]:
    """What nobody can know of models that are always to be loaded, or what will not happen."""
    rules = settings.models
    placed = [spec for spec in specs if _is_placed(spec)]
    if placed and all(spec.models is not None for spec in placed):
        served = {name for spec in placed for name in spec.models or ()}
        if unserved := [
            name for name, rule in rules.items() if rule.is_placed and name not in served
        ]:
            yield (
                f"models: {_listed(unserved)}: no node that loads models on demand has such a "
                "model; correct the name, or the `model` of the nodes"
            )
    always = {model for one in _kept(rules, specs) for model in one}
    always |= {name for name, rule in rules.items() if rule.replicas.min}
    if not always:
        return
    if not settings.model_placement.commands:
        yield (
            "model_placement.commands is false: no node is told to load what `replicas`, `pin` and "
            "`preload` name"
        )
    silent = sorted(name for name in always if name not in rules or rules[name].memory is None)
    if silent:
        yield (
            f"models: nobody has written the memory of {_listed(silent)}, so it is not known "
            "whether all fits that is always to be loaded; write models.NAME.memory (llama-gateway "
            "fit FILE tells it)"
        )
    memory = host_memory(specs)
    unsized = {
        spec.host
        for spec in placed
        if spec.host not in memory and (spec.models is None or not always.isdisjoint(spec.models))
    }
    if unsized:
        yield (
            f"nodes: the memory of {_listed(sorted(unsized))} is not written, so a model is first "
            "loaded alone there; write `memory` at one node of each host"
        )


def _may_hold(spec: NodeSpec, model: str) -> bool:
    """Whether the inventory lets a node be given this model."""
    return _is_placed(spec) and (spec.models is None or model in spec.models)


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
    return [
        pins.get(spec.name, set()) | set(spec.preload) if spec.enabled else set() for spec in specs
    ]


def _room(
    model: str, rule: ModelRule, specs: Iterable[NodeSpec], memory: Mapping[str, int]
) -> Counter[str]:
    """How many nodes of each host can hold a model at a time, alone; of hosts that may hold it."""
    nodes = Counter(spec.host for spec in specs if _may_hold(spec, model))
    if rule.memory is not None:
        for host in nodes.keys() & memory.keys():
            nodes[host] = min(nodes[host], memory[host] // rule.memory)
    return nodes


def _wrong_pins(model: str, rule: ModelRule, by_name: Mapping[str, NodeSpec]) -> Iterator[Misfit]:
    for number, name in enumerate(rule.pin):
        spec = by_name.get(name)
        if spec is None:
            message = f"no node of the inventory is named {name}"
            remedy = unknown_key_remedy(name, by_name)
        elif spec.models is not None and model not in spec.models:
            message = f"the node {name} does not serve {model}"
            remedy = f"its `model` has {', '.join(spec.models)}"
        elif not _may_hold(spec, model):
            message = f"the node {name} is not to be told to load models"
            remedy = "see its models_on_demand and kind in the inventory"
        else:
            continue
        yield _misfit(model, ("pin", number), message, remedy)


def _full_hosts(
    rules: Mapping[str, ModelRule],
    specs: Sequence[NodeSpec],
    memory: Mapping[str, int],
    kept: Sequence[set[str]],
    room: Mapping[str, Counter[str]],
) -> Iterator[Misfit]:
    """Hosts whose models that must always be there need more memory than they have."""
    needs: dict[str, Counter[str]] = {host: Counter() for host in memory}
    for spec, models in zip(specs, kept, strict=True):
        if spec.host in memory:
            needs[spec.host].update(models & rules.keys())
    for model, nodes in room.items():
        for host in nodes.keys() & memory.keys():
            # What the other hosts have no room for must be here.
            others = nodes.total() - nodes[host]
            forced = min(rules[model].replicas.min - others, nodes[host])
            needs[host][model] = max(needs[host][model], forced)
    for number, spec in enumerate(specs):
        if spec.memory is None or spec.host not in needs:
            continue
        parts = {
            model: copies * (rules[model].memory or 0)
            for model, copies in needs.pop(spec.host).items()
        }
        if sum(parts.values()) > spec.memory:
            largest = sorted(parts, key=lambda model: -parts[model])
            shown = [f"{model} ({format_size(parts[model])})" for model in largest if parts[model]]
            yield Misfit(
                False,
                (("nodes", number, "memory"), ("defaults", "memory")),
                f"{spec.host} has {format_size(spec.memory)}, and always to be loaded there are "
                f"{_listed(shown)}: {format_size(sum(parts.values()))}",
                "change `pin` and `replicas.min` in the settings, `preload` here, or the memory",
            )


def _misfit(model: str, key: tuple[str | int, ...], message: str, remedy: str) -> Misfit:
    return Misfit(True, (("models", model, *key),), message, remedy)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
