"""How a template writes a thought, found out by having it write one."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.proxy.json_values import JsonObject

RenderTemplate = Callable[[list[JsonObject]], Awaitable[str]]
"""The prompt that these messages make. Raises: UpstreamError."""

_CLOSING = re.compile(r"\s*(<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\])(\s*)")
"""A mark that ends reasoning, as a template writes it behind a thought."""

_OPENING = re.compile(r"<([^<>/|\s]{1,40})>\s*$")
"""A mark that begins it, as a template leaves it open at the end of a prompt."""

_THOUGHT, _ANSWER = "a-thought-to-be-found-again", "an-answer-to-be-found-again"


@dataclass(frozen=True, slots=True)
class ReasoningEndMark:
    """What ends a thought."""

    mark: str
    whitespace: str = "\n\n"
    """White space behind it that is no part of the answer."""


@dataclass(frozen=True, slots=True)
class ReasoningTemplate:
    """What stands around a thought."""

    before: str
    """All up to it, the prompt included."""
    between: str
    """All from it to the answer."""
    end_mark: ReasoningEndMark | None
    """None: more than a mark ends it."""

    def before_answer(self, reasoning: str) -> str:
        """What stands before the answer, when this thought is over."""
        # llama.cpp tells what white space stood before the mark; others may have taken it away.
        told = reasoning[-1:].isspace()
        return f"{self.before}{reasoning}{self.between.lstrip() if told else self.between}"


async def find_reasoning_template(
    render: RenderTemplate, messages: list[JsonObject], prompt: str
) -> ReasoningTemplate | None:
    """How a thought behind this prompt is written; None: the template does not show it.

    Raises: UpstreamError.
    """
    last = {"role": "assistant", "reasoning_content": _THOUGHT, "content": _ANSWER}
    before, thought, behind = (await render([*messages, last])).partition(_THOUGHT)
    between, answer, _ = behind.partition(_ANSWER)
    opening = _OPENING.search(prompt)
    if thought and answer:
        mark = _CLOSING.fullmatch(between)
        closing = ReasoningEndMark(mark[1], mark[2]) if mark else None
        # What the prompt leaves open is what the thought stood behind.
        opened = opening is not None and f"</{opening[1]}>" in between
        return ReasoningTemplate(prompt if opened else before, between, closing)
    if opening is None:
        return None
    closed = ReasoningEndMark(f"</{opening[1]}>")
    return ReasoningTemplate(prompt, f"\n{closed.mark}{closed.whitespace}", closed)
