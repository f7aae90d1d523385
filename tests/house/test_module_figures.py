from __future__ import annotations

from tests.house.module_figures import (
    cycles,
    duplicate_classes,
    import_cycles,
    mirroring_tests,
    sizes,
)
from tests.house.sample_checkout import Tree
from tests.house.source import modules


def test_sixty_lines_are_short_and_six_hundred_are_not_long(tree: Tree) -> None:
    lines = {"a": 60, "b": 61, "c": 600, "d": 601}
    root = tree({f"gateway/{name}.py": "x = 1\n" * count for name, count in lines.items()})
    figures = sizes(modules(root))
    assert figures["modules"].value == 4
    assert figures["modules_short"].places == ["gateway/a.py: 60"]
    assert figures["modules_long"].places == ["gateway/d.py: 601"]
    assert figures["lines"].value == sum(lines.values())


def test_a_cycle_is_found_and_a_path_without_return_is_none() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": ()}
    assert cycles(edges) == [["a", "b", "c"]]


def test_imports_in_functions_and_relative_imports_make_cycles(tree: Tree) -> None:
    root = tree(
        {
            "gateway/__init__.py": "",
            "gateway/x/__init__.py": "from gateway.x.one import One",
            "gateway/x/one.py": "from . import two",
            "gateway/x/two.py": "def late():\n    from gateway.x.one import One",
            "gateway/x/three.py": "from gateway.x import one",
            "gateway/y/__init__.py": "",
            "gateway/y/down.py": "from gateway.x import three, One",
        }
    )
    figures = import_cycles(modules(root))
    assert figures["import_cycles"].places == ["gateway.x.one gateway.x.two"]
    assert (
        figures["import_cycles_of_packages"].value == figures["import_cycles_of_folders"].value == 0
    )


def test_packages_may_form_a_cycle_though_their_modules_do_not(tree: Tree) -> None:
    root = tree(
        {
            "gateway/x/__init__.py": "",
            "gateway/x/one.py": "import gateway.y.one",
            "gateway/x/two.py": "",
            "gateway/y/__init__.py": "",
            "gateway/y/one.py": "from gateway.x import two",
            "gateway/x/a.py": "from gateway.x.deep import one",
            "gateway/x/deep/__init__.py": "",
            "gateway/x/deep/one.py": "",
            "gateway/x/deep/two.py": "from gateway.x.a import b",
        }
    )
    figures = import_cycles(modules(root))
    assert figures["import_cycles"].value == 0
    assert figures["import_cycles_of_packages"].places == ["x y"]
    assert figures["import_cycles_of_folders"].places == [
        "gateway.x gateway.y",
        "gateway.x.a gateway.x.deep",
    ]


def test_a_class_name_counts_when_two_modules_define_it(tree: Tree) -> None:
    root = tree(
        {
            "gateway/a.py": "class One: ...\nclass Two:\n    class Inner: ...\nclass _Own: ...",
            "gateway/b.py": "class Inner: ...\nclass _Own: ...\nfrom gateway.a import One",
            "gateway/c.py": "def made():\n    class Two: ...",
        }
    )
    figures = duplicate_classes(modules(root))
    assert figures["duplicate_classes"].places == ["Inner: gateway.a gateway.b"]
    assert figures["duplicate_private_classes"].places == ["_Own: gateway.a gateway.b"]


def test_a_test_mirrors_the_module_with_the_longest_matching_name(tree: Tree) -> None:
    names = ["a", "x/pool", "x/pool_size", "x/__init__", "x/deep/__init__", "x/deep/one"]
    root = tree(
        {
            **{f"gateway/{name}.py": "" for name in names},
            "tests/test_a.py": "",
            "tests/x/test_pool_size_in_steps.py": "",
            "tests/x/test_deep.py": "",
            "tests/x/test_poolside.py": "",
            "tests/test_pool.py": "",
            "tests/x/build.py": "",
        }
    )
    figures = mirroring_tests(modules(root), modules(root, "tests"))
    assert figures["test_modules"].value == 5
    assert figures["test_modules_that_mirror"].places == [
        "tests/test_a.py",
        "tests/x/test_deep.py",
        "tests/x/test_pool_size_in_steps.py",
    ]
    assert figures["modules_without_test"].places == ["gateway/x/deep/one.py", "gateway/x/pool.py"]
