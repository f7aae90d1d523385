from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.fields import format_duration, format_size, parse_duration, parse_size
from tests.each_case import each_case


@each_case(
    ("written", "seconds"),
    [
        (30, 30.0), (0.5, 0.5), ("30", 30.0), (".5", 0.5), ("30s", 30.0), ("250ms", 0.25),
        ("5m", 300.0), ("1h30m", 5400.0), (" 1 h 30 m ", 5400.0), ("1.5h", 5400.0),
        ("2d", 172800.0),
    ],
)  # fmt: skip
def test_durations_are_read_as_people_write_them(written: object, seconds: float) -> None:
    assert parse_duration(written) == pytest.approx(seconds)


@each_case(
    "written",
    [
        *("", "s", "30 parsecs", "5M", "-5s", "1h-30m", "nan", "inf", "1" * 50, "٣s"),
        *(True, None, [], float("nan"), float("inf"), 10**400),
    ],
)
def test_other_values_are_no_durations(written: object) -> None:
    with pytest.raises(ValueError):
        parse_duration(written)


@each_case(
    ("written", "size"),
    [
        (65536, 65536), (1024.0, 1024), ("65536", 65536), ("64MiB", 64 << 20), ("1 GiB", 1 << 30),
        ("500kB", 500_000), ("500 kb", 500_000), ("1.5KiB", 1536), ("10B", 10),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(written: object, size: int) -> None:
    assert parse_size(written) == size


@each_case(
    "written", ["", "64M", "-1KiB", "0.0001kB", 1.5, True, None, "1e3", "lots", float("inf")]
)
def test_other_values_are_no_sizes(written: object) -> None:
    with pytest.raises(ValueError):
        parse_size(written)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_size_that_is_shown_reads_the_same(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(min_value=0, max_value=10**6).map(lambda thousandths: thousandths / 1000))
def test_a_duration_that_is_shown_reads_the_same(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-5)


@given(st.text() | st.integers() | st.floats() | st.booleans() | st.none())
def test_anything_is_a_finite_figure_or_a_value_error(written: object) -> None:
    for parse in (parse_duration, parse_size):
        try:
            figure = parse(written)
        except ValueError:
            continue
        assert isinstance(figure, (int, float))
        assert figure == figure  # noqa: PLR0124 - not NaN
