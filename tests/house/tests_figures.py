"""Figures of the tests: private accesses, monkeypatches, and counts of bytecode instructions."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tests.house.source import PACKAGE, Figure, Function, Module, Place, imported, with_scopes

PUBLIC_NAMES = frozenset(
    {"_asdict", "_field_defaults", "_fields", "_make", "_replace", "_request_id"}
)
"""Public names that begin with an underscore: of named tuples, and of the official clients'
responses (`_request_id` is the documented name of the request's id in openai and anthropic)."""
PATCH_METHODS = frozenset({"delattr", "delitem", "setattr", "setitem"})
"""Methods of `monkeypatch` that replace something in an object or a dictionary."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_NAMES


def _defined(node: ast.AST) -> set[str]:
    """Names of the attributes, methods, functions and variables that a node defines."""
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
    """Count `x._name` in the tests, and private names that they import from the gateway.

    A name counts if the gateway or the tests define it; those of libraries don't. `self`, `cls`
    and `super()` don't count, nor does another instance of the enclosing class.
    """
    names = {name for module in (*found, *tests) for name in _defined(module.tree)}
    private = {name for name in names if _is_private(name)}
    places = [place for test in tests for place in _accesses(test, private)]
    return Figure(len(places), places)


def _accesses(test: Module, private: set[str]) -> Iterator[Place]:
    for node, scopes in with_scopes(test.tree):
        if isinstance(node, ast.Attribute) and node.attr in private:
            of_gateway = (scope for scope in scopes if isinstance(scope, ast.ClassDef))
            if not _is_own(node.value) and all(
                node.attr not in _defined(one) for one in of_gateway
            ):
                yield test.place(node)
        elif isinstance(node, ast.ImportFrom) and _is_gateway(node.module or ""):
            for alias in node.names:
                if _is_private(alias.name):
                    yield test.place(node, f"from {node.module} import {alias.name}")


def _is_own(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        node = node.func
        return isinstance(node, ast.Name) and node.id == "super"
    return isinstance(node, ast.Name) and node.id in {"cls", "self"}


def _is_gateway(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] == PACKAGE


def patches(found: Sequence[Module], tests: Sequence[Module]) -> dict[str, Figure]:
    """Count calls of `monkeypatch` that replace something, and those that patch the gateway.

    A call patches the gateway when its target is the gateway's dotted name in a string, or a name
    that is imported from the gateway.
    """
    known = frozenset(module.name for module in found)
    all_patches: list[Place] = []
    of_gateway: list[Place] = []
    for test in tests:
        names = imported(test, known)
        for node in ast.walk(test.tree):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in {"monkeypatch", "patch"}
                and node.func.attr in PATCH_METHODS
            ):
                continue
            all_patches.append(test.place(node))
            target = node.args[0] if node.args else None
            if (
                isinstance(target, ast.Constant)
                and isinstance(target.value, str)
                and _is_gateway(target.value)
            ) or (target is not None and _is_gateway_object(target, names)):
                of_gateway.append(test.place(node))
    return {
        "monkeypatches": Figure(len(all_patches), all_patches),
        "monkeypatches_of_gateway": Figure(len(of_gateway), of_gateway),
    }


def _is_gateway_object(node: ast.expr, names: dict[str, str]) -> bool:
    text = ast.unparse(node)
    return any(text == name or text.startswith(f"{name}.") for name in names)


def instruction_counts(tests: Sequence[Module]) -> Figure:
    """Count calls of `instructions`, which counts bytecode, outside the module that defines it."""
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
