from __future__ import annotations

from tests.house.sample_checkout import PRIVATE_ACCESSES, Tree, texts
from tests.house.source import modules
from tests.house.tests_figures import instruction_counts, patches, private_accesses


def test_private_accesses_and_patches_of_tests_count(tree: Tree) -> None:
    root = tree(PRIVATE_ACCESSES)
    found, tests = modules(root), modules(root, "tests")
    assert texts(private_accesses(found, tests)) == [
        "from gateway.a import _LIMIT",
        "pool._idle",
        "a._LIMIT",
    ]
    figures = patches(found, tests)
    assert figures["monkeypatches"].value == 3
    assert texts(figures["monkeypatches_of_gateway"]) == [
        "monkeypatch.setattr(a, '_LIMIT', 4)",
        "monkeypatch.setattr('gateway.a.Pool', Fake)",
    ]
    assert texts(instruction_counts(tests)) == ["instructions(lambda: 1)"]
