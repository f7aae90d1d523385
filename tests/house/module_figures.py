"""Figures of whole modules: sizes, import cycles, duplicate class names, tests by their names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath

from tests.house.source import PACKAGE, Figure, Module, imports, package_of

SHORT_LINES = 60
LONG_LINES = 600


def sizes(components: Sequence[Module]) -> dict[str, Figure]:
    """Count modules, short and long ones, and lines."""
    short = [module for module in components if module.lines <= SHORT_LINES]
    long = [module for module in components if module.lines > LONG_LINES]
    return {
        "modules": Figure(len(components), [module.shown for module in components]),
        "modules_short": Figure(len(short), [f"{one.shown}: {one.lines}" for one in short]),
        "modules_long": Figure(len(long), [f"{one.shown}: {one.lines}" for one in long]),
        "lines": Figure(sum(module.lines for module in components)),
    }


def cycles(edges: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Strongly connected components of more than one name (Tarjan), each sorted."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in sorted(edges.get(name, ())):
            if other not in index:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], index[other])
        if lowest[name] == index[name]:
            at = stack.index(name)
            cycle = stack[at:]
            del stack[at:]
            if len(cycle) > 1:
                components.append(sorted(cycle))

    for name in sorted(edges):
        if name not in index:
            visit(name)
    return sorted(components)


def import_cycles(components: Sequence[Module]) -> dict[str, Figure]:
    """Import cycles of modules, of packages, and of siblings in any one folder."""
    edges = imports(components)
    packages: dict[str, set[str]] = defaultdict(set)
    beside: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    folders = {module.name for module in components if module.is_package}
    for name, targets in edges.items():
        for target in targets:
            packages[package_of(name)].add(package_of(target))
            one, other = name.split("."), target.split(".")
            same = next(
                (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None
            )
            if same is not None:
                a, b = ".".join(one[: same + 1]), ".".join(other[: same + 1])
                beside[".".join(one[:same])][a].add(b)
    cycles_of_folders = [
        cycle
        for graph in beside.values()
        for cycle in cycles(graph)
        if any(name in folders for name in cycle)
    ]
    return {
        "import_cycles": _cycles_figure(cycles(edges)),
        "import_cycles_of_packages": _cycles_figure(cycles(packages)),
        "import_cycles_of_folders": _cycles_figure(sorted(cycles_of_folders)),
    }


def _cycles_figure(components: Sequence[Sequence[str]]) -> Figure:
    return Figure(len(components), [" ".join(cycle) for cycle in components])


def duplicate_classes(components: Sequence[Module]) -> dict[str, Figure]:
    """Class names that several modules define, at the top level or in another class."""
    owners: dict[str, list[str]] = defaultdict(list)
    for module in components:
        for name in sorted(set(class_names(module.tree))):
            owners[name].append(module.name)
    duplicates = [
        f"{name}: {' '.join(names)}" for name, names in sorted(owners.items()) if len(names) > 1
    ]
    public = [line for line in duplicates if not line.startswith("_")]
    private = [line for line in duplicates if line.startswith("_")]
    return {
        "duplicate_classes": Figure(len(public), public),
        "duplicate_private_classes": Figure(len(private), private),
    }


def class_names(node: ast.Module | ast.ClassDef) -> list[str]:
    """Names of the classes at the top level and, recursively, in these classes."""
    names = []
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            names += [child.name, *class_names(child)]
    return names


def mirroring_tests(components: Sequence[Module], tests: Sequence[Module]) -> dict[str, Figure]:
    """Test modules that are named for a module, and modules without such a test.

    `tests/a/test_b.py` and `tests/a/test_b_side.py` are named for `gateway/a/b.py` or the package
    `gateway/a/b`; the longest name wins. An `__init__.py` needs no test.
    """
    by_folder: dict[str, dict[str, Module]] = defaultdict(dict)
    for module in components:
        path = PurePosixPath(module.shown).relative_to(PACKAGE)
        path = path.parent if module.is_package else path.with_suffix("")
        if path.name:
            by_folder[str(path.parent)][path.name.strip("_")] = module
    mirrors, tested, in_all = [], set(), 0
    for test in tests:
        path = PurePosixPath(test.shown)
        if not path.name.startswith("test_"):
            continue
        in_all += 1
        rest = path.stem.removeprefix("test_")
        beside = by_folder[str(path.parent.relative_to("tests"))]
        fitting = [name for name in beside if rest == name or rest.startswith(f"{name}_")]
        if fitting:
            mirrors.append(test.shown)
            tested.add(beside[max(fitting, key=len)].shown)
    without = [one.shown for one in components if one.shown not in tested and not one.is_package]
    return {
        "test_modules": Figure(in_all),
        "test_modules_that_mirror": Figure(len(mirrors), mirrors),
        "modules_without_test": Figure(len(without), without),
    }
