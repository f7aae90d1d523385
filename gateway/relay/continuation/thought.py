"""How a template writes a thought, found out by having it write one."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.relay.values import Value

Render = Callable[[list[Value]], Awaitable[str]]
"""The prompt that these messages make. Raises: UpstreamError."""

_CLOSING = re.compile(r"\s*(<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\])(\s*)")
"""A mark that ends reasoning, as a template writes it behind a thought."""
_OPENING = re.compile(r"<([^<>/|\s]{1,40})>\s*$")
"""A mark that begins it, as a template leaves it open at the end of a prompt."""

_THOUGHT, _ANSWER = "a-thought-to-be-found-again", "an-answer-to-be-found-again"


@dataclass(frozen=True, slots=True)
class Closing:
    """What ends a thought."""

    mark: str
    gap: str = "\n\n"
    """White space behind it that is no part of the answer."""


@dataclass(frozen=True, slots=True)
class Form:
    """What stands around a thought."""

    before: str
    """All up to it, the prompt included."""
    between: str
    """All from it to the answer."""
    closing: Closing | None
    """None: more than a mark ends it."""

    def over(self, thought: str) -> str:
        """What stands before the answer, when this thought is over."""
        # llama.cpp tells what white space stood before the mark; others may have taken it away.
        told = thought[-1:].isspace()
        return f"{self.before}{thought}{self.between.lstrip() if told else self.between}"


async def form_of(render: Render, messages: list[Value], prompt: str) -> Form | None:
    """How a thought behind this prompt is written; None: the template does not show it.

    Raises: UpstreamError.
    """
    last = {"role": "assistant", "reasoning_content": _THOUGHT, "content": _ANSWER}
    before, thought, behind = (await render([*messages, last])).partition(_THOUGHT)
    between, answer, _ = behind.partition(_ANSWER)
    opening = _OPENING.search(prompt)
    if thought and answer:
        mark = _CLOSING.fullmatch(between)
        closing = Closing(mark[1], mark[2]) if mark else None
        # What the prompt leaves open is what the thought stood behind.
        opened = opening is not None and f"</{opening[1]}>" in between
        return Form(prompt if opened else before, between, closing)
    if opening is None:
        return None
    closed = Closing(f"</{opening[1]}>")
    return Form(prompt, f"\n{closed.mark}{closed.gap}", closed)
