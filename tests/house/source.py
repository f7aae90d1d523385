"""A checkout's Python modules, parsed: places in them, and their imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""This checkout."""
PACKAGE = "gateway"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One place that a figure counts."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Figure:
    """A count, and the places that it counts."""

    value: int
    places: Sequence[Place | str] = ()


@dataclass(frozen=True)
class Module:
    """One Python file."""

    name: str
    """The dotted name; a package has that of its folder."""
    path: Path
    shown: str
    """The path from the checkout's root."""
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

    def place(self, node: ast.AST, text: str = "") -> Place:
        """The place of `node`, with its source in one line, or with `text`."""
        return Place(self.shown, getattr(node, "lineno", 1), (text or ast.unparse(node))[:120])


def modules(root: Path, folder: str = PACKAGE) -> list[Module]:
    """Parse all Python files below a folder of a checkout, ordered by path."""
    found = []
    for path in sorted((root / folder).rglob("*.py")):
        shown = path.relative_to(root)
        parts = shown.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, shown.as_posix(), path.read_text()))
    return found


def package_of(name: str) -> str:
    """The part of `gateway.<package>` that a module belongs to; "" for `gateway` itself."""
    return name.split(".")[1] if "." in name else ""


Function = ast.FunctionDef | ast.AsyncFunctionDef


def with_scopes(
    node: ast.AST, scopes: tuple[Function | ast.ClassDef, ...] = ()
) -> Iterator[tuple[ast.AST, tuple[Function | ast.ClassDef, ...]]]:
    """All nodes below this one, each with its enclosing classes and functions, outermost first."""
    for child in ast.iter_child_nodes(node):
        yield child, scopes
        if isinstance(child, Function | ast.ClassDef):
            yield from with_scopes(child, (*scopes, child))
        else:
            yield from with_scopes(child, scopes)


def imported(module: Module, known: frozenset[str]) -> dict[str, str]:
    """Names that a module imports from `known` modules: local name -> full name.

    Imports in functions and under TYPE_CHECKING count. A full name is a module's, or that of
    something in a module.
    """
    found: dict[str, str] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in known:
                    found[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                if base in known or name in known:
                    found[alias.asname or alias.name] = name
    return found


def _base(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = len(parts) - node.level + module.is_package
    return ".".join([*parts[:kept], *([node.module] if node.module else [])])


def imports(found: Sequence[Module]) -> dict[str, set[str]]:
    """Module -> modules that it imports. A package counts only if something of it is imported."""
    known = frozenset(module.name for module in found)
    edges: dict[str, set[str]] = {}
    for module in found:
        targets = imported(module, known).values()
        edges[module.name] = {
            name if name in known else name.rpartition(".")[0] for name in targets
        } - {module.name}
    return edges
