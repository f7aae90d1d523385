"""Types of a checkout's gateway by mypy: the classes of its expressions, and their attributes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mypy import build
from mypy.config_parser import parse_config_file
from mypy.modulefinder import BuildSource
from mypy.nodes import NameExpr, TypeInfo, Var
from mypy.options import Options
from mypy.server.subexpr import get_subexpressions
from mypy.types import (
    CallableType,
    Instance,
    TupleType,
    Type,
    TypeType,
    TypeVarType,
    UnionType,
    get_proper_type,
)

from tests.house.source import Module

Span = tuple[int, int, int | None, int | None]


def _infos(found: Type | None, *, objects: bool = False) -> Iterator[TypeInfo]:
    """The classes that a value of this type may have; with `objects` also classes as values."""
    if found is None:
        return
    proper = get_proper_type(found)
    if isinstance(proper, Instance):
        yield proper.type
    elif isinstance(proper, UnionType):
        for item in proper.items:
            yield from _infos(item, objects=objects)
    elif isinstance(proper, TypeVarType):
        yield from _infos(proper.upper_bound, objects=objects)
    elif isinstance(proper, TupleType):
        yield proper.partial_fallback.type
    elif isinstance(proper, TypeType) and objects:
        yield from _infos(proper.item)
    elif isinstance(proper, CallableType) and objects and proper.is_type_obj():
        yield proper.type_object()


class ModuleTypes:
    """The types in one checkout's modules. Type errors in them are ignored."""

    def __init__(self, root: Path, found: Sequence[Module]) -> None:
        options = Options()
        settings = root / "pyproject.toml"
        if settings.exists():
            parse_config_file(options, lambda: None, str(settings), sys.stderr, sys.stderr)
        options.check_untyped_defs = True
        options.export_types = options.preserve_asts = True
        options.ignore_missing_imports = True
        options.incremental = False
        options.cache_dir = "/dev/null"
        sources = [
            BuildSource(str(module.path), module.name, base_dir=str(root)) for module in found
        ]
        result = build.build(sources, options)
        self._infos: dict[str, TypeInfo] = {}
        self._types: dict[str, dict[Span, Type]] = {}
        for module in found:
            file = result.files[module.name]
            spans = self._types[module.name] = {}
            for node in get_subexpressions(file):
                type_ = result.types.get(node)
                if type_ is None and isinstance(node, NameExpr) and isinstance(node.node, Var):
                    type_ = node.node.type
                if type_ is not None:
                    spans[node.line, node.column, node.end_line, node.end_column] = type_
            for symbol in file.names.values():
                if isinstance(symbol.node, TypeInfo) and symbol.node.module_name == module.name:
                    self._infos[symbol.node.fullname] = symbol.node

    def _at(self, module: Module, node: ast.expr) -> Type | None:
        span = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        return self._types[module.name].get(span)

    def classes(self, module: Module, node: ast.expr) -> set[str]:
        """Full names of the classes that an expression's value may have."""
        return {info.fullname for info in _infos(self._at(module, node))}

    def owners(self, module: Module, value: ast.expr, attribute: str) -> set[str]:
        """Modules of the classes that define `value.attribute`; empty when mypy does not know."""
        found = set()
        for info in _infos(self._at(module, value), objects=True):
            if info.fullname != "types.NoneType":
                found.add((info.get_containing_type_info(attribute) or info).module_name)
        return found

    def fields(self) -> dict[str, dict[str, set[str]]]:
        """Each class of the gateway -> its attributes -> the classes that their values may have."""
        return {
            name: {
                attribute: {one.fullname for one in _infos(symbol.node.type)}
                for attribute, symbol in info.names.items()
                if isinstance(symbol.node, Var) and not attribute.startswith("__")
            }
            for name, info in self._infos.items()
        }
