"""The errors of the contract."""

from __future__ import annotations

from gateway import errors
from gateway.errors import GatewayError
from tests.each_case import each_case


@each_case(
    ("error", "status", "code", "kind", "retryable"),
    [
        (errors.invalid_json("x"), 400, "invalid_json", "invalid_request_error", True),
        (errors.invalid_request("x", "n"), 400, "invalid_request", "invalid_request_error", True),
        (errors.context_length_exceeded(9, 8), 400, "context_length_exceeded",
         "invalid_request_error", True),
        (errors.invalid_api_key(), 401, "invalid_api_key", "authentication_error", False),
        (errors.model_not_allowed("m"), 403, "model_not_allowed", "permission_error", True),
        (errors.model_not_found("m", []), 404, "model_not_found", "invalid_request_error", True),
        (errors.not_found("/x"), 404, "not_found", "invalid_request_error", True),
        (errors.queue_full("x", 3.0), 429, "queue_full", "rate_limit_error", True),
        (errors.queue_full("x", 60.0), 429, "queue_full", "rate_limit_error", True),
        (errors.queue_full("x", 61.0), 429, "queue_full", "rate_limit_error", False),
        (errors.node_failed("x"), 502, "node_failed", "server_error", False),
        (errors.no_node("x", 3.0), 503, "no_node", "server_error", True),
        (errors.no_node("x", 600.0), 503, "no_node", "server_error", False),
        (errors.queue_timeout("x", 3.0), 503, "queue_timeout", "server_error", False),
        (errors.starting("x"), 503, "starting", "server_error", True),
        (errors.shutting_down(), 503, "shutting_down", "server_error", True),
        (errors.node_timeout("x"), 504, "node_timeout", "server_error", False),
    ],
)  # fmt: skip
def test_an_error_has_its_status_code_and_type_and_says_whether_clients_may_retry(
    error: GatewayError, status: int, code: str, kind: str, retryable: bool
) -> None:
    assert (error.status, error.code, error.type) == (status, code, kind)
    assert error.message
    assert error.retryable is retryable
    assert (error.retry_after is not None) is (status in {429, 503})
    assert GatewayError(429, "insufficient_quota", "x").type == "insufficient_quota"


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


@each_case(
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
