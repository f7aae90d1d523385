"""OpenAI's chat completions and completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gateway.proxy.api.base import Api, AssemblyError
from gateway.proxy.json_values import JsonObject


class ChatApi(Api):
    """`/v1/chat/completions`: a role delta, content deltas, a finish reason, `[DONE]`."""

    name = "chat"
    stream_end = b"data: [DONE]\n\n"

    def has_content(self, value: dict[str, Any]) -> bool:
        choices = value.get("choices")
        if not isinstance(choices, list) or not choices:
            return bool(value.get("usage"))
        for choice in choices:
            if not isinstance(choice, dict) or choice.get("finish_reason"):
                return True
            delta = choice.get("delta")
            if not isinstance(delta, dict):
                return True
            if any(value for name, value in delta.items() if name != "role"):
                return True
        return False


class CompletionsApi(Api):
    """`/v1/completions`: text in each event, `[DONE]`."""

    name = "completions"
    stream_end = b"data: [DONE]\n\n"

    def has_content(self, value: dict[str, Any]) -> bool:
        choices = value.get("choices")
        if not isinstance(choices, list) or not choices:
            return bool(value.get("usage"))
        return any(
            not isinstance(choice, dict) or choice.get("text") or choice.get("finish_reason")
            for choice in choices
        )


CHAT = ChatApi()

COMPLETIONS = CompletionsApi()

# llama.cpp's order: JSON has none, but who reads an answer does.
_FIELD_ORDER = (
    "choices",
    "created",
    "model",
    "system_fingerprint",
    "object",
    "usage",
    "id",
    "timings",
)


def assemble_chat(events: Iterable[JsonObject], _: JsonObject) -> JsonObject:
    """The `chat.completion` that these chunks make. Raises: NotAssembled."""
    return _assemble(events, "chat.completion", _message_choice)


def assemble_completion(events: Iterable[JsonObject], _: JsonObject) -> JsonObject:
    """The `text_completion` that these chunks make. Raises: NotAssembled."""
    return _assemble(events, "text_completion", _text_choice)


def _assemble(
    events: Iterable[JsonObject],
    kind: str,
    choice_of: Callable[[int, list[JsonObject]], JsonObject],
) -> JsonObject:
    found: JsonObject = {}
    parts: dict[int, list[JsonObject]] = {}
    for event in events:
        for choice in event.get("choices") or ():
            parts.setdefault(_whole_number(choice.get("index")), []).append(choice)
        found |= event
    if not parts:
        raise AssemblyError("the node's stream has no answer")
    if not found.get("usage") and (counts := _usage_from_timings(found.get("timings"))) is not None:
        found["usage"] = counts
    found["object"] = kind
    found["choices"] = [choice_of(index, parts[index]) for index in sorted(parts)]
    ordered = {name: found.pop(name) for name in _FIELD_ORDER if name in found}
    return ordered | found


def _usage_from_timings(timings: object) -> JsonObject | None:
    """`usage` by the figures of a server that has none in its streams, as older builds."""
    told = timings if isinstance(timings, dict) else {}
    figures = [told.get(name) for name in ("prompt_n", "cache_n", "predicted_n")]
    fresh, cached, written = (n if isinstance(n, int) and n > 0 else 0 for n in figures)
    if not written:
        return None
    prompt = fresh + cached
    return {"completion_tokens": written, "prompt_tokens": prompt, "total_tokens": prompt + written}


def _message_choice(index: int, parts: list[JsonObject]) -> JsonObject:
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, JsonObject] = {}
    role = "assistant"
    for part in parts:
        delta = part.get("delta") or {}
        role = delta.get("role") or role
        content.append(delta.get("content") or "")
        reasoning.append(delta.get("reasoning_content") or "")
        for call in delta.get("tool_calls") or ():
            _add_call(calls, call)
    message: JsonObject = {"role": role, "content": "".join(content)}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = [calls[number] for number in sorted(calls)]
    choice: JsonObject = {"finish_reason": _reason(parts), "index": index, "message": message}
    logprobs = _logprobs(parts)
    return choice if logprobs is None else choice | {"logprobs": logprobs}


def _text_choice(index: int, parts: list[JsonObject]) -> JsonObject:
    return {
        "text": "".join(part.get("text") or "" for part in parts),
        "index": index,
        "logprobs": _logprobs(parts),
        "finish_reason": _reason(parts),
    }


def _add_call(calls: dict[int, JsonObject], call: JsonObject) -> None:
    """A tool call comes with its name first, then its arguments piece by piece."""
    known = calls.setdefault(
        _whole_number(call.get("index")),
        {"type": "function", "function": {"name": "", "arguments": ""}, "id": ""},
    )
    for name in ("type", "id"):
        known[name] = call.get(name) or known[name]
    function = call.get("function") or {}
    known["function"]["name"] += function.get("name") or ""
    known["function"]["arguments"] += function.get("arguments") or ""


def _reason(parts: list[JsonObject]) -> str:
    for part in reversed(parts):
        if part.get("finish_reason"):
            return str(part["finish_reason"])
    raise AssemblyError("an answer in the node's stream has no end")


def _logprobs(parts: list[JsonObject]) -> JsonObject | None:
    tokens: list[Any] = []
    asked = False
    for part in parts:
        told = part.get("logprobs")
        if told is not None:
            asked = True
            tokens += told.get("content") or ()
    return {"content": tokens} if asked else None


def _whole_number(value: object) -> int:
    return value if isinstance(value, int) else 0
