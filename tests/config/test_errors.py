from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gateway.config import ConfigError, Problem

FILE = Path("config/nodes.yaml")


def test_a_problem_is_one_line() -> None:
    problem = Problem(FILE, 3, "nodes[0].url", "is missing", "add it")
    assert str(problem) == "config/nodes.yaml:3: nodes[0].url: is missing (add it)"


def test_unknown_parts_are_left_out() -> None:
    assert str(Problem(FILE, 0, "", "can't be read")) == "config/nodes.yaml: can't be read"
    assert str(Problem(FILE, 3, "", "bad", column=7)) == "config/nodes.yaml:3:7: bad"


@given(st.text(max_size=1000))
def test_nothing_in_a_file_can_break_the_line(text: str) -> None:
    shown = str(Problem(FILE, 1, text, "m", text))
    assert shown.isprintable()
    assert len(shown.splitlines()) == 1


def test_a_long_key_is_cut() -> None:
    assert len(str(Problem(FILE, 1, "k" * 10_000, "m"))) < 500


def test_an_error_lists_its_problems_and_counts_the_rest() -> None:
    error = ConfigError(Problem(FILE, line, "k", "bad") for line in range(1, 61))
    lines = str(error).splitlines()
    assert len(error.problems) == 60
    assert lines[0] == "config/nodes.yaml:1: k: bad"
    assert lines[50:] == ["... and 10 more"]
