"""Keeps of a llama.cpp server's own metrics what may be shown, under its node's name.

A node is not trusted: its text may be anything. Only samples of llama.cpp's own families pass, with
a number and without labels of their own; `llamacpp:prompt_tokens_total 12` becomes
`llamacpp:prompt_tokens_total{node="a"} 12`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gateway.observe.exposition import MetricsPage, labels

MOST_SAMPLES = 100
"""Most samples of one node; llama.cpp has some twenty."""

MOST_FAMILIES = 200
"""Most families of all nodes together: builds differ in theirs."""

LONGEST_HELP = 200
"""Characters of a family's description."""

_LINE = re.compile(
    rb"^(?:# (?P<kind>HELP|TYPE) (?P<named>llamacpp:[a-z0-9_]{1,80}) (?P<text>[^\n]*)"
    rb"|(?P<name>llamacpp:[a-z0-9_]{1,80})(?:\{[^}\n]*\})? "
    rb"(?P<value>[+-]?(?:\d{1,30}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,3})?|Inf|NaN|inf|nan)))\s*$",
    re.MULTILINE,
)
_TYPES = frozenset({"counter", "gauge"})


@dataclass(slots=True)
class NodeFamilies:
    """The samples of one node: a value by family, with the families' types and descriptions."""

    values: dict[str, float] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    helps: dict[str, str] = field(default_factory=dict)


def read_node_metrics(text: bytes) -> NodeFamilies | None:
    """What may be shown of a node's page; None: it is no page of llama.cpp's metrics."""
    families = NodeFamilies()
    for line in _LINE.finditer(text):
        if line["name"] is not None:
            families.values.setdefault(line["name"].decode(), float(line["value"]))
            if len(families.values) >= MOST_SAMPLES:
                break
            continue
        name, words = line["named"].decode(), line["text"].decode("utf-8", "replace").strip()
        if line["kind"] == b"HELP":
            families.helps[name] = re.sub(r"[^ -~]|\\", " ", words)[:LONGEST_HELP]
        elif words in _TYPES:
            families.types[name] = words
    return families if families.values else None


def add_node_metrics(page: MetricsPage, nodes: Mapping[str, NodeFamilies]) -> None:
    """Add the families of all nodes to a page, each family once."""
    names: dict[str, tuple[str, str]] = {}
    for families in nodes.values():
        for name in families.values:
            if name not in names and len(names) < MOST_FAMILIES:
                kind = families.types.get(name, "untyped")
                names[name] = kind, families.helps.get(name) or "Of llama.cpp's server."
    for name, (kind, text) in names.items():
        page.add_family(name, kind, text, _samples(name, nodes.items()))


def _samples(name: str, nodes: Iterable[tuple[str, NodeFamilies]]) -> Iterator[tuple[str, float]]:
    for node, families in nodes:
        value = families.values.get(name)
        if value is not None:
            yield labels(node=node), value
