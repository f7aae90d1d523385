"""Where a stream can't be carried on soundly: it then ends with its error event."""

from __future__ import annotations

from gateway.relay.continuation.said import Said
from gateway.relay.values import Value

_GRAMMAR = ("grammar", "json_schema")
"""Fields that bind the output to a grammar, whose state no other node knows."""

_SEVERAL = ("n", "n_cmpl", "best_of")

_MORE_THAN_TEXT = ("logprobs", "top_logprobs", "n_probs", "echo", "suffix", "audio")
"""Fields that ask for more than the text: what belongs to tokens of the first node is lost."""


def why_not(body: Value, said: Said) -> str | None:
    """Why no sound continuation of this answer to that body is possible; None: it is.

    The words are for the log and the client; they hold nothing of either's text.
    """
    if said.unsound is not None:
        return said.unsound
    if any(_more_than_one(body.get(name)) for name in _SEVERAL):
        return "the request asks for several answers"
    if any(body.get(name) for name in _MORE_THAN_TEXT):
        return "the request asks for more than text"
    if any(body.get(name) for name in _GRAMMAR):
        return "the output is bound to a grammar"
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") not in {None, "text"}:
        return "the output is bound to a grammar"
    config = body.get("output_config")
    if body.get("output_format") or (isinstance(config, dict) and config.get("format")):
        return "the output is bound to a grammar"
    if body.get("tools") and _must_call(body.get("tool_choice")):
        return "the output is bound to a tool call"
    if said.thought and not said.text and _has_budget(body):
        return "the length of its reasoning is limited"
    prompt = body.get("prompt")
    if "messages" not in body and not isinstance(prompt, str) and not said.ids:
        return "the prompt is not one text"
    messages = body.get("messages")
    if isinstance(messages, list) and messages and _is_assistants(messages[-1]):
        return "the request itself continues a message"
    return None


def is_greedy(body: Value) -> bool:
    """Whether the same prompt gives the same text: the most likely token is always taken."""
    temperature, top_k = body.get("temperature"), body.get("top_k")
    return (_is_number(temperature) and not temperature > 0) or (_is_number(top_k) and top_k == 1)  # type: ignore[operator]


def has_stops(body: Value) -> bool:
    """Whether the answer ends at certain words."""
    return bool(body.get("stop") or body.get("stop_sequences"))


def _has_budget(body: Value) -> bool:
    """Whether the server ends reasoning at a length, which no completion of a prompt does."""
    thinking = body.get("thinking")
    limits = [body.get("thinking_budget_tokens"), body.get("reasoning_budget_tokens")]
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        limits.append(thinking.get("budget_tokens"))
    return any(_is_number(limit) and limit >= 0 for limit in limits)  # type: ignore[operator]


def _more_than_one(value: object) -> bool:
    return _is_number(value) and value > 1  # type: ignore[operator]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _must_call(choice: object) -> bool:
    if isinstance(choice, dict):
        return choice.get("type") not in {"auto", "none"}
    return choice not in {None, "auto", "none"}


def _is_assistants(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"
