from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.fields import format_duration, format_size, parse_duration, parse_size
from gateway.config.settings import literal_prefix, pattern_problem
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
    ("written", "size"),
    [
        (65536, 65536), (1024.0, 1024), ("65536", 65536), ("64MiB", 64 << 20), ("1 GiB", 1 << 30),
        ("500kB", 500_000), ("500 kb", 500_000), ("1.5KiB", 1536), ("10B", 10),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(written: object, size: int) -> None:
    assert parse_size(written) == size


@each_case("written", ["", "s", "30 parsecs", "5M", "-5s", "1h-30m", "nan", "1" * 50, True, None])
def test_other_values_are_no_durations(written: object) -> None:
    with pytest.raises(ValueError):
        parse_duration(written)


@each_case("written", ["", "64M", "-1KiB", "0.0001kB", 1.5, True, None, "1e3", float("inf")])
def test_other_values_are_no_sizes(written: object) -> None:
    with pytest.raises(ValueError):
        parse_size(written)


@given(st.integers(0, 1 << 50), st.integers(0, 10**6))
def test_what_is_shown_reads_the_same(size: int, thousandths: int) -> None:
    assert parse_size(format_size(size)) == size
    seconds = thousandths / 1000
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-5)


PIECES = ["time: ", "a", ".", "[a-c]", r"\d", r"\.", "^", "(", "(?:", ")", "|", "*", "{2}", "?"]


@each_case(
    ("pattern", "prefix"),
    [
        ("time: .*", "time: "), (r"time\.\x41\u00e9\101\n\-[0-9]", "time.A\u00e9A\n-"),
        ("now[.] [ab]", "now. "), ("time{}", "time{}"), ("(?:time): ", "time: "),
        ("time(: )", "time"), ("time: a|time: b", "time: "), ("time: (?#why)[a]", "time: a"),
    ],
)  # fmt: skip
def test_the_plain_beginning_of_a_pattern_is_found(pattern: str, prefix: str) -> None:
    assert pattern_problem(pattern) is None
    assert literal_prefix(pattern) == prefix


@each_case(
    ("pattern", "problem"),
    [
        ("time: (ab|ac|b)*", "repeats something"), ("time: ([^a]|b)*", "repeats something"),
        ("time: (a?){3}", "repeats something"), ("time: a*+", "looks"),
        ("time: (?>a)", "looks"), (r"(?P<a>time): (?P=a)", "looks"),
        ("time: (a|bc){2}", "repeats something"), ("time: " + "(a|bc)" * 20, "too many ways"),
        (r"time: (\b){4000000000}", "repeats something empty"),
        ("time: " + "(" * 40 + "$" + "){2}" * 40, "repeats something empty"),
        ("time: (a{0}){2}", "repeats something empty"),
    ],
)  # fmt: skip
def test_other_parts_are_refused(pattern: str, problem: str) -> None:
    found = pattern_problem(pattern)
    assert found is not None
    assert problem in found


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.data())
def test_every_match_begins_with_the_plain_beginning(pattern: str, data: st.DataObject) -> None:
    if pattern_problem(pattern) is None:
        match = data.draw(st.from_regex(pattern, fullmatch=True))
        assert match.startswith(literal_prefix(pattern))
