"""By how many names the code knows a request's value on its way.

The value is `gateway.request.Request`. What carries it is every class with an attribute of that
class, or of one that carries it; containers, which hold many, do not. Counted is each name and
attribute whose value may be one of these, from the listeners to the nodes.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tests.house.source import PACKAGE, Figure, Module, package_of, with_scopes
from tests.house.typed import Types

VALUE = "Request"
HOME = f"{PACKAGE}.request"
ASIDE = frozenset({"cli", "local", "planning", "tools"})
"""Packages that are not on a request's way."""
WITHIN = frozenset({"proxy", "relay"})
"""The packages that forward it."""


def carriers(fields: Mapping[str, set[str]]) -> set[str]:
    """Full names of the class of the value, and of all that carry it."""
    known = {name for name in fields if name == f"{HOME}.{VALUE}"} or {
        name for name in fields if name.rpartition(".")[2] == VALUE
    }
    on_way = {name: held for name, held in fields.items() if package_of(name) not in ASIDE}
    while True:
        more = {name for name, held in on_way.items() if held & known} - known
        if not more:
            return known
        known |= more


def request_names(found: Sequence[Module], types: Types) -> dict[str, Figure]:
    """The names, the ways to spell them, and where they are."""
    known = carriers(types.fields())
    names: dict[str, set[str]] = defaultdict(set)
    within: dict[str, set[str]] = defaultdict(set)
    spelled, stays = set(), set()
    rooms = set()
    for module in found:
        if package_of(module.name) in ASIDE:
            continue
        for node, scopes in with_scopes(module.tree):
            if not isinstance(node, ast.Name | ast.Attribute) or not (
                held := types.classes(module, node) & known
            ):
                continue
            text = ast.unparse(node)
            if text in {"cls", "self"}:
                continue
            name = text.rpartition(".")[2]
            classes = {one.rpartition(".")[2] for one in held}
            names[name] |= classes
            if package_of(module.name) in WITHIN:
                within[name] |= classes
            spelled.add(text)
            rooms.add(module.name)
            stays.add(".".join([module.name, *(scope.name for scope in scopes[:1])]))
    return {
        "request_names": _told(names),
        "request_names_in_proxy": _told(within),
        "request_spellings": Figure(len(spelled), sorted(spelled)),
        "request_classes": Figure(len(known), sorted(known)),
        "request_stays": Figure(len(stays), sorted(stays)),
        "request_rooms": Figure(len(rooms), sorted(rooms)),
    }


def _told(names: Mapping[str, set[str]]) -> Figure:
    return Figure(
        len(names), [f"{name}: {' '.join(sorted(held))}" for name, held in sorted(names.items())]
    )
