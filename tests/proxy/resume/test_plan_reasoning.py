"""How a template writes a thought is found out by having it write one."""

from __future__ import annotations

import pytest

from gateway.proxy.api.messages import messages_as_chat
from gateway.proxy.api.resuming import ReasoningEndMark
from gateway.proxy.json_values import JsonObject
from gateway.proxy.resume.plan import ReasoningTemplate, find_reasoning_template

END = "</think>"
SHOWN = ReasoningTemplate("Q<think>\n", "\n</think>\n\n", ReasoningEndMark(END))
FORMS: list[tuple[str, str, ReasoningTemplate | None]] = [
    ("Q<think>\n", "Q<think>\n{r}\n</think>\n\n{c}", SHOWN),
    ("Q<think>\n", "Q<think>{r}</think>{c}",
     ReasoningTemplate("Q<think>\n", END, ReasoningEndMark(END, ""))),
    ("Q", "Q[THINK]{r}[/THINK]{c}",
     ReasoningTemplate("Q[THINK]", "[/THINK]", ReasoningEndMark("[/THINK]", ""))),
    # The mark that ends this prompt begins no thought.
    ("<|assistant|>", "<|assistant|>\n<think>{r}</think>\n{c}",
     ReasoningTemplate("<|assistant|>\n<think>", "</think>\n", ReasoningEndMark(END, "\n"))),
    ("<|assistant|>", "<|assistant|>{c}", None),
    ("<start>", "<a>{r}<end><start><b>{c}", ReasoningTemplate("<a>", "<end><start><b>", None)),
    ("Q<think>\n", "Q{c}", SHOWN),
    ("Q", "Q{c}", None),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "written", "form"), FORMS)
async def test_how_it_is_written(prompt: str, written: str, form: ReasoningTemplate | None) -> None:
    async def render(messages: list[JsonObject]) -> str:
        last = messages[-1]
        return written.format(r=last["reasoning_content"], c=last["content"]) + "<end>"

    assert await find_reasoning_template(render, [], prompt) == form


def test_white_space_before_the_mark_is_not_written_twice() -> None:
    form = ReasoningTemplate("Q<think>", "\n</think>\n\n", ReasoningEndMark(END))
    assert form.before_content("so") == "Q<think>so\n</think>\n\n"
    assert form.before_content("so\n") == "Q<think>so\n</think>\n\n"


TEXT = {"type": "text", "text": "no"}
THINKING = {"type": "thinking", "thinking": "hm", "signature": "x"}
CHATS: list[tuple[object, JsonObject | None]] = [
    ("no", {"content": "no"}),
    ([TEXT], {"content": "no"}),
    ([THINKING, TEXT], {"content": "no", "reasoning_content": "hm"}),
    ([TEXT, TEXT], None),
    ([THINKING], None),
    ([{"type": "image"}, TEXT], None),
    (None, None),
]


@pytest.mark.parametrize(("content", "made"), CHATS)
def test_messages_are_the_chat_that_the_server_makes_of_them(
    content: object, made: JsonObject | None
) -> None:
    message = {"role": "assistant", "content": content}
    chat = messages_as_chat({"system": [TEXT], "messages": [message]})
    system = {"role": "system", "content": "no"}
    expected = made and {"messages": [system, {"role": "assistant"} | made]}
    assert chat == expected
