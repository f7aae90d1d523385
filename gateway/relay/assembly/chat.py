"""Plain answers of OpenAI's chat completions and completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gateway.relay.assembly.events import NotAssembled
from gateway.relay.values import Value

# llama.cpp's order: JSON has none, but who reads an answer does.
_HEAD = ("choices", "created", "model", "system_fingerprint", "object", "usage", "id", "timings")


def chat_answer(events: Iterable[Value], _: Value) -> Value:
    """The `chat.completion` that these chunks make. Raises: NotAssembled."""
    return _answer(events, "chat.completion", _message_choice)


def completions_answer(events: Iterable[Value], _: Value) -> Value:
    """The `text_completion` that these chunks make. Raises: NotAssembled."""
    return _answer(events, "text_completion", _text_choice)


def _answer(
    events: Iterable[Value], kind: str, choice_of: Callable[[int, list[Value]], Value]
) -> Value:
    found: Value = {}
    parts: dict[int, list[Value]] = {}
    for event in events:
        for choice in event.get("choices") or ():
            parts.setdefault(_whole_number(choice.get("index")), []).append(choice)
        found |= event
    if not parts:
        raise NotAssembled("the node's stream has no answer")
    if not found.get("usage") and (counts := _counted(found.get("timings"))) is not None:
        found["usage"] = counts
    found["object"] = kind
    found["choices"] = [choice_of(index, parts[index]) for index in sorted(parts)]
    ordered = {name: found.pop(name) for name in _HEAD if name in found}
    return ordered | found


def _counted(timings: object) -> Value | None:
    """`usage` by the figures of a server that has none in its streams, as older builds."""
    told = timings if isinstance(timings, dict) else {}
    figures = [told.get(name) for name in ("prompt_n", "cache_n", "predicted_n")]
    fresh, cached, written = (n if isinstance(n, int) and n > 0 else 0 for n in figures)
    if not written:
        return None
    prompt = fresh + cached
    return {"completion_tokens": written, "prompt_tokens": prompt, "total_tokens": prompt + written}


def _message_choice(index: int, parts: list[Value]) -> Value:
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, Value] = {}
    role = "assistant"
    for part in parts:
        delta = part.get("delta") or {}
        role = delta.get("role") or role
        content.append(delta.get("content") or "")
        reasoning.append(delta.get("reasoning_content") or "")
        for call in delta.get("tool_calls") or ():
            _add_call(calls, call)
    message: Value = {"role": role, "content": "".join(content)}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = [calls[number] for number in sorted(calls)]
    choice: Value = {"finish_reason": _reason(parts), "index": index, "message": message}
    logprobs = _logprobs(parts)
    return choice if logprobs is None else choice | {"logprobs": logprobs}


def _text_choice(index: int, parts: list[Value]) -> Value:
    return {
        "text": "".join(part.get("text") or "" for part in parts),
        "index": index,
        "logprobs": _logprobs(parts),
        "finish_reason": _reason(parts),
    }


def _add_call(calls: dict[int, Value], call: Value) -> None:
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


def _reason(parts: list[Value]) -> str:
    for part in reversed(parts):
        if part.get("finish_reason"):
            return str(part["finish_reason"])
    raise NotAssembled("an answer in the node's stream has no end")


def _logprobs(parts: list[Value]) -> Value | None:
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
