"""Draws the packages and their imports: `python -m tests.house.picture [--write]`.

Packages and layers come from import-linter's contract in `pyproject.toml`, arrows from the imports
in the code, and each package's purpose from its docstring. `--write` puts picture and table into
`docs/architecture.md`, between the two comments that mark their place, and counts the lines of the
modules in its list of a chat. A test says when the drawing is out of date.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.house.source import PACKAGE, ROOT, Module, imports, modules, package_of

PAGE = Path("docs/architecture.md")
BEGIN = "<!-- drawn by python -m tests.house.picture --write -->"
END = "<!-- end of the drawing -->"
INNER = 40
"""Columns inside a box."""


@dataclass(slots=True)
class Package:
    """A package of gateway/, or a module directly in it."""

    name: str
    purpose: str = ""
    parts: list[str] = field(default_factory=list)
    """Packages inside it."""
    targets: set[str] = field(default_factory=set)
    """Packages that it imports."""


def layers(root: Path) -> list[list[str]]:
    """The layers of the contract, top first; names of one layer do not import each other."""
    with (root / "pyproject.toml").open("rb") as file:
        contract = tomllib.load(file)["tool"]["importlinter"]["contracts"][0]
    return [
        [name.strip(" ()") for name in layer.replace(":", "|").split("|")]
        for layer in contract["layers"]
    ]


def packages(found: Sequence[Module]) -> dict[str, Package]:
    """Every package and module of gateway/, by name, with what it imports."""
    known: dict[str, Package] = {}
    edges = imports(found)
    for module in found:
        name = package_of(module.name)
        if not name:
            continue
        package = known.setdefault(name, Package(name))
        package.targets |= {package_of(target) for target in edges[module.name]} - {"", name}
        if module.name == f"{PACKAGE}.{name}":
            package.purpose = (ast.get_docstring(module.tree) or "").partition("\n\n")[0]
        elif module.is_package:
            package.parts.append(module.name.split(".", 2)[2])
    return known


def drawing(order: Sequence[Sequence[str]], known: Mapping[str, Package]) -> str:
    """The layers as boxes, one on the other, each package with an arrow to those that it imports.

    The lowest layer is drawn as one package, `ground`.
    """
    rank = {name: number for number, layer in enumerate(order) for name in layer}
    ground = [name for name in order[-1] if name in known]
    lines = ["┌" + "─" * INNER + "┐"]
    for layer in order[:-1]:
        for package in (known[name] for name in layer if name in known):
            parts = f" ({', '.join(package.parts)})" if package.parts else ""
            above = sorted(package.targets - set(ground), key=lambda one: (rank.get(one, 99), one))
            targets = above + (["ground"] if package.targets & set(ground) else [])
            box = f"│ {package.name + parts:<{INNER - 1}}│"
            lines.append(f"{box} ──► {', '.join(targets)}" if targets else box)
        lines.append("├" + "─" * INNER + "┤")
    text = f"ground: {', '.join(ground)}"
    lines += [f"│ {line:<{INNER - 1}}│" for line in textwrap.wrap(text, INNER - 2)]
    lines.append("└" + "─" * INNER + "┘")
    return "\n".join(lines)


def table(order: Sequence[Sequence[str]], known: Mapping[str, Package]) -> str:
    """The layers as a table, with each package's purpose."""
    rows = [
        f"| {number} | `{name}` | {' '.join(known[name].purpose.split())} |"
        for number, layer in enumerate(order, start=1)
        for name in layer
        if name in known
    ]
    return "\n".join(["| layer | package | purpose |", "| --- | --- | --- |", *rows])


def page(root: Path) -> str:
    """The page with its drawing as the code has it now."""
    order, known = layers(root), packages(modules(root))
    text = (root / PAGE).read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    drawn = f"```text\n{drawing(order, known)}\n```\n\n{table(order, known)}"
    return f"{before}{BEGIN}\n\n{drawn}\n\n{END}{after}"


def counted(text: str, root: Path) -> str:
    """The page with the lines of each module in its list of a chat's modules as they are now."""

    def row(match: re.Match[str]) -> str:
        path = root / PACKAGE / match["path"]
        lines = len(path.read_text().splitlines()) if path.exists() else match["lines"]
        return f"{match['begin']}{lines} |"

    return re.sub(r"(?P<begin>\| `(?P<path>[\w/]+\.py)` \| )(?P<lines>\d+) \|", row, text)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        (ROOT / PAGE).write_text(counted(page(ROOT), ROOT))
    else:
        found = layers(ROOT), packages(modules(ROOT))
        print(__doc__, drawing(*found), table(*found), sep="\n\n")
