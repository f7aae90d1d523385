from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.yaml_file import InterpolationError, interpolate, is_variable_reference
from tests.each_case import each_case

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True)


@each_case(
    ("text", "result"),
    [
        ("plain", "plain"), ("${A}", "one"), ("<${A}-${B}>", "<one-two>"),
        ("${MISSING:-other}", "other"), ("${EMPTY:-other}", "other"), ("${EMPTY}", ""),
        ("${MISSING:-}", ""), ("${A:-other}", "one"), ("${MISSING:-a:-b $ c}", "a:-b $ c"),
        ("$$", "$"), ("$${A}", "${A}"), ("$$${A}", "$one"), ("$A costs 5$", "$A costs 5$"),
    ],
)  # fmt: skip
def test_references_are_replaced(text: str, result: str) -> None:
    assert interpolate(text, {"A": "one", "B": "two", "EMPTY": ""}) == result


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(InterpolationError, match=r"NODE_KEY is not set .*\$\{NODE_KEY:-default\}"):
        interpolate("x${NODE_KEY}", {})


@each_case("text", ["${", "${A", "${}", "${1A}", "${A B}", "${A:-${B}}", "${A-x}"])
def test_a_reference_must_be_well_formed(text: str) -> None:
    with pytest.raises(InterpolationError, match="well formed"):
        interpolate(text, {"A": "1", "B": "2"})


@given(st.text())
def test_references_in_a_variable_s_value_stay(value: str) -> None:
    assert interpolate("${A}", {"A": value}) == value


@given(st.text(), st.dictionaries(NAMES, st.text()))
def test_an_escaped_text_is_restored(text: str, env: dict[str, str]) -> None:
    assert interpolate(text.replace("$", "$$"), env) == text


@given(st.text(alphabet="$${}:-A b"), st.dictionaries(st.sampled_from("AB"), st.text()))
def test_any_text_is_replaced_or_refused(text: str, env: dict[str, str]) -> None:
    with contextlib.suppress(InterpolationError):
        assert isinstance(interpolate(text, env), str)


@each_case(
    ("text", "whole"),
    [("${A}", True), ("${A:-1}", True), ("${A}${B}", False), (" ${A}", False), ("$$", False)],
)
def test_a_whole_reference_is_recognised(text: str, whole: bool) -> None:
    assert is_variable_reference(text) is whole
