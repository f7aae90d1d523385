from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.json_values import InvalidJson, check_object, parse_json, parse_object
from tests.each_case import each_case

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
TOO_DEEP = b"[" * 100_000


@given(VALUES)
def test_every_value_is_read_as_it_was_written(value: Any) -> None:
    data = msgspec.json.encode(value)
    assert parse_json(data) == value
    if isinstance(value, dict):
        check_object(data)
        assert parse_object(data) == value


@each_case("data", [b"", b"{", b"nul", b'{"a": \xff}', b'"\xff"', TOO_DEEP])
@each_case("parse", [parse_json, parse_object, check_object])
def test_what_is_no_json_is_one_kind_of_error(parse: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(InvalidJson):
        parse(data)


@each_case("data", [b"[]", b"null", b'"text"', b"1"])
def test_another_type_is_no_object(data: bytes) -> None:
    for parse in (parse_object, check_object):
        with pytest.raises(InvalidJson):
            parse(data)
