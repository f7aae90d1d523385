"""Where the code writes into an object that is not its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tests.house.source import PACKAGE, Figure, Function, Module, Place, package_of, with_scopes


class Owners(Protocol):
    """What has to be known of types (`typed.Types`, which needs mypy)."""

    def owners(self, module: Module, value: ast.expr, attribute: str) -> set[str]:
        """Modules of the classes that define `value.attribute`; none where nobody can tell."""


@dataclass(frozen=True)
class Write:
    """One attribute that is assigned or deleted."""

    module: Module
    value: ast.expr
    """Whose attribute it is."""
    attribute: str
    place: Place


def writes(found: Sequence[Module]) -> list[Write]:
    """All writes to others' attributes.

    Each target of an assignment (plain, annotated, augmented, of a loop or a `with`) and of a
    `del` counts, `self.part.x = 1` among them, and `setattr`. What does not: attributes of `self`
    and `cls` themselves, and of a local name that the function binds to nothing but what it makes
    there by a constructor, whose name begins with a capital.
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
            if value.id in {"cls", "self"} or (functions and _made(functions[-1], value.id)):
                continue
        yield Write(module, value, attribute, module.place(node))


def _made(function: Function, name: str) -> bool:
    """Whether a function binds a name to what its constructor returns, and to nothing else."""
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


def of_others(found: Sequence[Module]) -> Figure:
    """All of them."""
    places = [write.place for write in writes(found)]
    return Figure(len(places), places)


def across(found: Sequence[Module], types: Owners) -> dict[str, Figure]:
    """Those where the class that defines the attribute lives in another package.

    A module that stands in `gateway` itself is a package of its own. What is none of the
    gateway's is not counted; what mypy takes for `Any` is counted apart.
    """
    outside, untyped = [], []
    for write in writes(found):
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
