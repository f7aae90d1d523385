"""Counts the names by which the code knows a request's value on its way.

The value is `gateway.request.preparation.Request`; where that is missing, any `Request`. A class
carries it when it has an attribute of that class, or of a class that carries it; containers, which
hold many, do not. Counted are the names and attributes whose value may be one of these, from the
listeners to the nodes, and the attributes of the value itself.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tests.house.mypy_types import ModuleTypes
from tests.house.source import PACKAGE, Figure, Module, package_of, with_scopes

REQUEST_CLASS = "Request"
REQUEST_MODULE = f"{PACKAGE}.request.preparation"
OTHER_PACKAGES = frozenset({"cli", "local", "planning", "tools", "workshop"})
"""Packages that are not on a request's way."""
PROXY_PACKAGES = frozenset({"forward", "proxy", "relay"})
"""The package that forwards requests, by its names at any time."""


def request_classes(fields: Mapping[str, Mapping[str, set[str]]]) -> set[str]:
    """Full names of the class of the value, and of all classes that carry it."""
    known = value_classes(fields)
    on_way = {
        name: set().union(*attributes.values())
        for name, attributes in fields.items()
        if package_of(name) not in OTHER_PACKAGES
    }
    while True:
        more = {name for name, held in on_way.items() if held & known} - known
        if not more:
            return known
        known |= more


def value_classes(fields: Mapping[str, Mapping[str, set[str]]]) -> set[str]:
    """Full name of the class of the value; in an older checkout it may be in another module."""
    return {name for name in fields if name == f"{REQUEST_MODULE}.{REQUEST_CLASS}"} or {
        name for name in fields if name.rpartition(".")[2] == REQUEST_CLASS
    }


def request_names(found: Sequence[Module], types: ModuleTypes) -> dict[str, Figure]:
    """Count the names, how they are spelled, and where they are used."""
    fields = types.fields()
    known = request_classes(fields)
    names: dict[str, set[str]] = defaultdict(set)
    names_in_proxy: dict[str, set[str]] = defaultdict(set)
    by_module: set[str] = set()
    spellings: set[str] = set()
    owners: set[str] = set()
    using_modules: set[str] = set()
    for module in found:
        if package_of(module.name) in OTHER_PACKAGES:
            continue
        for node, scopes in with_scopes(module.tree):
            if not isinstance(node, ast.Name | ast.Attribute) or not (
                held := types.classes(module, node) & known
            ):
                continue
            spelling = ast.unparse(node)
            if spelling in {"cls", "self"}:
                continue
            name = spelling.rpartition(".")[2]
            classes = {one.rpartition(".")[2] for one in held}
            names[name] |= classes
            if package_of(module.name) in PROXY_PACKAGES:
                names_in_proxy[name] |= classes
            by_module.add(f"{module.name}: {name}")
            spellings.add(spelling)
            using_modules.add(module.name)
            owners.add(".".join([module.name, *(scope.name for scope in scopes[:1])]))
    attributes = {name for owner in value_classes(fields) for name in fields[owner]}
    return {
        "request_attributes": _figure(attributes),
        "request_names": _names_figure(names),
        "request_names_in_proxy": _names_figure(names_in_proxy),
        "request_names_by_module": _figure(by_module),
        "request_spellings": _figure(spellings),
        "request_classes": _figure(known),
        "request_functions": _figure(owners),
        "request_modules": _figure(using_modules),
    }


def _figure(places: set[str]) -> Figure:
    return Figure(len(places), sorted(places))


def _names_figure(names: Mapping[str, set[str]]) -> Figure:
    return Figure(
        len(names), [f"{name}: {' '.join(sorted(held))}" for name, held in sorted(names.items())]
    )
