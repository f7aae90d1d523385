"""How a template writes reasoning is found by having it write a sample."""

from __future__ import annotations

import pytest

from gateway.proxy.api.resuming import ReasoningEndMark
from gateway.proxy.json_values import JsonObject
from gateway.proxy.resume import ReasoningTemplate, find_reasoning_template

END = "</think>"
SHOWN = ReasoningTemplate("Q<think>\n", "\n</think>\n\n", ReasoningEndMark(END))
TEMPLATES: list[tuple[str, str, ReasoningTemplate | None]] = [
    ("Q<think>\n", "Q<think>\n{r}\n</think>\n\n{c}", SHOWN),
    ("Q<think>\n", "Q<think>{r}</think>{c}",
     ReasoningTemplate("Q<think>\n", END, ReasoningEndMark(END, ""))),
    ("Q", "Q[THINK]{r}[/THINK]{c}",
     ReasoningTemplate("Q[THINK]", "[/THINK]", ReasoningEndMark("[/THINK]", ""))),
    # The mark that ends this prompt begins no reasoning.
    ("<|assistant|>", "<|assistant|>\n<think>{r}</think>\n{c}",
     ReasoningTemplate("<|assistant|>\n<think>", "</think>\n", ReasoningEndMark(END, "\n"))),
    ("<|assistant|>", "<|assistant|>{c}", None),
    ("<start>", "<a>{r}<end><start><b>{c}", ReasoningTemplate("<a>", "<end><start><b>", None)),
    ("Q<think>\n", "Q{c}", SHOWN),
    ("Q", "Q{c}", None),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "written", "expected"), TEMPLATES)
async def test_the_text_around_reasoning_is_found(
    prompt: str, written: str, expected: ReasoningTemplate | None
) -> None:
    async def render(messages: list[JsonObject]) -> str:
        last = messages[-1]
        return written.format(r=last["reasoning_content"], c=last["content"]) + "<end>"

    assert await find_reasoning_template(render, [], prompt) == expected


def test_white_space_before_the_end_mark_is_not_written_twice() -> None:
    template = ReasoningTemplate("Q<think>", "\n</think>\n\n", ReasoningEndMark(END))
    assert template.before_content("so") == "Q<think>so\n</think>\n\n"
    assert template.before_content("so\n") == "Q<think>so\n</think>\n\n"
