from __future__ import annotations

import contextlib
import inspect
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.config import fields
from gateway.config.errors import ConfigError, Problem
from gateway.config.listeners import ListenSettings
from gateway.config.yaml_file import (
    MOST_FILE_BYTES,
    InterpolationError,
    YamlDocument,
    YamlEntry,
    YamlList,
    YamlMapping,
    YamlScalar,
    interpolate,
    parse_scalar,
    read_yaml,
    to_plain,
)
from tests.config.conftest import Problems
from tests.each_case import each_case


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file.yaml"


def read(file: Path, text: str | bytes, **env: str) -> YamlDocument:
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_yaml(file, env)


def value(file: Path, text: str, **env: str) -> object:
    source = read(file, text, **env)
    assert not source.problems, source.problems
    return to_plain(source.root.tree)


def refusal(file: Path, text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        read(file, text)
    return str(caught.value).replace(str(file), "F")


def entry(source: YamlDocument, *path: str | int) -> YamlEntry:
    found = source.root
    for part in path:
        tree = found.tree
        if isinstance(part, str):
            assert isinstance(tree, YamlMapping)
            found = tree.entries[part]
        else:
            assert isinstance(tree, YamlList)
            found = tree.entries[part]
    return found


def test_every_key_and_item_knows_its_line_and_path(file: Path) -> None:
    source = read(file, "# head\nnodes:\n  - name: a\n    labels:\n      x: 1\n  -\n    name: b\n")
    assert entry(source, "nodes").line == 2
    assert entry(source, "nodes", 0).line == 3
    assert entry(source, "nodes", 0, "labels", "x") == YamlEntry(
        YamlScalar(1), 5, "nodes[0].labels.x"
    )
    assert entry(source, "nodes", 1, "name") == YamlEntry(YamlScalar("b"), 7, "nodes[1].name")


@each_case("text", ["!!python/object:os.system x", "!mine 1", "!!int 1", "!!set {a: }"])
def test_other_tags_are_refused(file: Path, text: str) -> None:
    (problem,) = read(file, f"a: {text}\n").problems
    assert (problem.line, problem.key) == (1, "a")
    assert "a tag but !!str is not supported" in problem.message


def test_a_duplicate_key_is_reported_with_both_lines(file: Path) -> None:
    source = read(file, "a:\n  b: 1\n  c: 2\n  b: 3\n")
    assert [str(p).replace(str(file), "F") for p in source.problems] == [
        "F:4: a.b: this key stands in line 2 already (keep one of them)"
    ]
    assert to_plain(source.root.tree) == {"a": {"b": 1, "c": 2}}


def test_a_whole_reference_is_typed_and_a_part_is_text(file: Path) -> None:
    text = 'a: ${N}\nb: "${N}"\nc: ${N}0\nd: ${T}\ne: ${M:-0.5}\nf: ${E:-}\ng: 5$$\nh: x${V}\n'
    found = value(file, text, N="42", T="true", V="1, b: [2]\nc: 3")
    assert isinstance(found, dict)
    assert list(found.values()) == [42, 42, "420", True, 0.5, None, "5$", "x1, b: [2]\nc: 3"]
    assert value(file, "a: !!str ${N}", N="42") == {"a": "42"}


def test_anchors_aliases_and_merge_keys_work(file: Path) -> None:
    text = """
base: &base {a: 1, b: 2}
more: &more {b: 3, c: 4}
one: {<<: *base, b: 5}
two: {<<: [*base, *more]}
three: *base
"""
    found = value(file, text)
    assert isinstance(found, dict)
    assert found["one"] == {"a": 1, "b": 5}
    assert found["two"] == {"a": 1, "b": 2, "c": 4}
    assert found["three"] == {"a": 1, "b": 2}


@each_case("text", ["d: &base {x: 1}\na: {<<: base}\n", "d: &base {x: 1}\na: {<<: [base]}\n"])
def test_a_merge_key_must_name_mappings(file: Path, text: str) -> None:
    (problem,) = read(file, text).problems
    assert (problem.message, problem.remedy) == ("must name mappings", "write *base")


@contextlib.contextmanager
def memory_bounded() -> Iterator[None]:
    """Fail if much more than the largest file takes is allocated at a time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_FILE_BYTES + (2 << 20)


def test_a_billion_laughs_take_little_memory_and_depth_by_aliases_is_bounded(file: Path) -> None:
    lines = ["a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with memory_bounded():
        assert "more than 500000 values" in refusal(file, "\n".join(lines))
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 100)]
    assert "nested deeper than 64 levels" in refusal(file, "\n".join(lines))


@each_case("text", ["[" * 100_000, "{a: " * 100_000, "- " * 100_000, "? " * 50_000])
def test_deep_nesting_takes_little_memory(file: Path, text: str) -> None:
    with memory_bounded():
        assert refusal(file, text).startswith("F:1:")


@each_case(
    ("text", "expected"),
    [
        ("a: [1, 2\nb: 3\n", "F:2:2: no valid YAML"),
        ("a: 'x\n", ".* that began in line 1"),
        ("a: b: c\n", "F:1:5: no valid YAML: mapping values are not allowed"),
        ("a:\n\tb: 1\n", "F:2:1: no valid YAML"),
        ("a: *b\n", r"F:1:4: the alias \*b has no anchor before it"),
        ("a: &a [*a]\n", r"F:1:8: the alias \*a is inside of what it stands for"),
        ("a: 1\n---\nb: 2\n", "F:2:1: a second document"),
        ("? {a: 1}\n: 1\n", ".* a key must be a text"),
        ("&k a: 1\n*k : 2\n", ".* a key must be a text, not an alias"),
        ("a: \x07\n", "F:1:4: a control character"),
        (b"a: 1\nb: \xff\n", "F:2: not UTF-8"),
        (b"#" * (MOST_FILE_BYTES + 1), "F: larger than 8 MiB"),
        # With the remedy.
        ("n:\n  - name: a\n  url: u\n", r"F:3:3: .* \(indent url by 4 spaces, as name above it"),
        ("n:\n  - name: a\n      url: u\n", r"F:3:10: .* \(indent url by 4 spaces"),
        ("n:\n  - name: a\n\n  # why\n  url: u\n", r"F:5:3: .* \(indent url by 4 spaces"),
        ("n:\n  host: a\n port: 1\n", r"F:3:2: .* \(indent port by 2 spaces, as host above it"),
        ("n:\n  - name: a\n    url:http://u\n", r"F:3: .* \(put a space after url:\)"),
        ("a:\n  - b: c\n\td: e\n", r"F:3:1: .* \(indent with spaces, not with tabs\)"),
        ("a: b\tc\nd: e: f", "F:2:5: (?!.*tab)"),
        ("n:\n  - name: a: b\n", r"F:2:12: .* \(quote a value that holds ': '"),
    ],
)
def test_invalid_yaml_is_reported_with_its_place_and_the_remedy(
    file: Path, text: str | bytes, expected: str
) -> None:
    assert re.match(expected, refusal(file, text))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file or directory"):
        read_yaml(tmp_path / "none.yaml", {})
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        read_yaml(tmp_path, {})


def test_an_empty_file_is_null(file: Path) -> None:
    assert value(file, "") is None
    assert value(file, "# only a comment\n") is None
    assert value(file, "\ufeffa: 1\n") == {"a": 1}  # A byte order mark is ignored.


@each_case(
    ("text", "result"),
    [
        ("plain", "plain"), ("${A}", "one"), ("${NESTED}", "${A}"), ("<${A}-${B}>", "<one-two>"),
        ("${MISSING:-other}", "other"), ("${EMPTY:-other}", "other"), ("${EMPTY}", ""),
        ("${MISSING:-}", ""), ("${A:-other}", "one"), ("${MISSING:-a:-b $ c}", "a:-b $ c"),
        ("$$", "$"), ("$${A}", "${A}"), ("$$${A}", "$one"), ("$A costs 5$", "$A costs 5$"),
    ],
)  # fmt: skip
def test_references_are_replaced(text: str, result: str) -> None:
    assert interpolate(text, {"A": "one", "B": "two", "EMPTY": "", "NESTED": "${A}"}) == result


@each_case("text", ["${", "${A", "${}", "${1A}", "${A B}", "${A:-${B}}", "${A-x}"])
def test_a_reference_must_be_well_formed(text: str) -> None:
    with pytest.raises(InterpolationError, match="well formed"):
        interpolate(text, {"A": "1", "B": "2"})


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


def test_a_value_from_a_variable_is_never_shown(nodes_problems: Problems) -> None:
    problems = nodes_problems(
        "nodes: [{name: '${S}', url: '${S}', tier: '${S}', slots: '${S}', host: '${S}'}]",
        S="top/secret",
    )
    assert len(problems) == 5
    assert "secret" not in "\n".join(map(str, problems))


def test_all_problems_come_at_once_in_the_order_of_the_file(nodes_problems: Problems) -> None:
    problems = nodes_problems(
        """\
        nodes:
          - name: a
            url: ${URL}
            slot: 3
          - url: http://b
            tier: cpuu
          - name: a
            name: c
            url: nonsense
        node: []
        """
    )
    assert [(p.line, p.key) for p in problems] == [
        (3, "nodes[0].url"), (4, "nodes[0].slot"), (5, "nodes[1].name"), (6, "nodes[1].tier"),
        (7, "nodes[2].name"), (8, "nodes[2].name"), (9, "nodes[2].url"), (10, "node"),
    ]  # fmt: skip


FILE = Path("config/nodes.yaml")


def test_an_error_lists_its_problems_and_counts_the_rest() -> None:
    error = ConfigError(Problem(FILE, line, "k", "bad") for line in range(1, 61))
    lines = str(error).splitlines()
    assert len(error.problems) == 60
    assert lines[0] == "config/nodes.yaml:1: k: bad"
    assert lines[50:] == ["... and 10 more"]


@pytest.mark.parametrize("source", [OSError, TypeError, SyntaxError, "class KeySpec(", "\0"])
def test_a_key_has_no_description_where_the_source_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, source: type[Exception] | str
) -> None:
    """An upgrade may be writing the files, and some installations have none."""

    def getsource(_: object) -> str:
        if isinstance(source, str):
            return source
        raise source

    monkeypatch.setattr(inspect, "getsource", getsource)
    fields._docstrings.cache_clear()
    try:
        assert fields.description_of(ListenSettings, "port") == ""
    finally:
        fields._docstrings.cache_clear()
