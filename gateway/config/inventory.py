"""The inventory: which nodes there are, as `config/nodes.yaml` says."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field, PrivateAttr, model_validator

from gateway.config.errors import ConfigError, Problem
from gateway.config.fields import ConfigModel, validation_error
from gateway.config.node import (
    Endpoint,
    NodeSpec,
    NodeTimeouts,
    NodeTls,
    TokenCost,
)
from gateway.config.validation import (
    find_duplicates,
    keys_of,
    unknown_key_remedy,
    validate,
    without_duplicates,
)
from gateway.config.yaml_file import (
    MOST_VALUES,
    YamlDocument,
    YamlEntry,
    YamlList,
    YamlMapping,
    YamlScalar,
    mapping_of,
    read_yaml,
)

__all__ = [
    "Endpoint",
    "Inventory",
    "NodeSpec",
    "NodeTimeouts",
    "NodeTls",
    "TokenCost",
    "load_inventory",
]

# Keys of which a node has one: its own stands in for the default of the other.
_EITHER = (
    ("cost_per_hour", "cost_per_million_tokens"),
    ("api_key_env", "api_key_file"),
)

_WITHOUT_FILE = (
    "name yours with --nodes, or write `nodes: [{name: first, url: 'http://HOST:8080'}]` into it; "
    "`llama-gateway up` needs none: it starts servers on this machine"
)

# What tells one node from the others can't be a default.
_OWN = ("name", "url")

_ITEM = "- {name: epyc-a, url: http://10.0.0.11:8080}"


class Inventory(ConfigModel):
    """All nodes, in the order of the file."""

    nodes: Annotated[
        tuple[NodeSpec, ...],
        Field(description="The nodes. `[]` is allowed: a fleet may be filled later."),
    ]

    _warnings: tuple[Problem, ...] = PrivateAttr(())

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What is valid and looks like a slip."""
        return self._warnings

    @model_validator(mode="after")
    def _names_are_unique(self) -> Inventory:
        seen: set[str] = set()
        for node in self.nodes:
            if node.name in seen:
                raise validation_error(
                    f"two nodes are named {node.name}", "a node's name must be unique"
                )
            seen.add(node.name)
        return self


def load_inventory(path: Path, env: Mapping[str, str] | None = None) -> Inventory:
    """Read the inventory from a YAML file.

    `env` holds the variables for `${VAR}` and `api_key_env`; by default the process's own.
    Raises ConfigError with every problem of the file. Reads the disk: call it in a thread.
    """
    env = os.environ if env is None else env
    if not os.path.lexists(path):
        raise ConfigError([Problem(path, 0, "", "there is no such file", _WITHOUT_FILE)])
    source = read_yaml(path, env)
    problems = list(source.problems)
    defaults, entries = _parts(source, problems)

    # The defaults are checked even where no node takes them.
    stand_in = {"name": _text("node"), "url": _text("http://node")}
    checked = mapping_of({**defaults.entries, **stand_in})
    problems += validate(NodeSpec, source, YamlEntry(checked, 0, "defaults"), env)[1]

    nodes: list[NodeSpec] = []
    values = 0
    for entry in entries:
        merged = _with_defaults(defaults, entry)
        values += merged.tree.value_count
        if values > MOST_VALUES:
            problems.append(
                Problem(path, entry.line, entry.key, f"more than {MOST_VALUES} values in all")
            )
            break
        node, wrongs = validate(NodeSpec, source, merged, env)
        problems += wrongs
        if node is not None:
            nodes.append(node)
    problems += find_duplicates(source, entries, "name", "the node")
    if problems:
        raise ConfigError(without_duplicates(problems))
    inventory = Inventory(nodes=tuple(nodes))
    inventory._warnings = tuple(_same_servers(path, entries, nodes))  # noqa: SLF001 - its maker
    return inventory


def _same_servers(
    path: Path, entries: tuple[YamlEntry, ...], nodes: list[NodeSpec]
) -> Iterator[Problem]:
    """Tell of nodes at one address; an endpoint may be several by its keys and models."""
    first: dict[tuple[object, ...], str] = {}
    for number, (entry, spec) in enumerate(zip(entries, nodes, strict=True)):
        if not spec.enabled:
            continue
        models = repr(spec.models) if spec.kind == "openai" else ""
        other = first.setdefault((spec.url, spec.api_key, models), spec.name)
        if other != spec.name:
            line = (
                entry.tree.entries["url"].line
                if isinstance(entry.tree, YamlMapping)
                else entry.line
            )
            yield Problem(
                path,
                line,
                f"nodes[{number}].url",
                f"the nodes {other} and {spec.name} are one server, whose slots count twice",
                "correct one url, or remove one node",
            )


def _text(value: str) -> YamlEntry:
    return YamlEntry(YamlScalar(value), 0, "")


class _Tell(Protocol):
    def __call__(
        self, entry: YamlEntry, message: str, remedy: str, key: str | None = None
    ) -> None: ...


def _parts(
    source: YamlDocument, problems: list[Problem]
) -> tuple[YamlMapping, tuple[YamlEntry, ...]]:
    """Take the file's two keys apart: the defaults and the nodes."""
    root = source.root

    def tell(entry: YamlEntry, message: str, remedy: str, key: str | None = None) -> None:
        name = entry.key if key is None else key
        problems.append(Problem(source.file, entry.line, name, message, remedy))

    if not isinstance(root.tree, YamlMapping):
        if isinstance(root.tree, YamlList):
            tell(root, "must be a mapping, not a list", "write the line nodes: before it")
        elif root.tree == YamlScalar(None):
            tell(root, "the file is empty", "write nodes: []")
        else:
            tell(root, "must be a mapping", f"write nodes: and below it {_ITEM}")
        return mapping_of({}), ()
    for key, entry in root.tree.entries.items():
        if key not in {"defaults", "nodes"}:
            remedy = unknown_key_remedy(key, ("defaults", "nodes"))
            if key in keys_of(NodeSpec):
                remedy = "it is a key of a node: indent it as far as that node's name"
            tell(entry, "unknown key", remedy)
    return _defaults(root.tree, tell), _entries(root, root.tree, tell)


def _defaults(root: YamlMapping, tell: _Tell) -> YamlMapping:
    given = root.entries.get("defaults")
    if given is None or given.tree == YamlScalar(None):
        return mapping_of({})
    if not isinstance(given.tree, YamlMapping):
        tell(given, "must be a mapping", "of keys that every node shall have")
        return mapping_of({})
    for key in _OWN:
        if key in given.tree.entries:
            tell(given.tree.entries[key], "can't be a default", "each node has its own")
    return mapping_of({key: one for key, one in given.tree.entries.items() if key not in _OWN})


def _entries(root: YamlEntry, tree: YamlMapping, tell: _Tell) -> tuple[YamlEntry, ...]:
    nodes = tree.entries.get("nodes")
    if nodes is None or nodes.tree == YamlScalar(None):
        tell(nodes or root, "is missing", "list the nodes, or write nodes: []", "nodes")
        return ()
    if not isinstance(nodes.tree, YamlList):
        tell(nodes, "must be a list", f"one item for each node: {_ITEM}")
        return ()
    for entry in nodes.tree.entries:
        if not isinstance(entry.tree, YamlMapping):
            tell(entry, "must be a mapping", f"write {_ITEM}")
    return nodes.tree.entries


def _with_defaults(defaults: YamlMapping, entry: YamlEntry) -> YamlEntry:
    if not isinstance(entry.tree, YamlMapping):
        return entry
    taken = dict(defaults.entries)
    for pair in _EITHER:
        if any(key in entry.tree.entries for key in pair):
            for key in pair:
                taken.pop(key, None)
    return YamlEntry(_merged(mapping_of(taken), entry.tree), entry.line, entry.key)


def _merged(below: YamlMapping, above: YamlMapping) -> YamlMapping:
    """Lay a mapping over another, and the mappings in them likewise."""
    entries = dict(below.entries)
    for key, entry in above.entries.items():
        under = entries.get(key)
        if (
            key != "model"
            and under
            and isinstance(under.tree, YamlMapping)
            and isinstance(entry.tree, YamlMapping)
        ):
            entries[key] = YamlEntry(_merged(under.tree, entry.tree), entry.line, entry.key)
        else:
            entries[key] = entry
    return mapping_of(entries)
