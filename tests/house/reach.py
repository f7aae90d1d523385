"""Figures of the tests: how often they reach into what is private, patch it, or count bytecode."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tests.house.source import PACKAGE, Figure, Function, Module, Place, imported, with_scopes

NAMED_TUPLES = frozenset({"_asdict", "_field_defaults", "_fields", "_make", "_replace"})
"""Public, whatever they look like."""
PATCHES = frozenset({"delattr", "delitem", "setattr", "setitem"})
"""What `monkeypatch` replaces in objects; its other methods set the scene."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLES


def _defined(node: ast.AST) -> set[str]:
    """All that is given a name within a node: attributes, methods, functions, variables."""
    found = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            found.add(one.attr)
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.id)
        elif isinstance(one, Function | ast.ClassDef):
            found.add(one.name)
    return found


def private_accesses(found: Sequence[Module], tests: Sequence[Module]) -> Figure:
    """`x._name` in the tests, and what is private and imported from the gateway.

    Counted is a name that the gateway or the tests define: other people's are theirs. `self`,
    `cls` and `super()` are one's own, and so is another instance of the class around it.
    """
    names = {name for module in (*found, *tests) for name in _defined(module.tree)}
    private = {name for name in names if _is_private(name)}
    places = [place for test in tests for place in _accesses(test, private)]
    return Figure(len(places), places)


def _accesses(test: Module, private: set[str]) -> Iterator[Place]:
    for node, scopes in with_scopes(test.tree):
        if isinstance(node, ast.Attribute) and node.attr in private:
            own = (scope for scope in scopes if isinstance(scope, ast.ClassDef))
            if not _is_own(node.value) and all(node.attr not in _defined(one) for one in own):
                yield test.place(node)
        elif isinstance(node, ast.ImportFrom) and _of_gateway(node.module or ""):
            for alias in node.names:
                if _is_private(alias.name):
                    yield test.place(node, f"from {node.module} import {alias.name}")


def _is_own(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        node = node.func
        return isinstance(node, ast.Name) and node.id == "super"
    return isinstance(node, ast.Name) and node.id in {"cls", "self"}


def _of_gateway(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] == PACKAGE


def patches(found: Sequence[Module], tests: Sequence[Module]) -> dict[str, Figure]:
    """Calls of `monkeypatch` that replace something; those of the gateway's own among them.

    The gateway's own: named by a string, or by a name that is imported from the gateway.
    """
    known = frozenset(module.name for module in found)
    every: list[Place] = []
    own: list[Place] = []
    for test in tests:
        names = imported(test, known)
        for node in ast.walk(test.tree):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in {"monkeypatch", "patch"}
                and node.func.attr in PATCHES
            ):
                continue
            every.append(test.place(node))
            target = node.args[0] if node.args else None
            if (
                isinstance(target, ast.Constant)
                and isinstance(target.value, str)
                and _of_gateway(target.value)
            ) or (target is not None and _root(target, names)):
                own.append(test.place(node))
    return {
        "monkeypatches": Figure(len(every), every),
        "monkeypatches_of_gateway": Figure(len(own), own),
    }


def _root(node: ast.expr, names: dict[str, str]) -> bool:
    text = ast.unparse(node)
    return any(text == name or text.startswith(f"{name}.") for name in names)


def instruction_counts(tests: Sequence[Module]) -> Figure:
    """Calls of `instructions`, which counts bytecode, outside the module and test that are its."""
    places = [
        test.place(node)
        for test in tests
        if not test.shown.endswith("counting.py")
        for node in ast.walk(test.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name | ast.Attribute)
        and ast.unparse(node.func).split(".")[-1] == "instructions"
    ]
    return Figure(len(places), places)
