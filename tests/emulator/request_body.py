"""Reads a request's body: prompts, lengths and options, checked as the server does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tests.emulator.language_model import count_tokens, detokenize, expected_text

ApiName = Literal["chat", "completions", "native", "messages", "responses"]
ASSISTANT = "<|assistant|>"
END = "<|eot|>\n"


class RefusedError(Exception):
    def __init__(self, status: int, kind: str, message: str, **extra: int) -> None:
        super().__init__(message)
        self.status = status
        self.value = {"error": {"code": status, "message": message, "type": kind, **extra}}


def bad_request(message: str) -> RefusedError:
    return RefusedError(400, "invalid_request_error", message)


@dataclass(slots=True, frozen=True)
class GenerationRequest:
    """One generation: each prompt takes a slot and gets one answer."""

    api: ApiName
    body: dict[str, Any]
    prompts: tuple[str, ...]
    max_tokens: int | None  # None: to the end of the model's answer
    stop: tuple[str, ...]

    def asks(self, name: str) -> bool:
        return self.body.get(name) is True

    @property
    def stream(self) -> bool:
        return self.asks("stream")

    @property
    def include_usage(self) -> bool:
        return (self.body.get("stream_options") or {}).get("include_usage") is True


def read_json(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"[json.exception.parse_error.101] parse error: {error}"
        raise bad_request(message) from None
    return value if isinstance(value, dict) else {}


def render_chat(messages: list[dict[str, Any]]) -> str:
    """Apply the chat template; a last message of the assistant is left open to be continued."""
    text = "".join(
        f"<|{m.get('role', 'user')}|>{_content(m.get('content'))}{END}" for m in messages
    )
    if messages and messages[-1].get("role") == "assistant":
        return text.removesuffix(END)
    return text + ASSISTANT


def open_answer_tokens(prompt: str) -> int:
    """Tokens of the assistant's message that the prompt leaves open."""
    _, marker, tail = prompt.rpartition(ASSISTANT)
    return count_tokens(tail) - 1 if marker and END not in tail else 0


def expected_chat_text(messages: list[dict[str, Any]], n: int) -> str:
    return expected_text(render_chat(messages), n)


def read_generation_request(api: ApiName, body: dict[str, Any], slots: int) -> GenerationRequest:
    prompts = _PROMPTS[api](body)
    copies = int(body.get("n") or 1)
    if api == "chat" and not 1 <= copies <= slots:
        raise bad_request(
            f"Field 'n': Value must be between 1 <= value <= {slots}, but got {copies}"
        )
    stop = body.get("stop") or body.get("stop_sequences") or ()
    # A real server ignores anything else.
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    limit = _max_tokens(api, body)
    return GenerationRequest(api, body, tuple(prompts) * copies, limit, tuple(stops))


def chat_prompt(body: dict[str, Any], key: str = "messages") -> str:
    messages = body.get(key)
    if messages is None:
        raise bad_request(f"'{key}' is required")
    if not isinstance(messages, list):
        raise bad_request(f"Expected '{key}' to be an array")
    return render_chat([m for m in messages if isinstance(m, dict)])


def messages_prompt(body: dict[str, Any]) -> str:
    if body.get("messages") is None:
        raise RefusedError(500, "server_error", "'messages' is required")
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    return chat_prompt({"messages": [*system, *body["messages"]]})


def responses_prompt(body: dict[str, Any]) -> str:
    given = body.get("input")
    if given is None:
        raise bad_request("'input' is required")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if body.get("instructions"):
        messages = [{"role": "system", "content": body["instructions"]}, *messages]
    return chat_prompt({"input": messages}, "input")


def raw_prompts(value: Any) -> list[str]:
    """A prompt is text, token ids, a mixture of both, or a list of such prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise bad_request('"prompt" must be a string, a list of tokens or a list of prompts')
    if any(isinstance(item, int) for item in value):
        return ["".join(p if isinstance(p, str) else detokenize([p]) for p in value)]
    return [prompt for item in value for prompt in raw_prompts(item)]


def _raw(body: dict[str, Any]) -> list[str]:
    if "prompt" not in body:
        raise bad_request("[json.exception.out_of_range.403] key 'prompt' not found")
    return raw_prompts(body["prompt"])


_PROMPTS = {
    "chat": lambda body: [chat_prompt(body)],
    "messages": lambda body: [messages_prompt(body)],
    "responses": lambda body: [responses_prompt(body)],
    "completions": _raw,
    "native": _raw,
}


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _max_tokens(api: ApiName, body: dict[str, Any]) -> int | None:
    keys: tuple[str, ...] = ("n_predict", "max_completion_tokens", "max_tokens")
    if api == "messages":
        keys = ("max_tokens",)
    elif api == "responses" and "max_output_tokens" in body:
        body = body | {"max_tokens": body["max_output_tokens"]}
    for key in keys:
        value = body.get(key)
        if value is None:
            continue
        if not isinstance(value, int):
            raise bad_request(
                f"Field '{key}': [json.exception.type_error.302] type must be number, "
                f"but is {type(value).__name__}"
            )
        return None if value < 0 else max(value, 1)
    return None
