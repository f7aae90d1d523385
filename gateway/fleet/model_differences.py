"""Where nodes of one model differ: requests would get other answers from one than from another.

Compared is what llama.cpp servers report: quantisation, build, context and chat template. A stream
is resumed only on a node with the same file, quantisation, template and build, so a difference also
says which nodes can't take over from each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.fleet.server_properties import ServerProperties

MOST_MODELS = 100
"""Models with differences that are told."""

MOST_VALUES, MOST_NAMES = 8, 8
"""Values of one property, and nodes of one value, that are named."""

_WORDS = {
    "quantisation": "quantisation",
    "build": "build of llama.cpp",
    "context": "context of a slot",
    "template": "chat template",
}


@dataclass(frozen=True, slots=True)
class ComparedServer:
    """A node's server, as far as it is compared."""

    node: str
    models: tuple[str, ...]
    """Public names."""
    context: int | None
    """Tokens of one slot."""
    properties: ServerProperties


@dataclass(frozen=True, slots=True)
class ModelDifference:
    """One property in which nodes that serve one model differ."""

    model: str
    what: str
    """`quantisation`, `build`, `context` or `template`."""
    nodes_by_value: Mapping[str, tuple[str, ...]]
    """The nodes of each value, the most frequent value first."""

    def in_words(self) -> str:
        """For a log line or a table."""
        values = list(self.nodes_by_value.items())
        told = [f"{value} on {_names(nodes)}" for value, nodes in values[:MOST_VALUES]]
        if len(values) > MOST_VALUES:
            told.append(f"{len(values) - MOST_VALUES} more")
        return f"{self.model}: {_WORDS[self.what]}: {'; '.join(told)}"


def model_differences(servers: Iterable[ComparedServer]) -> tuple[ModelDifference, ...]:
    """The differences, by model and property. What a server has not reported is left out."""
    by_model: dict[str, list[ComparedServer]] = {}
    for server in servers:
        for model in server.models:
            by_model.setdefault(model, []).append(server)
    found: list[ModelDifference] = []
    for model, group in by_model.items():
        if len(group) < 2:
            continue
        for what in _WORDS:
            nodes: dict[str, list[str]] = {}
            for server in group:
                if (value := _value(server, what)) is not None:
                    nodes.setdefault(value, []).append(server.node)
            if len(nodes) > 1:
                ranked = sorted(nodes.items(), key=lambda one: -len(one[1]))
                by_value = {value: tuple(names) for value, names in ranked}
                found.append(ModelDifference(model, what, by_value))
        if len({one.model for one in found}) >= MOST_MODELS:
            break
    return tuple(found)


def _value(server: ComparedServer, what: str) -> str | None:
    properties = server.properties
    if what == "context":
        return None if server.context is None else f"{server.context} tokens"
    if what == "quantisation":
        return properties.ftype
    return properties.build if what == "build" else properties.template


def _names(nodes: tuple[str, ...]) -> str:
    more = len(nodes) - MOST_NAMES
    return ", ".join(nodes[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
