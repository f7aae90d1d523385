"""Limits as the settings file has them: what they mean, and what is refused with its place."""

from __future__ import annotations

from gateway.config.keys import (
    LARGEST_BUDGET,
    Budget,
    CachePolicy,
    CacheSpec,
    LimitSpec,
    cache_policy,
    has_labels,
    parse_budget,
)
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


def test_each_field_is_the_most_specific_ones() -> None:
    key = CacheSpec(hide=False, prompt_cache=False)
    group = CacheSpec(hide=True, isolate="group", nodes={"b": "2", "a": "1"})
    everybody = CacheSpec(isolate="key", nodes={"c": "3"}, prompt_cache=True)
    assert cache_policy((key, group, everybody), "alice", "team") == CachePolicy(
        hide=False, scope="group team", node_labels=(("a", "1"), ("b", "2")), prompt_cache=False
    )


@each_case(
    ("isolate", "group", "scope"),
    [
        ("group", "team", "group team"),
        ("group", None, "caller alice"),
        ("key", "team", "caller alice"),
        ("off", "team", ""),
    ],
)
def test_the_scope_is_a_group_or_a_caller(isolate: str, group: str | None, scope: str) -> None:
    spec = CacheSpec.model_validate({"isolate": isolate})
    assert cache_policy((spec,), "alice", group).scope == scope


def test_a_node_needs_all_labels() -> None:
    wanted = (("tenant", "a"), ("zone", "1"))
    assert has_labels({"tenant": "a", "zone": "1", "more": "x"}, wanted)
    assert not has_labels({"tenant": "a"}, wanted)
    assert not has_labels({"tenant": "a", "zone": "2"}, wanted)
    assert has_labels({}, ())
