from __future__ import annotations

import pytest

from tests.house.foreign_writes import foreign_writes_figure, writes_across_packages
from tests.house.sample_checkout import Tree, texts
from tests.house.source import modules

WRITES = {
    "gateway/a.py": """
        class Node:
            free = 0
            def set(self, other: "Node") -> None:
                self.free = 1
                other.free = 2
            @classmethod
            def make(cls) -> "Node":
                cls.free = 3
                made = cls()
                made.free = 4
                return made
        def fresh() -> None:
            node = Node()
            node.free = 5
            again = Node()
            again = again
            again.free = 6
        """,
    "gateway/x/__init__.py": "",
    "gateway/x/b.py": """
        from typing import Any
        from gateway.a import Node
        class Kept(Node):
            own = 0
        class Holder:
            def __init__(self, node: Node, kept: Kept | None, any_: Any) -> None:
                self.node, self.kept = node, kept
                self.node.free += 7
                kept.own, kept.free = 8, 9
                any_.free = 10
                setattr(kept, "free", 11)
                setattr(self, "extra", 12)
                del node.free
                print(node.free)
        """,
}


def test_writes_to_other_objects_count(tree: Tree) -> None:
    assert texts(foreign_writes_figure(modules(tree(WRITES)))) == [
        "other.free",
        "made.free",
        "again.free",
        "self.node.free",
        "kept.own",
        "kept.free",
        "any_.free",
        "setattr(kept, 'free', 11)",
        "node.free",
    ]


def test_types_find_writes_across_packages(tree: Tree) -> None:
    pytest.importorskip("mypy", reason="`make dev` installs it")
    from tests.house.mypy_types import ModuleTypes

    root = tree(WRITES)
    found = modules(root)
    figures = writes_across_packages(found, ModuleTypes(root, found))
    assert texts(figures["writes_across"]) == [
        "self.node.free of gateway.a",
        "kept.free of gateway.a",
        "setattr(kept, 'free', 11) of gateway.a",
        "node.free of gateway.a",
    ]
    assert texts(figures["writes_untyped"]) == ["any_.free"]
