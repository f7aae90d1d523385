"""Where no sound continuation is possible, and how long one may become."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.relay.continuation import bodies
from gateway.relay.continuation.bounds import is_greedy, why_not
from gateway.relay.continuation.said import Said

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 1, "logprobs": False, "top_logprobs": 0, "grammar": "", "stop": ["x"]},
        {"response_format": {"type": "text"}},
        {"output_config": {"effort": "low"}},
        {"tools": [{}], "tool_choice": "auto"},
        {"tools": [{}], "tool_choice": {"type": "auto"}},
    ],
)
def test_what_may_go_on(more: dict[str, Any]) -> None:
    assert why_not(CHAT | more, Said()) is None
    assert why_not({"prompt": "x"} | more, Said()) is None


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"n_cmpl": 2},
        {"best_of": 3},
        {"logprobs": True},
        {"n_probs": 1},
        {"echo": True},
        {"grammar": "root ::= x"},
        {"json_schema": {"type": "object"}},
        {"response_format": {"type": "json_schema"}},
        {"output_format": {"type": "json_schema"}},
        {"output_config": {"format": {"type": "json_schema"}}},
        {"tools": [{}], "tool_choice": "required"},
        {"tools": [{}], "tool_choice": {"type": "function"}},
    ],
)
def test_what_may_not(more: dict[str, Any]) -> None:
    assert why_not(CHAT | more, Said())


def test_what_begins_in_the_middle_of_a_message_or_of_ids_may_not() -> None:
    assert why_not({"messages": [{"role": "assistant", "content": "x"}]}, Said())
    assert why_not({"prompt": [1, 2]}, Said())
    assert why_not({"prompt": [1, 2]}, Said(ids=[3])) is None
    assert why_not(CHAT, Said(unsound="a tool call has begun")) == "a tool call has begun"


@pytest.mark.parametrize(
    "limit",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking_budget_tokens": 0},
        {"reasoning_budget_tokens": 20},
    ],
)
def test_a_thought_of_limited_length_may_not_but_what_it_led_to_may(limit: dict[str, Any]) -> None:
    assert why_not(CHAT | limit, Said(reasoning=["so"]))
    assert why_not(CHAT | limit, Said(reasoning=["so"], content=["a"])) is None
    assert why_not(CHAT | limit, Said()) is None


@pytest.mark.parametrize(
    "body", [{"thinking": {"type": "adaptive"}}, {"thinking_budget_tokens": -1}]
)
def test_a_thought_as_long_as_it_likes_may(body: dict[str, Any]) -> None:
    assert why_not(CHAT | body, Said(reasoning=["so"])) is None


@pytest.mark.parametrize(
    ("body", "greedy"),
    [
        ({}, False),
        ({"temperature": 0}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": -1}, True),
        ({"temperature": 0.7}, False),
        ({"temperature": 0.7, "top_k": 1}, True),
        ({"temperature": False}, False),
        ({"temperature": "0"}, False),
    ],
)
def test_greedy_is_what_always_takes_the_likeliest(body: dict[str, Any], *, greedy: bool) -> None:
    assert is_greedy(body) is greedy


def test_the_length_that_is_left_is_asked_for_by_the_clients_own_names() -> None:
    body = CHAT | {"max_tokens": 10, "max_completion_tokens": 8}
    assert bodies.tokens_left(body, 3) == 5
    assert bodies.tokens_left(body, 30) == 0
    assert bodies.tokens_left(CHAT, 3) is None
    assert bodies.tokens_left(CHAT | {"n_predict": -1}, 3) is None
    asked = bodies.chat(body, " so far ", 5)
    assert (asked["max_tokens"], asked["max_completion_tokens"]) == (5, 5)
    assert asked["messages"][-1] == {"role": "assistant", "content": " so far "}
    assert bodies.chat(body, "", 5)["messages"] == CHAT["messages"]
    assert bodies.completion({"prompt": "x", "max_tokens": 9}, " y", 4) == {
        "prompt": "x y",
        "max_tokens": 4,
    }


def test_a_chat_becomes_a_completion_of_its_rendered_prompt() -> None:
    body = CHAT | {"max_tokens": 9, "stop": "end", "temperature": 0, "stream_options": {}}
    asked = bodies.native(body, [1, 2], 4)
    assert asked == {
        "prompt": [1, 2], "n_predict": 4, "stop": ["end"], "temperature": 0, "stream": True
    }  # fmt: skip
