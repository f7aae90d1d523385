"""Where no sound continuation is possible, and how long one may become."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.proxy.resume import plan
from gateway.proxy.resume.plan import is_greedy, unresumable_reason
from gateway.proxy.resume.transcript import Transcript

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
    assert unresumable_reason(CHAT | more, Transcript()) is None
    assert unresumable_reason({"prompt": "x"} | more, Transcript()) is None


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
    assert unresumable_reason(CHAT | more, Transcript())


def test_what_begins_in_the_middle_of_a_message_or_of_ids_may_not() -> None:
    assert unresumable_reason({"messages": [{"role": "assistant", "content": "x"}]}, Transcript())
    assert unresumable_reason({"prompt": [1, 2]}, Transcript())
    assert unresumable_reason({"prompt": [1, 2]}, Transcript(token_ids=[3])) is None
    assert (
        unresumable_reason(CHAT, Transcript(unresumable="a tool call has begun"))
        == "a tool call has begun"
    )


@pytest.mark.parametrize(
    "limit",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking_budget_tokens": 0},
        {"reasoning_budget_tokens": 20},
    ],
)
def test_a_thought_of_limited_length_may_not_but_what_it_led_to_may(limit: dict[str, Any]) -> None:
    assert unresumable_reason(CHAT | limit, Transcript(reasoning_pieces=["so"]))
    assert (
        unresumable_reason(CHAT | limit, Transcript(reasoning_pieces=["so"], content_pieces=["a"]))
        is None
    )
    assert unresumable_reason(CHAT | limit, Transcript()) is None


@pytest.mark.parametrize(
    "body", [{"thinking": {"type": "adaptive"}}, {"thinking_budget_tokens": -1}]
)
def test_a_thought_as_long_as_it_likes_may(body: dict[str, Any]) -> None:
    assert unresumable_reason(CHAT | body, Transcript(reasoning_pieces=["so"])) is None


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
    assert plan.remaining_tokens(body, 3) == 5
    assert plan.remaining_tokens(body, 30) == 0
    assert plan.remaining_tokens(CHAT, 3) is None
    assert plan.remaining_tokens(CHAT | {"n_predict": -1}, 3) is None
    asked = plan.chat_body(body, " so far ", 5)
    assert (asked["max_tokens"], asked["max_completion_tokens"]) == (5, 5)
    assert asked["messages"][-1] == {"role": "assistant", "content": " so far "}
    assert plan.chat_body(body, "", 5)["messages"] == CHAT["messages"]
    assert plan.completion_body({"prompt": "x", "max_tokens": 9}, " y", 4) == {
        "prompt": "x y",
        "max_tokens": 4,
    }


def test_a_chat_becomes_a_completion_of_its_rendered_prompt() -> None:
    body = CHAT | {"max_tokens": 9, "stop": "end", "temperature": 0, "stream_options": {}}
    asked = plan.native_body(body, [1, 2], 4)
    assert asked == {
        "prompt": [1, 2], "n_predict": 4, "stop": ["end"], "temperature": 0, "stream": True
    }  # fmt: skip
