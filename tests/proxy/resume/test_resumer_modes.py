"""By token ids, by a rendered prompt, with reasoning: the ways of going on but the usual one."""

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
        """Whether it renders reasoning that it is given."""
        self.opens = opens
        """Whether its prompt ends with an open tag."""
        self.prefills = prefills
        """Whether it goes on with a message of the assistant's, instead of with the next."""

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
            thought = message.get("reasoning_content") if self.shows else None
            text += f"[{message['role']}]"
            text += f"<think>\n{thought}\n</think>\n\n" if thought else ""
            text += message["content"] + "[end]"
        if messages[-1]["role"] == "assistant" and self.prefills:
            return text.removesuffix("[end]")
        return text + "[assistant]" + ("<think>\n" if self.opens else "")


class Words(Template):
    """A token is a word."""

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/tokenize":
            return {"tokens": [{"piece": p} for p in re.findall(r"\S+ ?|\s", body["content"])]}
        return await super().ask(path, body)


async def way(template: Template, said: Transcript, **more: Any) -> ResumePlan:
    resume = ResumeInput(ROUTES["/v1/chat/completions"], CHAT, said, **more)
    return await plan_resume(template.ask, resume)


@pytest.mark.parametrize("opens", [False, True])
async def test_a_thought_goes_on_where_the_template_shows_how_it_is_written(*, opens: bool) -> None:
    said = Transcript(reasoning_pieces=["so ", "it"], token_count=2, first_event={"id": "x"})
    found = await way(Template(opens=opens), said)
    assert found.route.path == "/completion"
    assert found.body is not None
    assert found.body["prompt"] == "[user]why[end][assistant]<think>\nso it"
    out = found.rewriter.rewrite({"content": " is</think>\n\nbecause"}).decode()
    assert '"reasoning_content":" is"' in out
    assert '"content":"because"' in out


async def test_what_comes_after_a_thought_goes_on_behind_both() -> None:
    said = Transcript(
        reasoning_pieces=["so it"],
        content_pieces=list("because"),
        token_count=8,
        first_event={"id": "x"},
    )
    found = await way(Template(), said)
    assert found.body is not None
    prompt = "[user]why[end][assistant]<think>\nso it\n</think>\n\nbecause"
    assert found.body["prompt"] == prompt
    assert '"content":" <b>"' in found.rewriter.rewrite({"content": " <b>"}).decode()


async def test_a_prompt_that_opens_a_thought_is_enough() -> None:
    said = Transcript(reasoning_pieces=["so it"], token_count=1, first_event={"id": "x"})
    found = await way(Template(shows=False, opens=True), said)
    assert found.body is not None
    assert found.body["prompt"] == "[user]why[end][assistant]<think>\nso it"


async def test_a_thought_that_cannot_be_written_back_goes_nowhere() -> None:
    with pytest.raises(NotResumable):
        await way(Template(shows=False), Transcript(reasoning_pieces=["so it"], token_count=1))


async def test_a_template_that_refuses_a_begun_message_is_gone_round() -> None:
    found = await way(
        Template(), Transcript(content_pieces=list("because"), token_count=7), as_completion=True
    )
    assert (found.route.path, found.splice_point.prefix) == ("/completion", "because")
    assert found.body is not None
    assert found.body["prompt"] == "[user]why[end][assistant]because"
    assert found.body["n_predict"] == 193
    assert "messages" not in found.body


async def test_a_node_that_would_begin_the_next_message_is_gone_round() -> None:
    said = Transcript(content_pieces=list("because"), token_count=7, first_event={"id": "x"})
    found = await way(Template(prefills=False), said)
    assert found.route.path == "/completion"
    assert found.body is not None
    assert found.body["prompt"] == "[user]why[end][assistant]because"
    for path in ("/v1/chat/completions", "/v1/messages"):
        wish = ResumeInput(ROUTES[path], CHAT | {"tools": [{"type": "function"}]}, said)
        with pytest.raises(NotResumable):
            await plan_resume(Template(prefills=False).ask, wish)
        assert (await plan_resume(Template().ask, wish)).route is wish.route
    nothing = Transcript(first_event={"id": "x"})
    assert (await way(Template(prefills=False), nothing)).route.path == "/v1/chat/completions"


def message(said: Transcript, prompt_tokens: int = 25, **more: Any) -> ResumeInput:
    """The same chat in Anthropic's form."""
    said.first_event = {"id": "x", "usage": {"input_tokens": prompt_tokens}}
    return ResumeInput(ROUTES["/v1/messages"], CHAT | more, said)


async def test_a_message_is_gone_round_as_well() -> None:
    said = Transcript(content_pieces=list("because"), token_count=7, open_blocks={0: "text"})
    found = await plan_resume(Template(prefills=False).ask, message(said))
    assert found.route.path == "/completion"
    assert found.body is not None
    assert found.body["prompt"] == "[user]why[end][assistant]because"
    assert found.body["n_predict"] == 193
    out = found.rewriter.rewrite({"content": " it"})
    assert b'"index":0,"delta":{"type":"text_delta","text":" it"}' in out
    with pytest.raises(NotResumable):  # its first node made something else of it
        await plan_resume(Template(prefills=False).ask, message(said, 26))


@pytest.mark.parametrize("thinking", [None, {"type": "adaptive"}])
async def test_a_thought_of_a_message_goes_on(thinking: Any) -> None:
    said = Transcript(reasoning_pieces=list("so it"), token_count=5, open_blocks={0: "thinking"})
    found = await plan_resume(Template().ask, message(said, thinking=thinking))
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
        await plan_resume(Template().ask, message(said, 26))
    with pytest.raises(NotResumable):
        await plan_resume(Template().ask, message(said, tools=[{"name": "f"}]))


async def test_what_a_thought_of_a_message_led_to_goes_on() -> None:
    said = Transcript(reasoning_pieces=["so it\n"], content_pieces=list("because"), token_count=13)
    said.open_blocks, said.block_index = {0: "thinking", 1: "text"}, 1
    earlier = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "no"},
    ]
    history = [*MESSAGES, {"role": "assistant", "content": earlier}, *MESSAGES]
    prompt = "[user]why[end][assistant]<think>\nhm\n</think>\n\nno[end][user]why[end][assistant]"
    found = await plan_resume(Template().ask, message(said, len(prompt), messages=history))
    assert found.body is not None
    assert found.body["prompt"] == f"{prompt}<think>\nso it\n</think>\n\nbecause"
    assert b'"index":1,"delta":{"type":"text_delta","text":" <b>"}' in found.rewriter.rewrite(
        {"content": " <b>"}
    )


async def test_a_thought_is_stepped_back_into_where_it_reads_otherwise() -> None:
    said = Transcript(reasoning_pieces=["so ", "i", "t"], token_count=3, first_event={"id": "x"})
    found = await way(Words(), said)
    assert found.body is not None
    assert found.body["prompt"].endswith("<think>\nso ")
    assert (
        found.splice_point.overlap,
        found.splice_point.sent_tokens - found.splice_point.prefix_tokens,
    ) == ("it", 2)
    found = await way(Words(), said, step_back=False)
    assert found.body is not None
    assert found.body["prompt"].endswith("<think>\nso it")


async def test_ids_are_gone_on_from_where_they_make_the_text() -> None:
    said = Transcript(
        content_pieces=["be"],
        token_count=2,
        token_ids=[ord("b"), ord("e")],
        first_event={"id": "x"},
    )
    found = await way(Template(), said)
    assert found.body is not None
    assert found.body["prompt"] == [*map(ord, "[user]why[end][assistant]be")]
    assert (found.splice_point.prompt_tokens, found.splice_point.prefix_tokens) == (25, 2)
    said.token_ids.pop()
    found = await way(Template(), said)
    assert found.route.path == "/v1/chat/completions", "one is missing: on from the text"


async def test_an_answer_of_full_length_needs_nobody() -> None:
    found = await way(
        Template(),
        Transcript(content_pieces=list("a" * 200), token_count=200, first_event={"id": "x"}),
    )
    assert found.body is None
    assert found.final_events is not None
    assert b'"length"' in found.final_events


async def test_messages_with_pictures_go_on_by_their_own_dialect() -> None:
    picture = [{"type": "image", "source": {"type": "base64", "data": "eA=="}}]
    body = CHAT | {"messages": [{"role": "user", "content": picture}]}
    head = {"usage": {"input_tokens": 9, "cache_read_input_tokens": 3}}
    said = Transcript(
        content_pieces=["be"], token_count=2, first_event=head, open_blocks={0: "text"}
    )
    found = await plan_resume(Template().ask, ResumeInput(ROUTES["/v1/messages"], body, said))
    assert (found.route.path, found.splice_point.prompt_tokens) == ("/v1/messages", 12)
    assert found.body is not None
    assert found.body["messages"][-1] == {"role": "assistant", "content": "be"}


@pytest.mark.parametrize("path", PATHS)
@in_virtual_time
async def test_the_client_sees_nothing_of_the_ids_that_were_asked_for(
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
async def test_probabilities_that_the_client_asked_for_stay(tmp_path: Path) -> None:
    (one,) = nodes(1)
    async with proxy_over(tmp_path, one, resume="exact") as proxy:
        reply = await proxy.stream(logprobs=True, max_tokens=4)
        assert reply.body.count(b'"logprobs":{') == 4
        assert len(text_of(reply).split()) == 4
