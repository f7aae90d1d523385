"""Figures of the modules as a whole: sizes, circles, names used twice, tests beside them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath

from tests.house.source import PACKAGE, Figure, Module, imports, package_of

SHORT = 60
LONG = 600


def sizes(found: Sequence[Module]) -> dict[str, Figure]:
    """Modules in all, the shortest, the longest, and lines."""
    short = [module for module in found if module.lines <= SHORT]
    long = [module for module in found if module.lines > LONG]
    return {
        "modules": Figure(len(found), [module.shown for module in found]),
        "modules_short": Figure(len(short), [f"{one.shown}: {one.lines}" for one in short]),
        "modules_long": Figure(len(long), [f"{one.shown}: {one.lines}" for one in long]),
        "lines": Figure(sum(module.lines for module in found)),
    }


def circles(edges: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Sets of more than one name that all lead to each other (Tarjan), each in order."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges.get(name, ())):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            circle = stack[at:]
            del stack[at:]
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in sorted(edges):
        if name not in index:
            visit(name)
    return sorted(found)


def import_circles(found: Sequence[Module]) -> dict[str, Figure]:
    """Circles of modules, of packages, and of what stands side by side in any one folder."""
    edges = imports(found)
    packages: dict[str, set[str]] = defaultdict(set)
    beside: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    folders = {module.name for module in found if module.is_package}
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
    folders_found = [
        circle
        for graph in beside.values()
        for circle in circles(graph)
        if any(name in folders for name in circle)
    ]
    return {
        "circles": _told(circles(edges)),
        "circles_of_packages": _told(circles(packages)),
        "circles_of_folders": _told(sorted(folders_found)),
    }


def _told(found: Sequence[Sequence[str]]) -> Figure:
    return Figure(len(found), [" ".join(circle) for circle in found])


def classes_twice(found: Sequence[Module]) -> dict[str, Figure]:
    """Names of classes that several modules define, at the top or within another class."""
    owners: dict[str, list[str]] = defaultdict(list)
    for module in found:
        for name in sorted(set(_classes(module.tree))):
            owners[name].append(module.name)
    told = [
        f"{name}: {' '.join(names)}" for name, names in sorted(owners.items()) if len(names) > 1
    ]
    public = [line for line in told if not line.startswith("_")]
    private = [line for line in told if line.startswith("_")]
    return {
        "classes_twice": Figure(len(public), public),
        "classes_twice_private": Figure(len(private), private),
    }


def _classes(node: ast.Module | ast.ClassDef) -> list[str]:
    names = []
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            names += [child.name, *_classes(child)]
    return names


def mirrored(found: Sequence[Module], tests: Sequence[Module]) -> dict[str, Figure]:
    """Test modules that are named for a module, and modules that none is named for.

    `tests/a/test_b.py` and `tests/a/test_b_so.py` are named for `gateway/a/b.py` or the package
    `gateway/a/b`; of several the longest name is meant. `__init__.py` alone needs none.
    """
    by_folder: dict[str, dict[str, Module]] = defaultdict(dict)
    for module in found:
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
    without = [one.shown for one in found if one.shown not in tested and not one.is_package]
    return {
        "tests_in_all": Figure(in_all),
        "tests_that_mirror": Figure(len(mirrors), mirrors),
        "modules_without_test": Figure(len(without), without),
    }
