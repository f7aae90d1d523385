"""The errors of the contract."""

from __future__ import annotations

import pytest

from gateway import errors
from gateway.errors import GatewayError

ALL: list[tuple[GatewayError, int, str]] = [
    (errors.invalid_json("x"), 400, "invalid_json"),
    (errors.invalid_request("x", "n"), 400, "invalid_request"),
    (errors.context_length_exceeded(9, 8), 400, "context_length_exceeded"),
    (errors.invalid_api_key(), 401, "invalid_api_key"),
    (errors.model_not_allowed("m"), 403, "model_not_allowed"),
    (errors.model_not_found("m", []), 404, "model_not_found"),
    (errors.not_found("/x"), 404, "not_found"),
    (errors.queue_full("x", 3.0), 429, "queue_full"),
    (errors.node_failed("x"), 502, "node_failed"),
    (errors.no_node("x", 3.0), 503, "no_node"),
    (errors.queue_timeout("x", 3.0), 503, "queue_timeout"),
    (errors.starting("x"), 503, "starting"),
    (errors.shutting_down(), 503, "shutting_down"),
    (errors.node_timeout("x"), 504, "node_timeout"),
]


def test_each_error_has_its_status_and_code() -> None:
    assert [(e.status, e.code) for e, _, _ in ALL] == [(status, code) for _, status, code in ALL]
    assert [code for error, _, code in ALL if not error.message] == []


def test_temporary_errors_have_a_retry_after() -> None:
    result = {code for error, _, code in ALL if error.retry_after is not None}
    assert result == {code for _, status, code in ALL if status in {429, 503}}


def test_errors_that_official_clients_must_not_retry_say_so() -> None:
    never = {"node_failed", "queue_timeout", "node_timeout", "invalid_api_key"}
    assert {code for error, _, code in ALL if not error.retryable} == never


def test_a_long_retry_after_is_not_retryable() -> None:
    assert errors.queue_full("x", 60.0).retryable
    assert not errors.queue_full("x", 61.0).retryable
    assert not errors.no_node("x", 600.0).retryable


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.invalid_api_key(), "authentication_error"),
        (errors.model_not_allowed("m"), "permission_error"),
        (errors.model_not_found("m", []), "invalid_request_error"),
        (errors.queue_full("x", 1.0), "rate_limit_error"),
        (GatewayError(429, "insufficient_quota", "x"), "insufficient_quota"),
        (errors.node_failed("x"), "server_error"),
    ],
)
def test_the_type_is_openais_for_the_status(error: GatewayError, kind: str) -> None:
    assert error.type == kind


def test_a_context_overflow_contains_the_known_sizes() -> None:
    assert errors.context_length_exceeded(9, 8).details == {"n_prompt_tokens": 9, "n_ctx": 8}
    assert errors.context_length_exceeded(None, 8).details == {"n_ctx": 8}
    assert errors.context_length_exceeded(None, None).details == {}
    with_answer = errors.context_length_exceeded(31745, 32768, answer_tokens=1024)
    assert with_answer.details == {"n_prompt_tokens": 31745, "n_ctx": 32768}
    assert "prompt is too long: 31745 tokens > 31744 maximum" in with_answer.message
    assert "(31745 tokens and 1024 for the answer) exceeds the available" in with_answer.message
    too_much = errors.context_length_exceeded(30, 4096, answer_tokens=5000)
    assert (too_much.code, too_much.param) == ("context_length_exceeded", "max_tokens")
    assert too_much.details == {"n_prompt_tokens": 30, "n_ctx": 4096}
    assert too_much.message.startswith("'max_tokens' is too large: 5000 tokens. The request (30 ")
    assert "prompt is too long" not in too_much.message


@pytest.mark.parametrize(
    ("tokens", "context", "words"),
    [
        (4002, 1024, "prompt is too long: 4002 tokens > 1024 maximum"),
        (1024, 1024, "prompt is too long: 1024 tokens > 1023 maximum"),
        (None, 1024, "prompt is too long: 1025 tokens > 1024 maximum"),
        (4002, None, "prompt is too long: 4002 tokens > "),
        (None, None, "prompt is too long: "),
    ],
)
def test_a_context_overflow_has_the_wording_that_clients_look_for(
    tokens: int | None, context: int | None, words: str
) -> None:
    message = errors.context_length_exceeded(tokens, context).message
    assert words in message
    assert "exceeds the available context size" in message
    assert "exceeds the context window" in message
    assert "This model's maximum context length is" in message


def test_an_unknown_model_names_some_that_are_known() -> None:
    names = [f"m{i}" for i in range(20)]
    message = errors.model_not_found("x", names).message
    assert "'m0'" in message
    assert "'m19'" not in message
    assert message.endswith("...")
