"""Mutants: the small faults that can be put into a module's source."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

OPERATOR_SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "+",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
"""Operators, each with its replacement."""
LOGGERS = {"_log", "log", "logger"}
"""Calls of these objects only log, so users would not notice a fault there."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: a piece of a file's source, and its replacement."""

    path: Path
    begin: int
    end: int
    """Offsets into the source, in bytes."""
    line: int
    """The line on which the piece begins, from 1."""
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old!r} -> {self.new!r}"

    def source(self, root: Path) -> bytes:
        """Return the file's source with the fault in it."""
        data = (root / self.path).read_bytes()
        assert data[self.begin : self.end].decode() == self.old
        return data[: self.begin] + self.new.encode() + data[self.end :]


def sample(root: Path, folders: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants of the modules below these folders; the same seed, the same mutants."""
    every = _all(root, folders)
    drawn = random.Random(seed).sample(every, min(count, len(every)))
    return sorted(drawn, key=lambda mutant: (mutant.path, mutant.begin))


def find_again(root: Path, folders: Sequence[str], described: Iterable[str]) -> list[Mutant]:
    """Return the mutants with these descriptions; their lines may have moved.

    Mutants of code that no longer exists are left out.
    """
    same: dict[str, list[Mutant]] = {}
    for mutant in _all(root, folders):
        same.setdefault(_without_line(str(mutant)), []).append(mutant)
    found = []
    for text in described:
        line = int(text.split(":", maxsplit=2)[1])
        alike = same.get(_without_line(text), [])
        found += sorted(alike, key=lambda mutant: abs(mutant.line - line))[:1]
    return found


def _without_line(text: str) -> str:
    path, _, fault = text.split(":", maxsplit=2)
    return f"{path}:{fault}"


def _all(root: Path, folders: Sequence[str]) -> list[Mutant]:
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    return [mutant for path in paths for mutant in mutants(path.relative_to(root), root)]


def mutants(path: Path, root: Path) -> Iterator[Mutant]:
    """Yield all mutants of one module."""
    data = (root / path).read_bytes()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def piece(node: ast.AST, new: str) -> Mutant:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return Mutant(path, begin, end, node.lineno, data[begin:end].decode(), new)

    for node in _executed(ast.parse(data)):
        for target, new in _faults(node):
            yield piece(target, new)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk through executed code: neither annotations, nor calls that log, nor TYPE_CHECKING."""
    for name, value in ast.iter_fields(tree):
        if name in {"annotation", "returns", "type_params", "decorator_list"}:
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or _only_logs(node):
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                continue
            if isinstance(node, ast.JoinedStr | ast.Assert):
                continue
            yield node
            yield from _executed(node)


def _only_logs(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and any(
        isinstance(part, ast.Name | ast.Attribute)
        and (part.id if isinstance(part, ast.Name) else part.attr) in LOGGERS
        for part in ast.walk(call.func)
    )


def _faults(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:  # noqa: PLR0912 - one table
    """Yield the pieces of a node that can be replaced, with their replacements."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if (
            type(operator) in OPERATOR_SWAPS
        ):
            swapped = OPERATOR_SWAPS[type(operator)]
            yield node, f"({ast.unparse(left)}) {swapped} ({ast.unparse(right)})"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATOR_SWAPS:
            yield (
                node,
                f"(({ast.unparse(left)}) {OPERATOR_SWAPS[type(operator)]} ({ast.unparse(right)}))",
            )
        case ast.BoolOp(op=operator, values=values):
            other = " or " if isinstance(operator, ast.And) else " and "
            yield node, "(" + other.join(f"({ast.unparse(value)})" for value in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, repr(value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield value, "None"
        case ast.Break():
            yield node, "continue"
        case ast.Continue() | ast.Raise():
            yield node, "pass"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case _:
            return


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
