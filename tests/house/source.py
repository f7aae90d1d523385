"""A checkout's Python modules, and their imports."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""This checkout."""
PACKAGE = "gateway"


@dataclass(frozen=True)
class Module:
    """One Python file."""

    name: str
    """The dotted name; a package has that of its folder."""
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text)

    @property
    def is_package(self) -> bool:
        """Whether this is an `__init__.py`."""
        return self.path.name == "__init__.py"

    @property
    def lines(self) -> int:
        """Lines, blank ones included."""
        return len(self.text.splitlines())


def modules(root: Path, folder: str = PACKAGE) -> list[Module]:
    """All Python files below a folder of a checkout, ordered by path."""
    found = []
    for path in sorted((root / folder).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, path.read_text()))
    return found


def package_of(name: str) -> str:
    """The part of `gateway.<package>` that a module belongs to; "" for `gateway` itself."""
    return name.split(".")[1] if "." in name else ""


def imports(found: Sequence[Module]) -> dict[str, set[str]]:
    """Module -> modules that it imports, also in functions and for types alone.

    A package counts only if something of it is imported.
    """
    known = frozenset(module.name for module in found)
    return {module.name: _imported(module, known) - {module.name} for module in found}


def _imported(module: Module, known: frozenset[str]) -> set[str]:
    targets = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names} & known
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            names = {f"{base}.{alias.name}" for alias in node.names}
            targets |= names & known
            if base in known and not names <= known:
                targets.add(base)
    return targets


def _base(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = len(parts) - node.level + module.is_package
    return ".".join([*parts[:kept], *([node.module] if node.module else [])])


def cycles(edges: Mapping[str, Collection[str]]) -> list[list[str]]:
    """A circle of names, sorted, if there is one."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return [sorted(set(error.args[1]))]
    return []


def shared_class_names(found: Sequence[Module]) -> dict[str, list[str]]:
    """Public names of classes at the top level of several modules, with these modules."""
    owners: dict[str, list[str]] = defaultdict(list)
    for module in found:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(module.name)
    return {name: names for name, names in owners.items() if len(names) > 1}
