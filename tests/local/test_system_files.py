from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gateway.local.topology import (
    format_kernel_list,
    parse_kernel_list,
    parse_kernel_size,
    read_kernel_list,
    read_number,
)
from tests.each_case import each_case


@each_case(
    ("text", "numbers"), [("0\n", {0}), ("0-3,8\n", {0, 1, 2, 3, 8}), ("\n", set()), ("2-2", {2})]
)
def test_kernel_lists_are_read(text: str, numbers: set[int]) -> None:
    assert parse_kernel_list(text) == numbers


def test_consecutive_numbers_are_formatted_as_a_range_and_a_missing_file_is_empty(
    tmp_path: Path,
) -> None:
    assert format_kernel_list({0, 1, 2, 5, 7, 8}) == "0-2,5,7-8"
    assert read_number(tmp_path / "none") is None
    assert read_kernel_list(tmp_path / "none") is None


@given(st.sets(st.integers(0, 512)))
def test_a_list_is_read_back_as_it_was_written(numbers: set[int]) -> None:
    assert parse_kernel_list(format_kernel_list(numbers)) == numbers


@each_case(
    ("text", "size"),
    [("32K\n", 32768), ("1M", 1 << 20), ("4096", 4096), ("", 0), ("none", 0), ("K", 0)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_kernel_size(text) == size
