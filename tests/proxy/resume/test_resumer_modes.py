"""Resuming by token ids, by a rendered prompt, and with reasoning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gateway.proxy.inbound.routes import ROUTES
from gateway.proxy.resume.plan import NotResumable, ResumeInput, ResumePlan, plan_resume
from gateway.proxy.transcript import Transcript
from tests.proxy.proxy_over_nodes import A_FIRST, proxy_over
from tests.proxy.resume.test_resumer import (
    PATHS,
    asked_of,
    check_whole,
    nodes,
    options_of,
    text_of,
    usage_of,
)
from tests.proxy.test_response_stream import AFTER
from tests.virtual import in_virtual_time

MESSAGES = [{"role": "user", "content": "why"}]
CHAT = {"messages": MESSAGES, "max_tokens": 200, "temperature": 0, "stream": True}


class Template:
    """A node whose template writes reasoning in tags; a token is a character."""

    def __init__(self, *, shows: bool = True, opens: bool = False, prefills: bool = True) -> None:
        self.shows = shows
        """Whether it renders reasoning of earlier messages."""
        self.opens = opens
        """Whether its prompt ends with an open tag."""
        self.prefills = prefills
        """Whether it continues a message of the assistant's, instead of beginning the next."""

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
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
            thought = message.get("reasoning_content") if self.shows else None
            text += f"[{message['role']}]"
            text += f"<think>\n{thought}\n</think>\n\n" if thought else ""
            text += message["content"] + "[end]"
        if messages[-1]["role"] == "assistant" and self.prefills:
            return text.removesuffix("[end]")
        return text + "[assistant]" + ("<think>\n" if self.opens else "")


class Words(Template):
    """A token is a word."""

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/tokenize":
            return {"tokens": [{"piece": p} for p in re.findall(r"\S+ ?|\s", body["content"])]}
        return await super().post(path, body)


async def plan_for(template: Template, transcript: Transcript, **more: Any) -> ResumePlan:
    resume = ResumeInput(ROUTES["/v1/chat/completions"], CHAT, transcript, **more)
    return await plan_resume(template.post, resume)


@pytest.mark.parametrize("opens", [False, True])
async def test_reasoning_is_resumed_where_the_template_shows_its_marks(*, opens: bool) -> None:
    transcript = Transcript(reasoning_pieces=["so ", "it"], token_count=2, first_event={"id": "x"})
    found = await plan_for(Template(opens=opens), transcript)
    assert found.route.path == "/completion"
    assert found.body is not None
    assert found.body["prompt"] == "[user]why[end][assistant]<think>\nso it"
    out = found.rewriter.rewrite({"content": " is</think>\n\nbecause"}).decode()
    assert '"reasoning_content":" is"' in out
    assert '"content":"because"' in out


async def test_content_after_reasoning_is_resumed_behind_both() -> None:
    transcript = Transcript(
        reasoning_pieces=["so it"],
        content_pieces=list("because"),
        token_count=8,
        first_event={"id": "x"},
    )
    found = await plan_for(Template(), transcript)
    assert found.body is not None
    prompt = "[user]why[end][assistant]<think>\nso it\n</think>\n\nbecause"
    assert found.body["prompt"] == prompt
    assert '"content":" <b>"' in found.rewriter.rewrite({"content": " <b>"}).decode()


async def test_a_prompt_that_opens_the_reasoning_is_enough() -> None:
    transcript = Transcript(reasoning_pieces=["so it"], token_count=1, first_event={"id": "x"})
    found = await plan_for(Template(shows=False, opens=True), transcript)
    assert found.body is not None
    assert found.body["prompt"] == "[user]why[end][assistant]<think>\nso it"


async def test_reasoning_that_can_not_be_rendered_is_not_resumed() -> None:
    with pytest.raises(NotResumable):
        await plan_for(Template(shows=False), Transcript(reasoning_pieces=["so it"], token_count=1))


async def test_a_template_that_refuses_a_begun_message_is_bypassed() -> None:
    found = await plan_for(
        Template(), Transcript(content_pieces=list("because"), token_count=7), as_completion=True
    )
    assert (found.route.path, found.splice_point.prefix) == ("/completion", "because")
    assert found.body is not None
    assert found.body["prompt"] == "[user]why[end][assistant]because"
    assert found.body["n_predict"] == 193
    assert "messages" not in found.body


async def test_a_node_that_would_begin_the_next_message_is_bypassed() -> None:
    transcript = Transcript(content_pieces=list("because"), token_count=7, first_event={"id": "x"})
    found = await plan_for(Template(prefills=False), transcript)
    assert found.route.path == "/completion"
    assert found.body is not None
    assert found.body["prompt"] == "[user]why[end][assistant]because"
    for path in ("/v1/chat/completions", "/v1/messages"):
        source = ResumeInput(ROUTES[path], CHAT | {"tools": [{"type": "function"}]}, transcript)
        with pytest.raises(NotResumable):
            await plan_resume(Template(prefills=False).post, source)
        assert (await plan_resume(Template().post, source)).route is source.route
    nothing = Transcript(first_event={"id": "x"})
    assert (await plan_for(Template(prefills=False), nothing)).route.path == "/v1/chat/completions"


def message(transcript: Transcript, prompt_tokens: int = 25, **more: Any) -> ResumeInput:
    """The same chat in Anthropic's form."""
    transcript.first_event = {"id": "x", "usage": {"input_tokens": prompt_tokens}}
    return ResumeInput(ROUTES["/v1/messages"], CHAT | more, transcript)


async def test_anthropics_messages_bypass_the_template_as_well() -> None:
    transcript = Transcript(content_pieces=list("because"), token_count=7, open_blocks={0: "text"})
    found = await plan_resume(Template(prefills=False).post, message(transcript))
    assert found.route.path == "/completion"
    assert found.body is not None
    assert found.body["prompt"] == "[user]why[end][assistant]because"
    assert found.body["n_predict"] == 193
    out = found.rewriter.rewrite({"content": " it"})
    assert b'"index":0,"delta":{"type":"text_delta","text":" it"}' in out
    with pytest.raises(NotResumable):  # the first node counted other tokens
        await plan_resume(Template(prefills=False).post, message(transcript, 26))


@pytest.mark.parametrize("thinking", [None, {"type": "adaptive"}])
async def test_reasoning_of_anthropics_messages_is_resumed(thinking: Any) -> None:
    transcript = Transcript(
        reasoning_pieces=list("so it"), token_count=5, open_blocks={0: "thinking"}
    )
    found = await plan_resume(Template().post, message(transcript, thinking=thinking))
    assert found.route.path == "/completion"
    assert found.body is not None
    assert found.body["prompt"] == "[user]why[end][assistant]<think>\nso it"
    assert not {"messages", "thinking"} & found.body.keys()
    assert found.body["preserved_tokens"] == ["</think>"]
    out = found.rewriter.rewrite({"content": " is\n</think>\n\nbecause"})
    assert out.count(b"content_block_start") == 2, "its name and its type"
    assert b'"index":0,"delta":{"type":"thinking_delta","thinking":" is\\n"}' in out
    assert b'"index":1,"delta":{"type":"text_delta","text":"because"}' in out
    with pytest.raises(NotResumable):
        await plan_resume(Template().post, message(transcript, 26))
    with pytest.raises(NotResumable):
        await plan_resume(Template().post, message(transcript, tools=[{"name": "f"}]))


async def test_content_after_reasoning_of_anthropics_messages_is_resumed() -> None:
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
    found = await plan_resume(Template().post, message(transcript, len(prompt), messages=history))
    assert found.body is not None
    assert found.body["prompt"] == f"{prompt}<think>\nso it\n</think>\n\nbecause"
    assert b'"index":1,"delta":{"type":"text_delta","text":" <b>"}' in found.rewriter.rewrite(
        {"content": " <b>"}
    )


async def test_the_splice_point_steps_back_into_reasoning_that_tokenizes_differently() -> None:
    transcript = Transcript(
        reasoning_pieces=["so ", "i", "t"], token_count=3, first_event={"id": "x"}
    )
    found = await plan_for(Words(), transcript)
    assert found.body is not None
    assert found.body["prompt"].endswith("<think>\nso ")
    assert (
        found.splice_point.overlap,
        found.splice_point.sent_tokens - found.splice_point.prefix_tokens,
    ) == ("it", 2)
    found = await plan_for(Words(), transcript, step_back=False)
    assert found.body is not None
    assert found.body["prompt"].endswith("<think>\nso it")


async def test_token_ids_are_resumed_from_where_they_make_the_text() -> None:
    transcript = Transcript(
        content_pieces=["be"],
        token_count=2,
        token_ids=[ord("b"), ord("e")],
        first_event={"id": "x"},
    )
    found = await plan_for(Template(), transcript)
    assert found.body is not None
    assert found.body["prompt"] == [*map(ord, "[user]why[end][assistant]be")]
    assert (found.splice_point.prompt_tokens, found.splice_point.prefix_tokens) == (25, 2)
    transcript.token_ids.pop()
    found = await plan_for(Template(), transcript)
    assert found.route.path == "/v1/chat/completions", "one is missing: on from the text"


async def test_a_response_of_full_length_needs_no_other_node() -> None:
    found = await plan_for(
        Template(),
        Transcript(content_pieces=list("a" * 200), token_count=200, first_event={"id": "x"}),
    )
    assert found.body is None
    assert found.final_events is not None
    assert b'"length"' in found.final_events


async def test_messages_with_pictures_are_resumed_by_their_own_api() -> None:
    picture = [{"type": "image", "source": {"type": "base64", "data": "eA=="}}]
    body = CHAT | {"messages": [{"role": "user", "content": picture}]}
    head = {"usage": {"input_tokens": 9, "cache_read_input_tokens": 3}}
    transcript = Transcript(
        content_pieces=["be"], token_count=2, first_event=head, open_blocks={0: "text"}
    )
    found = await plan_resume(
        Template().post, ResumeInput(ROUTES["/v1/messages"], body, transcript)
    )
    assert (found.route.path, found.splice_point.prompt_tokens) == ("/v1/messages", 12)
    assert found.body is not None
    assert found.body["messages"][-1] == {"role": "assistant", "content": "be"}


@pytest.mark.parametrize("path", PATHS)
@in_virtual_time
async def test_the_client_gets_no_logprobs_that_only_the_gateway_asked_for(
    tmp_path: Path, path: str
) -> None:
    one, two = nodes()
    async with proxy_over(tmp_path, one, two, nodes=A_FIRST, resume="exact") as proxy:
        asked = options_of(path)
        whole = await proxy.stream(path, **asked)
        assert b'"logprobs":{' not in whole.body
        asks = {"/v1/chat/completions", "/v1/completions"}
        assert (b'"logprobs"' in one.seen[-1].body) is (path in asks)
        one.faults.next("reset", after_events=AFTER)
        reply = await proxy.stream(path, **asked)
        check_whole(path, reply, whole)
        assert usage_of(reply) == usage_of(whole)
        assert b'"logprobs":{' not in reply.body
        plain = await proxy.ask(path, **asked_of(path))
        assert b'"logprobs":{' not in plain.content


@in_virtual_time
async def test_logprobs_that_the_client_asked_for_stay(tmp_path: Path) -> None:
    (one,) = nodes(1)
    async with proxy_over(tmp_path, one, resume="exact") as proxy:
        reply = await proxy.stream(logprobs=True, max_tokens=4)
        assert reply.body.count(b'"logprobs":{') == 4
        assert len(text_of(reply).split()) == 4
