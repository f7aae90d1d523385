"""The inventory (`config/nodes.yaml`): the nodes of the fleet."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import PrivateAttr, model_validator

from gateway.config.errors import ConfigError, Problem
from gateway.config.fields import ConfigModel, validation_error
from gateway.config.foreign import foreign_problem
from gateway.config.node import (
    Endpoint,
    NodeSpec,
    NodeTimeouts,
    NodeTls,
    TokenCost,
)
from gateway.config.validation import (
    find_duplicates,
    first_of_each_place,
    keys_of,
    unknown_key_remedy,
    validate,
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

# Keys that exclude each other: a node that has one takes no default for the other.
_ALTERNATIVES = (
    ("cost_per_hour", "cost_per_million_tokens"),
    ("api_key_env", "api_key_file"),
)

_NO_FILE_REMEDY = (
    "name yours with --nodes, or write `nodes: [{name: first, url: 'http://HOST:8080'}]` into it; "
    "`llama-gateway up` needs none: it starts servers on this machine"
)

# Keys of a node that can't be a default.
_NO_DEFAULTS = ("name", "url")

_EXAMPLE = "- {name: epyc-a, url: http://10.0.0.11:8080}"


class Inventory(ConfigModel):
    """All nodes, in the order of the file."""

    nodes: tuple[NodeSpec, ...]
    """The nodes. `[]` is allowed: a fleet may be filled later."""

    _warnings: tuple[Problem, ...] = PrivateAttr(())

    def model_post_init(self, context: Any) -> None:
        """Take the warnings about the file that the nodes were read from."""
        self._warnings = (context or {}).get("warnings", ())

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """Entries that are valid but look like a slip."""
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
        raise ConfigError([Problem(path, 0, "", "there is no such file", _NO_FILE_REMEDY)])
    source = read_yaml(path, env)
    if foreign := foreign_problem(source, "inventory"):
        raise ConfigError([foreign])
    problems = list(source.problems)
    defaults, entries = _read_top_level(source, problems)

    # The defaults are checked even if no node takes them.
    needed = {"name": _text_entry("node"), "url": _text_entry("http://node")}
    checked = mapping_of({**defaults.entries, **needed})
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
        node, found = validate(NodeSpec, source, merged, env)
        problems += found
        if node is not None:
            nodes.append(node)
    problems += find_duplicates(source, entries, "name", "the node")
    if problems:
        raise ConfigError(first_of_each_place(problems))
    warnings = tuple(_shared_addresses(path, entries, nodes))
    return Inventory.model_validate({"nodes": tuple(nodes)}, context={"warnings": warnings})


def _shared_addresses(
    path: Path, entries: tuple[YamlEntry, ...], nodes: list[NodeSpec]
) -> Iterator[Problem]:
    """Report nodes at one address; an `openai` endpoint counts once for each key and model."""
    first: dict[tuple[object, ...], str] = {}
    for number, (entry, spec) in enumerate(zip(entries, nodes, strict=True)):
        if not spec.enabled:
            continue
        models = repr(spec.models) if spec.kind == "openai" else ""
        places = [(one, spec.api_key, models) for one in _one_address(spec.url)]
        other = next((first[one] for one in places if one in first), spec.name)
        for place in places:
            first.setdefault(place, spec.name)
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


def _one_address(url: str) -> Iterator[str]:
    """The spellings of an address to which others of the same server come down.

    Names are not looked up: only `localhost` is known to be both loopback addresses.
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    hosts = ["127.0.0.1", "::1"] if host == "localhost" else [_ip_address(host)]
    for one in hosts:
        yield f"{one} {port} {parts.path}"


def _ip_address(host: str) -> str:
    """An IP address in its usual spelling; the host as it is, if it is a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            # `127.1` and the like, as the system's resolver reads them.
            return socket.inet_ntoa(socket.inet_aton(host)) if host[:1].isdigit() else host
        except OSError:
            return host
    mapped = getattr(address, "ipv4_mapped", None) or address
    # To connect to every address is to connect to this machine.
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(mapped), str(mapped))


def _text_entry(value: str) -> YamlEntry:
    return YamlEntry(YamlScalar(value), 0, "")


class _Report:
    """Adds problems of one file to a list."""

    def __init__(self, file: Path, problems: list[Problem]) -> None:
        self._file = file
        self._problems = problems

    def __call__(
        self, entry: YamlEntry, message: str, remedy: str, *, key: str | None = None
    ) -> None:
        key = entry.key if key is None else key
        self._problems.append(Problem(self._file, entry.line, key, message, remedy))


def _read_top_level(
    source: YamlDocument, problems: list[Problem]
) -> tuple[YamlMapping, tuple[YamlEntry, ...]]:
    """Return the defaults and the entries of the nodes."""
    root = source.root
    report = _Report(source.file, problems)
    if not isinstance(root.tree, YamlMapping):
        if isinstance(root.tree, YamlList):
            report(root, "must be a mapping, not a list", "write the line nodes: before it")
        elif root.tree == YamlScalar(None):
            report(root, "the file is empty", "write nodes: []")
        else:
            report(root, "must be a mapping", f"write nodes: and below it {_EXAMPLE}")
        return mapping_of({}), ()
    for key, entry in root.tree.entries.items():
        if key not in {"defaults", "nodes"}:
            remedy = unknown_key_remedy(key, ("defaults", "nodes"))
            if key in keys_of(NodeSpec):
                remedy = "it is a key of a node: indent it as far as that node's name"
            report(entry, "unknown key", remedy)
    return _defaults(root.tree, report), _entries(root, root.tree, report)


def _defaults(root: YamlMapping, report: _Report) -> YamlMapping:
    given = root.entries.get("defaults")
    if given is None or given.tree == YamlScalar(None):
        return mapping_of({})
    if not isinstance(given.tree, YamlMapping):
        report(given, "must be a mapping", "of keys for every node")
        return mapping_of({})
    for key in _NO_DEFAULTS:
        if key in given.tree.entries:
            report(given.tree.entries[key], "can't be a default", "each node has its own")
    return mapping_of(
        {key: one for key, one in given.tree.entries.items() if key not in _NO_DEFAULTS}
    )


def _entries(root: YamlEntry, tree: YamlMapping, report: _Report) -> tuple[YamlEntry, ...]:
    nodes = tree.entries.get("nodes")
    if nodes is None or nodes.tree == YamlScalar(None):
        report(nodes or root, "is missing", "list the nodes, or write nodes: []", key="nodes")
        return ()
    if not isinstance(nodes.tree, YamlList):
        report(nodes, "must be a list", f"one item for each node: {_EXAMPLE}")
        return ()
    for entry in nodes.tree.entries:
        if not isinstance(entry.tree, YamlMapping):
            report(entry, "must be a mapping", f"write {_EXAMPLE}")
    return nodes.tree.entries


def _with_defaults(defaults: YamlMapping, entry: YamlEntry) -> YamlEntry:
    if not isinstance(entry.tree, YamlMapping):
        return entry
    own_defaults = dict(defaults.entries)
    for pair in _ALTERNATIVES:
        if any(key in entry.tree.entries for key in pair):
            for key in pair:
                own_defaults.pop(key, None)
    return YamlEntry(_merged(mapping_of(own_defaults), entry.tree), entry.line, entry.key)


def _merged(below: YamlMapping, above: YamlMapping) -> YamlMapping:
    """Lay a mapping over another, and the mappings in it over theirs."""
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
