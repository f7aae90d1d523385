"""What the next node is asked: the client's own request, with the answer so far put behind it."""

from __future__ import annotations

from gateway.relay.values import Value

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")


def tokens_left(body: Value, said: int) -> int | None:
    """Tokens that may still be written; None: no limit was asked for."""
    limits = [
        value
        for name in LENGTHS
        if isinstance(value := body.get(name), int) and not isinstance(value, bool) and value >= 0
    ]
    return max(0, min(limits) - said) if limits else None


def chat(body: Value, kept: str, left: int | None) -> Value:
    """A chat (or Anthropic's messages) that goes on with the assistant's last message."""
    messages = [*body["messages"]]
    if kept:
        # Text that ends in white space must reach the template as it is.
        messages.append({"role": "assistant", "content": kept})
    return _limited(body | {"messages": messages}, left)


def completion(body: Value, kept: str, left: int | None) -> Value:
    """A completion whose prompt, one text, has the answer's text so far behind it."""
    return _limited(body | {"prompt": f"{body['prompt']}{kept}"}, left)


def native(body: Value, prompt: str | list[int], left: int | None) -> Value:
    """llama.cpp's own completion of a prompt that the template has made already."""
    asked = {name: value for name, value in body.items() if name not in _OF_A_CHAT}
    stop = body.get("stop", body.get("stop_sequences"))
    if stop is not None:
        # It takes a list alone, and passes over a text in silence.
        asked["stop"] = [stop] if isinstance(stop, str) else stop
    if left is not None:
        asked["n_predict"] = left
    return asked | {"prompt": prompt, "stream": True}


_OF_A_CHAT = frozenset(
    {"messages", "system", "stop_sequences", "stream_options", "tools", "tool_choice",
     "response_format", "logprobs", "top_logprobs", "metadata", "thinking", *LENGTHS}
)  # fmt: skip


def _limited(body: Value, left: int | None) -> Value:
    if left is None:
        return body
    named = [name for name in LENGTHS if body.get(name) is not None]
    return body | dict.fromkeys(named, left)
