"""Writes the tables of the HTTP reference from what the OpenAPI document is made of.

`python -m gateway.openapi.reference [FOLDER]` renews `docs/reference/http.md` in a checkout.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from gateway.config.settings import Settings
from gateway.openapi.bodies import ADMIN_ERRORS, ERRORS, FIELDS
from gateway.openapi.document import Operation, operations

PAGE = Path("docs/reference/http.md")
_UNTOLD = frozenset({"ApiKey", "Why"})  # bodies that the page has no table of

_BLOCK = re.compile(
    r"(?P<begin><!-- table by python -m gateway\.openapi\.reference: (?P<name>[A-Za-z ]+) -->\n)"
    r".*?(?P<end><!-- end of the table -->)",
    re.DOTALL,
)


def renewed(page: str) -> str:
    """The page with new tables. Raises: KeyError, if it wants a table that there is not."""
    made = tables()
    return _BLOCK.sub(
        lambda found: f"{found['begin']}\n{made[found['name']]}\n{found['end']}", page
    )


def tables() -> dict[str, str]:
    """Every table by its name."""
    every = list(operations(Settings(ollama=True)))
    public = [one for one in every if one.listener == "public"]
    admin = [one for one in every if one.listener == "admin"]
    return {
        "public paths": _table(("path", "what"), _grouped(public)),
        "admin paths": _table(
            ("path", "role", "what"),
            (
                (f"`{one.method} {one.path}`", one.role or "none needed", one.summary)
                for one in admin
            ),
        ),
        "public errors": _table(
            ("status", "code", "when", "official clients retry it"),
            ((str(row.status), f"`{row.code}`", row.when, row.retried) for row in ERRORS),
        ),
        "admin errors": _table(
            ("status", "code", "when"),
            ((str(row.status), f"`{row.code}`", row.when) for row in ADMIN_ERRORS),
        ),
        **{name: _fields(fields) for name, fields in FIELDS.items() if name not in _UNTOLD},
    }


def _grouped(served: Iterable[Operation]) -> Iterator[tuple[str, str]]:
    """Paths with their other spellings, each group with what it is."""
    groups: dict[object, list[Operation]] = {}
    for one in served:
        key: object = one.route if isinstance(one.route, str) else id(one.route)
        if one.route is None:
            key = (one.method, one.path)
        groups.setdefault(key, []).append(one)
    for group in groups.values():
        first, *others = group
        paths = [f"`{first.method} {first.path}`", *(f"`{other.path}`" for other in others)]
        key_free = "" if first.needs_key else "; needs no key"
        yield ", ".join(paths), f"{first.summary}{key_free}"


def _fields(fields: Mapping[str, tuple[str, str]]) -> str:
    def rows() -> Iterator[tuple[str, str, str]]:
        for name, (kind, meaning) in fields.items():
            null = " or null" if kind.endswith("?") else ""
            yield f"`{name}`", f"{kind.removesuffix('?')}{null}", meaning

    return _table(("field", "type", "meaning"), rows())


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else ".") / PAGE
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
