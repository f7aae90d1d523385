"""Finds code that writes attributes of other objects."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tests.house.source import PACKAGE, Figure, Function, Module, Place, package_of, with_scopes


class AttributeOwners(Protocol):
    """Knows which module defines an attribute (`mypy_types.ModuleTypes`, which needs mypy)."""

    def owners(self, module: Module, value: ast.expr, attribute: str) -> set[str]:
        """Modules of the classes that define `value.attribute`; empty when it is not known."""


@dataclass(frozen=True)
class Write:
    """One attribute that is assigned or deleted."""

    module: Module
    value: ast.expr
    """The object that has the attribute."""
    attribute: str
    place: Place


def foreign_writes(found: Sequence[Module]) -> list[Write]:
    """All writes to attributes of other objects.

    Counted are the targets of assignments (plain, annotated, augmented, of a loop or a `with`) and
    of `del`, including `self.part.x = 1`, and calls of `setattr`. Not counted are attributes of
    `self` and `cls`, and of a local variable that the function only ever binds to a new object
    (from a call of a capitalised name).
    """
    return [write for module in found for write in _writes(module)]


def _writes(module: Module) -> Iterator[Write]:
    for node, scopes in with_scopes(module.tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            value, attribute = node.value, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"delattr", "setattr"}
            and len(node.args) > 1
        ):
            value, name = node.args[:2]
            attribute = str(name.value) if isinstance(name, ast.Constant) else ""
        else:
            continue
        if isinstance(value, ast.Name):
            functions = [scope for scope in scopes if isinstance(scope, Function)]
            if value.id in {"cls", "self"} or (
                functions and _only_constructed(functions[-1], value.id)
            ):
                continue
        yield Write(module, value, attribute, module.place(node))


def _only_constructed(function: Function, name: str) -> bool:
    """Whether a function binds a name to results of constructors and to nothing else."""
    made = bound = 0
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            bound += 1
        elif isinstance(node, ast.arg) and node.arg == name:
            return False
        elif isinstance(node, ast.Assign | ast.AnnAssign) and _constructs(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            made += sum(isinstance(one, ast.Name) and one.id == name for one in targets)
    return 0 < bound == made


def _constructs(value: ast.expr | None) -> bool:
    if not isinstance(value, ast.Call):
        return False
    return ast.unparse(value.func).rpartition(".")[2].lstrip("_")[:1].isupper()


def foreign_writes_figure(found: Sequence[Module]) -> Figure:
    """Count all of them."""
    places = [write.place for write in foreign_writes(found)]
    return Figure(len(places), places)


def writes_across_packages(found: Sequence[Module], types: AttributeOwners) -> dict[str, Figure]:
    """Count those where another package defines the attribute's class.

    Modules of `gateway` itself count as one package. Attributes of classes that are not the
    gateway's don't count; those of values that mypy knows as `Any` are counted apart.
    """

    outside, untyped = [], []
    for write in foreign_writes(found):
        owners = types.owners(write.module, write.value, write.attribute)
        own = [name for name in owners if name.split(".")[0] == PACKAGE]
        if not owners:
            untyped.append(write.place)
        elif any(package_of(name) != package_of(write.module.name) for name in own):
            place = write.place
            outside.append(
                Place(place.path, place.line, f"{place.text} of {' '.join(sorted(own))}")
            )
    return {
        "writes_across": Figure(len(outside), outside),
        "writes_untyped": Figure(len(untyped), untyped),
    }
