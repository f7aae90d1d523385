"""Names that somebody may have meant by one that is not known."""

from __future__ import annotations

import difflib
import heapq
import os.path
from collections.abc import Iterable

from gateway.errors import truncate_echo

MOST_COMPARED = 64
"""Names that are compared letter by letter; with a thousand, that would take the loop 50 ms."""


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """A sentence for an error's end: the names that are similar, or `otherwise`."""
    name = truncate_echo(name)
    near = heapq.nlargest(MOST_COMPARED, known, key=lambda one: _in_common(name, one))
    similar = difflib.get_close_matches(name, near, n=3)
    quoted = ", ".join(f"'{one}'" for one in similar)
    return f"Did you mean {quoted}?" if similar else otherwise


def _in_common(one: str, other: str) -> int:
    """How many letters their beginnings or their ends share."""
    ends = (one, other), (one[::-1], other[::-1])
    return max(len(os.path.commonprefix(pair)) for pair in ends)  # noqa: RUF071 - it is meant so
