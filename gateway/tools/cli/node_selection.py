"""Which nodes a command means: by name, host or label, or all but some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.tools.cli.terminal import CommandFailed, format_cell

Json = dict[str, Any]

SERVING_STATES = frozenset({"ready", "degraded", "mute", "sleeping", "loading", "starting"})
"""States of nodes that serve their models, or will in a moment."""


@dataclass(frozen=True, slots=True)
class NodeSelection:
    """What a command line says of nodes."""

    names: Sequence[str] = ()
    hosts: Sequence[str] = ()
    """Any of them."""
    labels: Sequence[tuple[str, str]] = ()
    """All of them."""
    all_but: Sequence[str] = ()

    @property
    def is_group(self) -> bool:
        """Whether it may mean several nodes."""
        return len(self.names) > 1 or bool(self.hosts or self.labels or self.all_but)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was said."""
        return not (self.names or self.hosts or self.labels or self.all_but)

    def choose(self, nodes: Iterable[Json]) -> list[Json]:
        """Those of the nodes that are meant. Raises: CommandFailed, if a name or all fit none."""
        known = {str(node.get("name")): node for node in nodes}
        unknown = [name for name in (*self.names, *self.all_but) if name not in known]
        if unknown:
            raise CommandFailed(
                f"there is no node {', '.join(map(repr, unknown))}: llama-gateway nodes lists them"
            )
        found = [node for name, node in known.items() if self._means(name, node)]
        if not found:
            raise CommandFailed("no node fits: llama-gateway nodes --json shows hosts and labels")
        return found

    def _means(self, name: str, node: Json) -> bool:
        labels = node.get("labels")
        own = labels if isinstance(labels, Mapping) else {}
        return (
            (not self.names or name in self.names)
            and (not self.hosts or node.get("host") in self.hosts)
            and all(own.get(key) == value for key, value in self.labels)
            and name not in self.all_but
        )


def read_labels(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Labels as the command line has them, `key=value`. Raises: CommandFailed."""
    found = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise CommandFailed(f"--label {text}: must be like rack=b", status=2)
        found.append((key, value))
    return found


def models_left_without(chosen: Iterable[Json], nodes: Iterable[Json]) -> list[str]:
    """Models that nobody would serve without the chosen nodes, and that they serve now."""
    taken = {str(node.get("name")) for node in chosen}
    serving = [node for node in nodes if node.get("state") in SERVING_STATES]
    left = {
        model
        for node in serving
        if str(node.get("name")) not in taken
        for model in node.get("models") or ()
    }
    lost = {
        str(model)
        for node in serving
        if str(node.get("name")) in taken
        for model in node.get("models") or ()
        if model not in left
    }
    return sorted(lost)


def in_words(models: Sequence[str], most: int = 8) -> str:
    """Some names of models, for a sentence."""
    shown = ", ".join(format_cell(name) for name in models[:most])
    more = len(models) - most
    return f"{shown} and {more} more" if more > 0 else shown
