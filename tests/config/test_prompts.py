from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.config.settings import literal_prefix, pattern_problem
from tests.each_case import each_case

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
    "pattern",
    [
        "time: (a|[0-9]|-)*$", "time: (abc|abd)+", "time: (?i:utc)", "time: (?P<hour>[0-9]{2})",
        "time: []a]+[^]a]", "time: a{,3}?b{2,}", "time: " + "(" * 40 + "a" + "){2}" * 40,
    ],
)  # fmt: skip
def test_sets_groups_and_single_repeats_are_supported(pattern: str) -> None:
    assert pattern_problem(pattern) is None


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
