"""Finds code outside an API's module that tests which API a request uses.

Counted are:
- a comparison (`==`, `!=`, `in`, `not in`, `is`, or a `case`) with a routed path or a collection
  of them, and `startswith`, `endswith`, `removeprefix`, `removesuffix` or `partition` of one; a
  module's constant stands for its value;
- a comparison of an API's name with a name such as `dialect`, `api` or `protocol`, or with the
  `.name` of one;
- a comparison with an API itself (`api is MESSAGES`), and `isinstance` of its class;
- a dictionary with a routed path, or with the names of two APIs, among its keys.

Not counted are the modules of the APIs' package and the module of the route table; an `endpoint`
(what a node can do), the keys of a body (`"messages" in body`), and a dictionary of paths that no
route has.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.house.source import Figure, Module, Place, imported, with_scopes

API_PACKAGES = frozenset({"api", "apis", "dialects"})
"""Packages that hold a module for each API."""
API_NAMES = frozenset(
    {"anthropic", "chat", "completions", "messages", "native", "ollama", "openai", "responses"}
)
ROUTE_CLASS = "Route"
"""The class of the route table's rows; its first argument is the path."""
MIN_ROUTES = 3
"""A module that makes so many rows is the route table."""
API_WORDS = frozenset({"api", "dialect", "protocol"})
"""Words in the name of a variable that holds an API."""
PATH_METHODS = frozenset({"endswith", "partition", "removeprefix", "removesuffix", "startswith"})


@dataclass(frozen=True)
class KnownApis:
    """The routed paths and the APIs of a checkout."""

    paths: frozenset[str]
    route_tables: frozenset[str]
    """Modules that hold route tables."""
    owned: frozenset[str]
    """Full names of the APIs' classes and constants."""


def known_apis(found: Sequence[Module]) -> KnownApis:
    """Read the route table, and the definitions in the APIs' packages."""
    paths: set[str] = set()
    tables, owned = set(), set()
    for module in found:
        rows = _route_paths(module)
        if len(rows) >= MIN_ROUTES:
            named = [node.value for node in ast.walk(module.tree) if isinstance(node, ast.Constant)]
            paths.update(rows)
            # A path that occurs a second time there is also served without `/v1`.
            paths.update(row.removeprefix("/v1") for row in rows if named.count(row) > 1)
            tables.add(module.name)
        if _is_api_module(module):
            owned |= {f"{module.name}.{name}" for name in _defined_apis(module)}
            if module.is_package:
                owned |= {f"{module.name}.{name}" for name in _reexported(module)}
    return KnownApis(frozenset(paths), frozenset(tables), frozenset(owned))


def _route_paths(module: Module) -> list[str]:
    """The paths of the routes that a module defines."""
    return [
        node.args[0].value
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == ROUTE_CLASS
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
        and node.args[0].value.startswith("/")
    ]


def _is_api_module(module: Module) -> bool:
    parts = module.name.split(".")
    return bool(API_PACKAGES & set(parts if module.is_package else parts[:-1]))


def _defined_apis(module: Module) -> Iterator[str]:
    """Classes whose `name` is an API's, and constants that are instances of them."""
    classes = set()
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef) and any(
            isinstance(part, ast.Assign)
            and isinstance(part.value, ast.Constant)
            and part.value.value in API_NAMES
            and any(isinstance(target, ast.Name) and target.id == "name" for target in part.targets)
            for part in node.body
        ):
            classes.add(node.name)
            yield node.name
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and node.value.func.id in classes
        ):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _reexported(module: Module) -> Iterator[str]:
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from (one.name for one in node.names if one.name.isupper())


def api_tests(found: Sequence[Module]) -> Figure:
    """Count the places outside the APIs' modules that test which API it is."""
    apis = known_apis(found)
    known = frozenset(module.name for module in found)
    constants = {
        f"{module.name}.{name}": value for module in found for name, value in _constants(module)
    }
    places = [
        place
        for module in found
        if module.name not in apis.route_tables and not _is_api_module(module)
        for place in _ModuleSearch(module, apis, known, constants).places()
    ]
    return Figure(len(places), sorted(set(places)))


def _constants(module: Module) -> Iterator[tuple[str, ast.expr]]:
    for node in module.tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


class _ModuleSearch:
    """Searches one module."""

    def __init__(
        self,
        module: Module,
        apis: KnownApis,
        known: frozenset[str],
        constants: dict[str, ast.expr],
    ) -> None:
        self._module = module
        self._apis = apis
        self._names = imported(module, known)
        self._constants = constants

    def places(self) -> Iterator[Place]:
        """Each place once."""
        for node, _ in with_scopes(self._module.tree):
            if isinstance(node, ast.Compare):
                if self._compares(node):
                    yield self._module.place(node)
            elif isinstance(node, ast.Call):
                if self._calls(node):
                    yield self._module.place(node)
            elif isinstance(node, ast.Dict):
                if self._keyed(node):
                    yield self._module.place(node)
            elif isinstance(node, ast.Match):
                yield from self._cases(node)

    def _compares(self, node: ast.Compare) -> bool:
        sides = [node.left, *node.comparators]
        if any(self._is_path(side) or self._is_api(side) for side in sides):
            return True
        return any(_is_name(side) for side in sides) and any(
            _is_named_for_an_api(side) for side in sides
        )

    def _calls(self, node: ast.Call) -> bool:
        if isinstance(node.func, ast.Attribute) and node.func.attr in PATH_METHODS:
            return any(self._is_path(argument) for argument in node.args)
        is_instance = isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        return is_instance and len(node.args) == 2 and self._is_api(node.args[1])

    def _keyed(self, node: ast.Dict) -> bool:
        keys = [key for key in node.keys if key is not None]
        named = sum(1 for key in keys if _is_name(key))
        return named > 1 or any(self._is_path(key) for key in keys)

    def _cases(self, node: ast.Match) -> Iterator[Place]:
        for case in node.cases:
            for part in ast.walk(case.pattern):
                if isinstance(part, ast.MatchValue) and (
                    self._is_path(part.value)
                    or (_is_name(part.value) and _is_named_for_an_api(node.subject))
                ):
                    yield self._module.place(part)

    def _is_path(self, node: ast.expr) -> bool:
        """Whether it is a routed path, or a collection with one."""
        node = self._resolved(node)
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str) and node.value in self._apis.paths
        if isinstance(node, ast.Call) and len(node.args) == 1:
            name = ast.unparse(node.func)
            return name in {"frozenset", "set", "tuple"} and self._is_path(node.args[0])
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return any(self._is_path(one) for one in node.elts)
        return isinstance(node, ast.Dict) and self._keyed(node)

    def _is_api(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return any(self._is_api(one) for one in node.elts)
        return self._full(node) in self._apis.owned

    def _full(self, node: ast.expr) -> str:
        if not isinstance(node, ast.Name | ast.Attribute):
            return ""
        text = ast.unparse(node)
        first, _, rest = text.partition(".")
        base = self._names.get(first, f"{self._module.name}.{first}")
        return f"{base}.{rest}" if rest else base

    def _resolved(self, node: ast.expr) -> ast.expr:
        return self._constants.get(self._full(node), node)


def _is_name(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(_is_name(one) for one in node.elts)
    return isinstance(node, ast.Constant) and node.value in API_NAMES


def _is_named_for_an_api(node: ast.expr) -> bool:
    """Whether an expression is named like an API, or is the `.name` of one."""
    words = ast.unparse(node).lower().split(".")
    last = words[-2] if words[-1] == "name" and len(words) > 1 else words[-1]
    return bool(API_WORDS & set(last.strip("_").split("_")))
