"""Resume plans: by token ids, by a rendered prompt, with reasoning, by the text alone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gateway.proxy.inbound.routes import ROUTES
from gateway.proxy.resume import NotResumable, ResumeInput, ResumePlan, plan_resume
from gateway.proxy.transcript import Transcript

MESSAGES = [{"role": "user", "content": "why"}]
CHAT = {"messages": MESSAGES, "max_tokens": 200, "temperature": 0, "stream": True}


class Template:
    """A node whose template writes reasoning in tags. Each character is a token."""

    def __init__(self, *, shows: bool = True, opens: bool = False, prefills: bool = True) -> None:
        self.shows = shows
        """Whether it renders reasoning."""
        self.opens = opens
        """Whether its prompt ends with an open tag."""
        self.prefills = prefills
        """Whether it continues the assistant's last message, instead of beginning the next."""

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/apply-template":
            return {"prompt": self.render(body["messages"])}
        if path == "/detokenize":
            return {"content": "".join(map(chr, body["tokens"]))}
        assert path == "/tokenize"
        if body.get("with_pieces"):
            return {"tokens": [{"id": ord(c), "piece": c} for c in body["content"]]}
        return {"tokens": [ord(c) for c in body["content"]]}

    def render(self, messages: list[dict[str, Any]]) -> str:
        text = ""
        for message in messages:
            reasoning = message.get("reasoning_content") if self.shows else None
            text += f"[{message['role']}]"
            text += f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
            text += message["content"] + "[end]"
        if messages[-1]["role"] == "assistant" and self.prefills:
            return text.removesuffix("[end]")
        return text + "[assistant]" + ("<think>\n" if self.opens else "")


class Words(Template):
    """Each word is a token."""

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/tokenize":
            return {"tokens": [{"piece": p} for p in re.findall(r"\S+ ?|\s", body["content"])]}
        return await super().ask(path, body)


async def planned(template: Template, transcript: Transcript, **more: Any) -> ResumePlan:
    resume = ResumeInput(ROUTES["/v1/chat/completions"], CHAT, transcript, **more)
    return await plan_resume(template.ask, resume)


@pytest.mark.parametrize("opens", [False, True])
async def test_reasoning_continues_if_the_template_shows_how_it_is_written(*, opens: bool) -> None:
    transcript = Transcript(reasoning_pieces=["so ", "it"], token_count=2, first_event={"id": "x"})
    plan = await planned(Template(opens=opens), transcript)
    assert plan.route.path == "/completion"
    assert plan.body is not None
    assert plan.body["prompt"] == "[user]why[end][assistant]<think>\nso it"
    out = plan.rewriter.rewrite({"content": " is</think>\n\nbecause"}).decode()
    assert '"reasoning_content":" is"' in out
    assert '"content":"because"' in out


async def test_content_continues_behind_its_reasoning() -> None:
    transcript = Transcript(
        reasoning_pieces=["so it"],
        content_pieces=list("because"),
        token_count=8,
        first_event={"id": "x"},
    )
    plan = await planned(Template(), transcript)
    assert plan.body is not None
    prompt = "[user]why[end][assistant]<think>\nso it\n</think>\n\nbecause"
    assert plan.body["prompt"] == prompt
    assert '"content":" <b>"' in plan.rewriter.rewrite({"content": " <b>"}).decode()


async def test_a_prompt_that_opens_reasoning_shows_how_it_is_written() -> None:
    transcript = Transcript(reasoning_pieces=["so it"], token_count=1, first_event={"id": "x"})
    plan = await planned(Template(shows=False, opens=True), transcript)
    assert plan.body is not None
    assert plan.body["prompt"] == "[user]why[end][assistant]<think>\nso it"


async def test_reasoning_that_no_template_writes_can_not_be_resumed() -> None:
    with pytest.raises(NotResumable):
        await planned(Template(shows=False), Transcript(reasoning_pieces=["so it"], token_count=1))


async def test_a_chat_continues_as_a_completion_if_its_template_refuses_a_begun_message() -> None:
    plan = await planned(
        Template(), Transcript(content_pieces=list("because"), token_count=7), as_completion=True
    )
    assert (plan.route.path, plan.splice_point.prefix) == ("/completion", "because")
    assert plan.body is not None
    assert plan.body["prompt"] == "[user]why[end][assistant]because"
    assert plan.body["n_predict"] == 193
    assert "messages" not in plan.body


async def test_a_chat_continues_as_a_completion_if_its_node_begins_the_next_message() -> None:
    transcript = Transcript(content_pieces=list("because"), token_count=7, first_event={"id": "x"})
    plan = await planned(Template(prefills=False), transcript)
    assert plan.route.path == "/completion"
    assert plan.body is not None
    assert plan.body["prompt"] == "[user]why[end][assistant]because"
    for path in ("/v1/chat/completions", "/v1/messages"):
        resume = ResumeInput(ROUTES[path], CHAT | {"tools": [{"type": "function"}]}, transcript)
        with pytest.raises(NotResumable):
            await plan_resume(Template(prefills=False).ask, resume)
        assert (await plan_resume(Template().ask, resume)).route is resume.route
    nothing = Transcript(first_event={"id": "x"})
    assert (await planned(Template(prefills=False), nothing)).route.path == "/v1/chat/completions"


def message_input(transcript: Transcript, prompt_tokens: int = 25, **more: Any) -> ResumeInput:
    """The same chat as messages."""
    transcript.first_event = {"id": "x", "usage": {"input_tokens": prompt_tokens}}
    return ResumeInput(ROUTES["/v1/messages"], CHAT | more, transcript)


async def test_messages_continue_as_a_completion_too() -> None:
    transcript = Transcript(content_pieces=list("because"), token_count=7, open_blocks={0: "text"})
    plan = await plan_resume(Template(prefills=False).ask, message_input(transcript))
    assert plan.route.path == "/completion"
    assert plan.body is not None
    assert plan.body["prompt"] == "[user]why[end][assistant]because"
    assert plan.body["n_predict"] == 193
    out = plan.rewriter.rewrite({"content": " it"})
    assert b'"index":0,"delta":{"type":"text_delta","text":" it"}' in out
    with pytest.raises(NotResumable):  # its first node read another prompt
        await plan_resume(Template(prefills=False).ask, message_input(transcript, 26))


@pytest.mark.parametrize("thinking", [None, {"type": "adaptive"}])
async def test_reasoning_of_messages_continues(thinking: Any) -> None:
    transcript = Transcript(
        reasoning_pieces=list("so it"), token_count=5, open_blocks={0: "thinking"}
    )
    plan = await plan_resume(Template().ask, message_input(transcript, thinking=thinking))
    assert plan.route.path == "/completion"
    assert plan.body is not None
    assert plan.body["prompt"] == "[user]why[end][assistant]<think>\nso it"
    assert not {"messages", "thinking"} & plan.body.keys()
    assert plan.body["preserved_tokens"] == ["</think>"]
    out = plan.rewriter.rewrite({"content": " is\n</think>\n\nbecause"})
    assert out.count(b"content_block_start") == 2, "its name and its type"
    assert b'"index":0,"delta":{"type":"thinking_delta","thinking":" is\\n"}' in out
    assert b'"index":1,"delta":{"type":"text_delta","text":"because"}' in out
    with pytest.raises(NotResumable):
        await plan_resume(Template().ask, message_input(transcript, 26))
    with pytest.raises(NotResumable):
        await plan_resume(Template().ask, message_input(transcript, tools=[{"name": "f"}]))


async def test_content_of_messages_continues_behind_its_reasoning() -> None:
    transcript = Transcript(
        reasoning_pieces=["so it\n"], content_pieces=list("because"), token_count=13
    )
    transcript.open_blocks, transcript.block_index = {0: "thinking", 1: "text"}, 1
    earlier = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "no"},
    ]
    history = [*MESSAGES, {"role": "assistant", "content": earlier}, *MESSAGES]
    prompt = "[user]why[end][assistant]<think>\nhm\n</think>\n\nno[end][user]why[end][assistant]"
    plan = await plan_resume(
        Template().ask, message_input(transcript, len(prompt), messages=history)
    )
    assert plan.body is not None
    assert plan.body["prompt"] == f"{prompt}<think>\nso it\n</think>\n\nbecause"
    assert b'"index":1,"delta":{"type":"text_delta","text":" <b>"}' in plan.rewriter.rewrite(
        {"content": " <b>"}
    )


async def test_reasoning_is_stepped_back_into_where_it_tokenizes_otherwise() -> None:
    transcript = Transcript(
        reasoning_pieces=["so ", "i", "t"], token_count=3, first_event={"id": "x"}
    )
    plan = await planned(Words(), transcript)
    assert plan.body is not None
    assert plan.body["prompt"].endswith("<think>\nso ")
    assert (
        plan.splice_point.overlap,
        plan.splice_point.sent_tokens - plan.splice_point.prefix_tokens,
    ) == ("it", 2)
    plan = await planned(Words(), transcript, step_back=False)
    assert plan.body is not None
    assert plan.body["prompt"].endswith("<think>\nso it")


async def test_token_ids_are_continued_from_if_they_make_the_text() -> None:
    transcript = Transcript(
        content_pieces=["be"],
        token_count=2,
        token_ids=[ord("b"), ord("e")],
        first_event={"id": "x"},
    )
    plan = await planned(Template(), transcript)
    assert plan.body is not None
    assert plan.body["prompt"] == [*map(ord, "[user]why[end][assistant]be")]
    assert (plan.splice_point.prompt_tokens, plan.splice_point.prefix_tokens) == (25, 2)
    transcript.token_ids.pop()
    plan = await planned(Template(), transcript)
    assert plan.route.path == "/v1/chat/completions", "an id is missing: continue from the text"


async def test_a_response_of_full_length_needs_no_node() -> None:
    plan = await planned(
        Template(),
        Transcript(content_pieces=list("a" * 200), token_count=200, first_event={"id": "x"}),
    )
    assert plan.body is None
    assert plan.final_events is not None
    assert b'"length"' in plan.final_events


async def test_messages_with_images_continue_by_their_own_api() -> None:
    picture = [{"type": "image", "source": {"type": "base64", "data": "eA=="}}]
    body = CHAT | {"messages": [{"role": "user", "content": picture}]}
    head = {"usage": {"input_tokens": 9, "cache_read_input_tokens": 3}}
    transcript = Transcript(
        content_pieces=["be"], token_count=2, first_event=head, open_blocks={0: "text"}
    )
    plan = await plan_resume(Template().ask, ResumeInput(ROUTES["/v1/messages"], body, transcript))
    assert (plan.route.path, plan.splice_point.prompt_tokens) == ("/v1/messages", 12)
    assert plan.body is not None
    assert plan.body["messages"][-1] == {"role": "assistant", "content": "be"}
