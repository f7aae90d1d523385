"""Limits as the settings file has them: what they mean, and what is refused with its place."""

from __future__ import annotations

import pytest

from gateway.config.keys import LARGEST_BUDGET, Budget, LimitSpec, parse_budget
from tests.config.conftest import LoadSettings, Problems
from tests.each_case import each_case

HASH = "0123456789abcdef" * 4

PLACES = {
    "keys[0].limits": f"keys:\n- id: alice\n  sha256: {HASH}\n  limits: {{LIMIT}}\n",
    "keys[0].user_limits": (
        f"keys:\n- id: alice\n  sha256: {HASH}\n  trust_user_headers: true\n"
        "  user_limits: {LIMIT}\n"
    ),
    "groups.team.limits": "groups:\n  team:\n\n    limits: {LIMIT}\n",
    "limits.total": "limits:\n\n\n  total: {LIMIT}\n",
}
"""Where limits stand, each in the fourth line of a file at the latest."""


@each_case("place", PLACES)
@each_case(
    "written",
    [
        "rpm: 0", "rpm: 1.5", "rpm: true", "tokens_per_day: -100", "concurrency: 0",
        "budget: 0/month", "budget: 20", "budget: 20/week", "budget: .nan/day", "max_class: best",
    ],
)  # fmt: skip
def test_a_limit_of_nothing_or_less_is_refused_with_its_line(
    place: str, written: str, gateway_problems: Problems
) -> None:
    text = PLACES[place].replace("LIMIT", written)
    (problem,) = gateway_problems(text)
    assert problem.key == f"{place}.{written.partition(':')[0]}"
    assert problem.line == text[: text.index(written)].count("\n") + 1
    assert problem.message


def test_two_keys_of_one_name_are_refused(gateway_problems: Problems) -> None:
    text = (
        f"keys:\n- {{id: a, name: alice, sha256: {HASH}}}\n- {{id: b, name: alice, sha256: {HASH}}}"
    )
    problems = gateway_problems(text)
    assert any("alice" in one.message for one in problems)


@each_case(
    ("written", "budget"),
    [
        ("20/month", Budget(20.0, "month")),
        (" .5 / DAY ", Budget(0.5, "day")),
        ("0.00002/day", Budget(0.00002, "day")),
        ("0.000000001/month", Budget(1e-9, "month")),
        (f"{LARGEST_BUDGET:.0f}/day", Budget(LARGEST_BUDGET, "day")),
    ],
)
def test_a_budget_is_what_was_written(
    written: str, budget: Budget, load_gateway: LoadSettings
) -> None:
    assert parse_budget(written) == budget
    settings = load_gateway(f"limits: {{total: {{budget: '{written}'}}}}")
    assert settings.limits.total is not None
    assert settings.limits.total.budget_limit == budget
    # It is kept as text, and read again from there.
    text = settings.limits.total.budget
    assert LimitSpec.model_validate({"budget": text}).budget == text


@each_case("written", ["0/day", "0.0000000001/day", "1000000001/day", "1e3/day", "/day", "5/ year"])
def test_another_budget_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"amount"):
        parse_budget(written)
