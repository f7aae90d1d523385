"""Which responses can't be resumed, how long a continuation may be, and how it ends."""

from __future__ import annotations

from typing import Any

from gateway.api.base import Api
from gateway.api.chat import CHAT
from gateway.api.completions import COMPLETIONS
from gateway.api.messages import MESSAGES
from gateway.api.native import NATIVE, native_body
from gateway.api.resuming import remaining_tokens
from gateway.api.transcript import Transcript
from gateway.forward.resume import is_greedy
from tests.each_case import each_case

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
PROMPT: dict[str, Any] = {"prompt": "x"}
BODIES: list[tuple[Api, dict[str, Any]]] = [
    (CHAT, HELLO),
    (MESSAGES, HELLO),
    (COMPLETIONS, PROMPT),
    (NATIVE, PROMPT),
]


@each_case(("api", "body"), BODIES)
@each_case(
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
def test_text_can_be_resumed(api: Api, body: dict[str, Any], more: dict[str, Any]) -> None:
    assert api.transcript_reader is not None
    assert api.event_rewriter is not None
    assert api.unresumable_reason(body | more, Transcript()) is None


@each_case(("api", "body"), BODIES)
@each_case(
    "more",
    [
        {"n": 2}, {"n_cmpl": 2}, {"best_of": 3}, {"logprobs": True}, {"n_probs": 1}, {"echo": True},
        {"grammar": "root ::= x"}, {"json_schema": {"type": "object"}},
        {"response_format": {"type": "json_schema"}}, {"tools": [{}], "tool_choice": "required"},
        {"tools": [{}], "tool_choice": {"type": "function"}},
    ],
)  # fmt: skip
def test_only_free_text_is_resumed(api: Api, body: dict[str, Any], more: dict[str, Any]) -> None:
    assert api.unresumable_reason(body | more, Transcript())


IDS: dict[str, Any] = {"prompt": [1, 2]}
CONTINUED: dict[str, Any] = {"messages": [{"role": "assistant", "content": "x"}]}
SCHEMA = {"type": "json_schema"}


@each_case(
    ("api", "body", "transcript", "reason"),
    [
        (MESSAGES, HELLO | {"output_format": SCHEMA}, Transcript(), "grammar"),
        (MESSAGES, HELLO | {"output_config": {"format": SCHEMA}}, Transcript(), "grammar"),
        (CHAT, CONTINUED, Transcript(), "message"),
        (MESSAGES, CONTINUED, Transcript(), "message"),
        (COMPLETIONS, IDS, Transcript(), "not one text"),
        (NATIVE, IDS, Transcript(), "not one text"),
        (COMPLETIONS, IDS, Transcript(token_ids=[3]), None),
        (NATIVE, IDS, Transcript(token_ids=[3]), None),
        (CHAT, HELLO, Transcript(unresumable="a tool call has begun"), "a tool call has begun"),
    ],
)
def test_a_schema_a_begun_message_token_ids_and_what_was_sent_may_forbid_it(
    api: Api, body: dict[str, Any], transcript: Transcript, reason: str | None
) -> None:
    found = api.unresumable_reason(body, transcript)
    assert found is None if reason is None else reason in str(found)


def test_token_ids_are_asked_for_where_they_can_be_continued_from() -> None:
    assert CHAT.can_resume_exactly(HELLO)
    assert COMPLETIONS.can_resume_exactly(PROMPT)
    assert not CHAT.can_resume_exactly(HELLO | {"tools": [{}]})
    assert not CHAT.can_resume_exactly(HELLO | {"n": 2})
    # One reports them unasked, the other never.
    assert not NATIVE.can_resume_exactly(PROMPT)
    assert not MESSAGES.can_resume_exactly(HELLO)


LIMITS: list[tuple[Api, dict[str, Any]]] = [
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    (CHAT, {"thinking_budget_tokens": 0}),
    (CHAT, {"reasoning_budget_tokens": 20}),
    (MESSAGES, {"reasoning_budget_tokens": 20}),
]


@each_case(("api", "limit"), LIMITS)
def test_limited_reasoning_is_resumed_when_it_is_over(api: Api, limit: dict[str, Any]) -> None:
    begun = Transcript(reasoning_pieces=["so"])
    over = Transcript(reasoning_pieces=["so"], content_pieces=["a"])
    assert api.unresumable_reason(HELLO | limit, begun)
    for other in (over, Transcript()):
        assert api.unresumable_reason(HELLO | limit, other) is None
    for unlimited in ({"thinking": {"type": "adaptive"}}, {"thinking_budget_tokens": -1}):
        assert api.unresumable_reason(HELLO | unlimited, begun) is None


@each_case("body", [{"temperature": 0}, {"temperature": -1}, {"temperature": 0.7, "top_k": 1}])
def test_greedy_sampling_always_takes_the_likeliest_token(body: dict[str, Any]) -> None:
    assert is_greedy(body)
    for other in ({}, {"temperature": 0.7}, {"temperature": False}, {"temperature": "0"}):
        assert not is_greedy(other)


def test_the_remaining_length_is_asked_for_by_the_clients_own_names() -> None:
    body = HELLO | {"max_tokens": 8, "max_completion_tokens": 8}
    assert remaining_tokens(body, 3) == 5
    assert remaining_tokens(body, 30) == 0
    assert remaining_tokens(HELLO, 3) is None
    assert remaining_tokens(HELLO | {"n_predict": -1}, 3) is None
    asked = CHAT.continued_body(body, " so far ", 5)
    assert (asked["max_tokens"], asked["max_completion_tokens"]) == (5, 5)
    assert asked["messages"][-1] == {"role": "assistant", "content": " so far "}
    assert CHAT.continued_body(body, "", 5)["messages"] == HELLO["messages"]
    assert COMPLETIONS.continued_body({"prompt": "x", "max_tokens": 9}, " y", 4) == {
        "prompt": "x y",
        "max_tokens": 4,
    }


def test_a_chat_becomes_a_completion_of_its_rendered_prompt() -> None:
    body = HELLO | {"max_tokens": 9, "stop": "end", "temperature": 0, "stream_options": {}}
    asked = native_body(body, [1, 2], 4)
    assert asked == {
        "prompt": [1, 2], "n_predict": 4, "stop": ["end"], "temperature": 0, "stream": True
    }  # fmt: skip
