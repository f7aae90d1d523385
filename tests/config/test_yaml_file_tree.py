from __future__ import annotations

from gateway.config.yaml_file import (
    YamlEntry,
    YamlScalar,
    list_of,
    mapping_of,
    parse_scalar,
    to_plain,
)
from tests.each_case import each_case


@each_case(
    ("text", "result"),
    [
        ("1", 1), ("-7", -7), ("010", 10), ("0x1F", 31), ("0o17", 15), ("1.5", 1.5), (".5", 0.5),
        ("1e3", 1000.0), ("true", True), ("False", False), ("~", None), ("null", None), ("", None),
        (".inf", float("inf")), ("-.inf", float("-inf")), ("on", "on"), ("off", "off"),
        ("no", "no"), ("12:30", "12:30"), ("2026-01-01", "2026-01-01"), ("1_000", "1_000"),
        ("1.2.3", "1.2.3"), ("7" * 64, "7" * 64),
    ],
)  # fmt: skip
def test_plain_values_are_typed_as_yaml_1_2_does(text: str, result: object) -> None:
    found = parse_scalar(text)
    assert found == result
    assert type(found) is type(result)


def test_a_tree_becomes_plain_values_and_knows_its_size_and_depth() -> None:
    def entry(tree: YamlScalar) -> YamlEntry:
        return YamlEntry(tree, 1, "k")

    tree = mapping_of(
        {"a": YamlEntry(list_of([entry(YamlScalar(1)), entry(YamlScalar(None))]), 1, "a")}
    )
    assert to_plain(tree) == {"a": [1, None]}
    assert (tree.value_count, tree.depth) == (4, 3)
    assert (mapping_of({}).value_count, mapping_of({}).depth) == (1, 1)
