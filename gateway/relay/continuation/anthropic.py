"""Anthropic's messages as the chat that llama.cpp makes of them."""

from __future__ import annotations

from gateway.relay.values import Value


def as_chat(body: Value) -> Value | None:
    """The chat, where all of them are text and thoughts; None: they are not."""
    if body.get("tools"):
        return None
    messages: list[object] = []
    system = body.get("system")
    if system:
        messages.append({"role": "system", "content": system})
    messages += body.get("messages") or ()
    chat = []
    for message in messages:
        made = _message(message) if isinstance(message, dict) else None
        if made is None:
            return None
        chat.append(made)
    kwargs = body.get("chat_template_kwargs")
    return {"messages": chat} | ({"chat_template_kwargs": kwargs} if kwargs else {})


def _message(message: Value) -> Value | None:
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list):
        return None
    parts: dict[str, list[str]] = {"text": [], "thinking": []}
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in parts:
            return None
        parts[kind].append(str(part.get(kind) or ""))
    if len(parts["text"]) != 1 or len(parts["thinking"]) > 1:
        # llama.cpp gives several parts to the template as parts: what it makes of them is its own.
        return None
    made = {"role": role, "content": parts["text"][0]}
    thought = "".join(parts["thinking"])
    return made | {"reasoning_content": thought} if thought else made
