"""OpenAI's chat completions and completions."""

from __future__ import annotations

from typing import Any

from gateway.relay.dialects.base import Dialect


class Chat(Dialect):
    """`/v1/chat/completions`: a role delta, content deltas, a finish reason, `[DONE]`."""

    name = "chat"
    end = b"data: [DONE]\n\n"

    def is_content(self, value: dict[str, Any]) -> bool:
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


class Completions(Dialect):
    """`/v1/completions`: text in each event, `[DONE]`."""

    name = "completions"
    end = b"data: [DONE]\n\n"

    def is_content(self, value: dict[str, Any]) -> bool:
        choices = value.get("choices")
        if not isinstance(choices, list) or not choices:
            return bool(value.get("usage"))
        return any(
            not isinstance(choice, dict) or choice.get("text") or choice.get("finish_reason")
            for choice in choices
        )


CHAT = Chat()
COMPLETIONS = Completions()
