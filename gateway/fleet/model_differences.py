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
    names: list[str] = []
    alike: dict[tuple[tuple[str, ...], _Values], list[int]] = {}
    # Of a thousand servers, most are alike: those are compared once, for each of their models.
    for place, server in enumerate(servers):
        names.append(server.node)
        alike.setdefault((server.models, _values(server)), []).append(place)
    by_model: dict[str, list[tuple[_Values, list[int]]]] = {}
    for (models, values), places in alike.items():
        for model in models:
            by_model.setdefault(model, []).append((values, places))
    found: list[ModelDifference] = []
    told = 0
    for model, groups in by_model.items():
        if len(groups) < 2:
            continue
        before = len(found)
        for number, what in enumerate(_WORDS):
            places_by_value: dict[str, list[int]] = {}
            for values, places in groups:
                if (value := values[number]) is not None:
                    places_by_value.setdefault(value, []).extend(places)
            if len(places_by_value) > 1:
                ranked = sorted(
                    places_by_value.items(), key=lambda one: (-len(one[1]), min(one[1]))
                )
                by_value = {
                    value: tuple(names[place] for place in sorted(places))
                    for value, places in ranked
                }
                found.append(ModelDifference(model, what, by_value))
        told += len(found) > before
        if told >= MOST_MODELS:
            break
    return tuple(found)


_Values = tuple[str | None, str | None, str | None, str | None]


def _values(server: ComparedServer) -> _Values:
    """In the order of `_WORDS`; None: not reported."""
    properties = server.properties
    context = None if server.context is None else f"{server.context} tokens"
    return properties.ftype, properties.build, context, properties.template


def _names(nodes: tuple[str, ...]) -> str:
    more = len(nodes) - MOST_NAMES
    return ", ".join(nodes[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
