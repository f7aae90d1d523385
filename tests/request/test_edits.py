"""Bodies change in the fields that the contract names, and nowhere else."""

from __future__ import annotations

import json
from typing import Any

from gateway.api.tokens import BOUND_NAMES, settle_bound
from gateway.config.scheduling import ModelRule
from gateway.request.body import parse_body
from gateway.request.edits import apply_edit, apply_rules, lowest_bound, required_edit, with_model
from tests.each_case import each_case


def edited(
    body: bytes,
    *rules: ModelRule,
    max_tokens_fields: tuple[str, ...] = ("max_tokens", "max_completion_tokens"),
    max_tokens: int | None = None,
    n_probs: int = 64,
) -> bytes:
    after = apply_rules(body, rules)
    parsed = parse_body(after)
    most = lowest_bound(rules, max_tokens)
    edit = required_edit(parsed, n_probs, lambda: 4096)
    edit |= settle_bound(parsed, max_tokens_fields, most)[1]
    return apply_edit(after, edit) if edit else after


def result(body: dict[str, Any], *rules: ModelRule, **bounds: Any) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(edited(json.dumps(body).encode(), *rules, **bounds))
    return value


@each_case("field", ["id_slot", "lora"])
def test_slots_adapters_and_our_priorities_are_removed(field: str) -> None:
    for value in (0, None, {"id": 1}, "x"):
        assert result({"prompt": "a", field: value}) == {"prompt": "a"}
    assert json.loads(edited(b'{"prompt":"a","id\\u005fslot":1,"id_slot":2}')) == {"prompt": "a"}
    assert result({"priority": "batch"}) == {}
    assert result({"priority": 5}) == {"priority": 5}


@each_case("field", ["logprobs", "n_probs", "top_logprobs"])
def test_logprobs_are_bounded(field: str) -> None:
    for large in (65, 100_000, 100_000.5, 1e300, 1 << 70):
        assert result({field: large}) == {field: 64}
    switches = (True, False) if field == "logprobs" else ()
    for value in (*switches, None, 0, 5, 64, -1):
        assert result({field: value}) == {field: value}
    assert result({field: 5}, n_probs=0) == {field: 0}


@each_case("field", ["repeat_last_n", "dry_penalty_last_n"])
def test_windows_are_no_larger_than_a_context(field: str) -> None:
    for asked in (0, -1, 64, 1024, 4096):
        assert result({field: asked}) == {field: asked}
    for large in (4097, 2_000_000_000, 1 << 40, 1e300):
        assert result({field: large}) == {field: 4096}
    for asked in (-2, -(1 << 32) + 50_000_000):
        assert result({field: asked}) == {field: -1}


@each_case("field", ["max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"])
def test_max_tokens_is_lowered_under_any_of_its_names(field: str) -> None:
    for asked, sent in ((100, 100), (101, 100), (-1, 100), (-2, 100), (0, 0), (1e300, 100)):
        assert result({field: asked}, max_tokens_fields=(field,), max_tokens=100) == {field: sent}


def test_a_missing_max_tokens_becomes_the_limit() -> None:
    assert result({}, max_tokens=100) == {"max_tokens": 100}
    assert result({"max_tokens": None}, max_tokens=100) == {"max_tokens": 100}
    assert result({}, max_tokens_fields=("n_predict",), max_tokens=100) == {"n_predict": 100}
    assert result({}) == {}


def test_an_answer_without_a_bound_is_held_by_the_limits_of_its_caller() -> None:
    def held(left: float, **asked: int) -> dict[str, Any]:
        body = json.dumps(asked).encode()
        _, edit = settle_bound(parse_body(body), ("max_tokens",), None, left)
        changed: dict[str, Any] = json.loads(apply_edit(body, edit))
        return changed

    assert held(900) == {"max_tokens": 900}
    assert held(-5) == {"max_tokens": 1}
    assert held(100_000) == {}  # hosted endpoints refuse bounds above their models' own
    for name in BOUND_NAMES:
        assert held(100_000, **{name: -1}) == {"max_tokens": 100_000}
        assert held(900, **{name: 16_400}) == {"max_tokens": 16_400}  # refused when it is admitted


EXAMPLE = ModelRule(
    set={"temperature": 0.2}, default={"max_tokens": 512}, max_tokens=2048, strip=("logit_bias",)
)


@each_case(
    ("asked", "sent"),
    [
        ({}, {"max_tokens": 512}),
        ({"max_tokens": None}, {"max_tokens": 512}),
        ({"max_tokens": 9}, {"max_tokens": 9}),
        ({"max_tokens": 9000}, {"max_tokens": 2048}),
        ({"max_tokens": -1}, {"max_tokens": 2048}),
        ({"max_completion_tokens": 9}, {"max_completion_tokens": 9}),
        ({"temperature": 1.5, "logit_bias": [[1, 2]]}, {"max_tokens": 512}),
    ],
)
def test_the_contracts_example_holds(asked: dict[str, Any], sent: dict[str, Any]) -> None:
    assert result(asked, EXAMPLE) == {"temperature": 0.2, **sent}


def test_the_operators_limit_holds_for_rules_too() -> None:
    assert result({}, EXAMPLE, max_tokens=100)["max_tokens"] == 100
    for name in BOUND_NAMES:
        assert result({name: 7}, ModelRule(set={"max_tokens": 9})) == {"max_tokens": 9}
    loud = ModelRule(set={"max_tokens": 5000, "n_probs": 900, "id_slot": 1, "priority": "batch"})
    assert result({"max_tokens": 7}, loud, max_tokens=100) == {"max_tokens": 100, "n_probs": 64}


def test_rules_apply_in_the_order_of_their_aliases() -> None:
    alias = ModelRule(use=("b",), set={"top_k": 1}, default={"min_p": 0.1}, max_tokens=50)
    model = ModelRule(set={"top_k": 2}, default={"min_p": 0.2}, max_tokens=80)
    assert result({}, alias, model) == {"min_p": 0.1, "top_k": 2, "max_tokens": 50}


def test_a_models_name_is_replaced_in_its_place() -> None:
    assert with_model(b'{"a":1,"model":"x","b":[ 1 ]}', "y/z") == b'{"a":1,"model":"y/z","b":[ 1 ]}'
    assert with_model(b'{"a":1}', "y") == b'{"a":1,"model":"y"}'
