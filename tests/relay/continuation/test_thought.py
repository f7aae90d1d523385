"""How a template writes a thought is found out by having it write one."""

from __future__ import annotations

import pytest

from gateway.relay.continuation.anthropic import as_chat
from gateway.relay.continuation.thought import Closing, Form, form_of
from gateway.relay.values import Value

END = "</think>"
SHOWN = Form("Q<think>\n", "\n</think>\n\n", Closing(END))
FORMS: list[tuple[str, str, Form | None]] = [
    ("Q<think>\n", "Q<think>\n{r}\n</think>\n\n{c}", SHOWN),
    ("Q<think>\n", "Q<think>{r}</think>{c}", Form("Q<think>\n", END, Closing(END, ""))),
    ("Q", "Q[THINK]{r}[/THINK]{c}", Form("Q[THINK]", "[/THINK]", Closing("[/THINK]", ""))),
    # The mark that ends this prompt begins no thought.
    ("<|assistant|>", "<|assistant|>\n<think>{r}</think>\n{c}",
     Form("<|assistant|>\n<think>", "</think>\n", Closing(END, "\n"))),
    ("<|assistant|>", "<|assistant|>{c}", None),
    ("<start>", "<a>{r}<end><start><b>{c}", Form("<a>", "<end><start><b>", None)),
    ("Q<think>\n", "Q{c}", SHOWN),
    ("Q", "Q{c}", None),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "written", "form"), FORMS)
async def test_how_it_is_written(prompt: str, written: str, form: Form | None) -> None:
    async def render(messages: list[Value]) -> str:
        last = messages[-1]
        return written.format(r=last["reasoning_content"], c=last["content"]) + "<end>"

    assert await form_of(render, [], prompt) == form


def test_white_space_before_the_mark_is_not_written_twice() -> None:
    form = Form("Q<think>", "\n</think>\n\n", Closing(END))
    assert form.over("so") == "Q<think>so\n</think>\n\n"
    assert form.over("so\n") == "Q<think>so\n</think>\n\n"


TEXT = {"type": "text", "text": "no"}
THINKING = {"type": "thinking", "thinking": "hm", "signature": "x"}
CHATS: list[tuple[object, Value | None]] = [
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
    content: object, made: Value | None
) -> None:
    message = {"role": "assistant", "content": content}
    chat = as_chat({"system": [TEXT], "messages": [message]})
    system = {"role": "system", "content": "no"}
    expected = made and {"messages": [system, {"role": "assistant"} | made]}
    assert chat == expected
