"""Types and helpers of the tests that measure small checkouts, which the fixture `tree` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.house.source import Figure

Tree = Callable[[Mapping[str, str]], Path]


def texts(figure: Figure) -> list[str]:
    """The source text of each place, without file and line."""
    return [str(place).split(": ", 1)[1] for place in figure.places]


PRIVATE_ACCESSES = {
    "gateway/a.py": """
        from typing import NamedTuple
        _LIMIT = 3
        class Pool:
            def __init__(self):
                self._idle = []
        """,
    "tests/test_a.py": """
        import os
        from gateway import __version__, a
        from gateway.a import _LIMIT, Pool
        from tests.counting import instructions
        class Fake:
            def __init__(self):
                self._idle = 1
                self.pool = Pool()
            def same(self, other):
                return other._idle == self._idle
        def test_it(monkeypatch, pool, point):
            assert pool._idle
            assert a._LIMIT
            point._replace(x=1)._asdict()
            os._exit(1)
            monkeypatch.setattr(a, "_LIMIT", 4)
            monkeypatch.setattr("gateway.a.Pool", Fake)
            monkeypatch.setattr(os, "getpid", lambda: 1)
            monkeypatch.setenv("A", "b")
            assert instructions(lambda: 1) < 5
            assert pool.instructions < 5
        """,
    "tests/counting.py": "def instructions(run): ...\ninstructions(1)",
}
"""A checkout whose tests access and patch private names."""
