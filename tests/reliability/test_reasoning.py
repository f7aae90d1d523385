"""Streams of real servers, cut anywhere: the client sees them uninterrupted."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI

from gateway.api import sse
from gateway.events import StreamResumed
from gateway.local.demo_model import CHAT_TEMPLATE, DEMO_SHAPES, Token, TokenType, write_model
from tests.gateways import Running, running_gateway
from tests.reliability.cutting_proxy import CutPlan, cutting_proxies
from tests.servers import start_demo_servers

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS: dict[str, Any] = {
    "health": {"interval": 0.5, "timeout": 60, "failures": 1_000_000, "slow_start": 0.0},
    "timeouts": {"connect": 60, "silence": 120, "first_byte": 120},
    "retries": {"backoff": 0.0, "quarantine": 0, "budget_min": 1000},
}

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"stream_options": {"include_usage": True}},
    "/v1/messages": {},
}
TOKENS = 20
HALF_A_WORD = 2
QUESTIONS = [("Hello there", False, 6), ("winter", False, 2), ("winter", True, 6)]
"""Prompt, whether the answer ends at a stop sequence, and the step between two cuts in events.

The answer to the first consists of reasoning alone. The second is cut everywhere: with text tokens
as marks at the odd events of an API, with control tokens at the even ones, or the reverse.
"""
CLOSED = -14.0
"""Logit penalty of the closing mark, so that the reasoning has some ten words."""
OPENED = "{{- '<|im_start|>assistant\\n' }}"
CONTENT = "{%- if message.content %}"
THOUGHT = (
    "{%- if message.reasoning_content %}"
    "{{- '<think>\\n' + message.reasoning_content + '</think>' }}{%- endif %}"
)


@pytest.fixture(
    scope="module", params=[TokenType.USER_DEFINED, TokenType.CONTROL], ids=["text", "control"]
)
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The demo model with reasoning: its template opens it, and the model closes it.

    The marks are tokens that are written as text (USER_DEFINED), or not (CONTROL).
    """
    marks = [Token(text, 0.0, request.param) for text in ("<think>", "</think>")]
    template = CHAT_TEMPLATE
    assert OPENED in template
    assert CONTENT in template
    template = template.replace(OPENED, OPENED.replace("\\n'", "\\n<think>\\n'"))
    path = tmp_path_factory.mktemp("model") / f"{request.param.name}.gguf"
    write_model(
        path,
        DEMO_SHAPES["small"],
        more_tokens=marks,
        more_penalties={"</think>": CLOSED},
        chat_template=template.replace(CONTENT, THOUGHT + CONTENT),
    )
    return path


async def streamed(running: Running, path: str, words: str, stop: str | None) -> list[Any]:
    body = BODIES[path] | {"messages": [{"role": "user", "content": words}]}
    body |= {"stream": True, "temperature": 0, "max_tokens": TOKENS}
    if stop:
        body["stop_sequences" if path == "/v1/messages" else "stop"] = [stop]
    async with running.client.stream("POST", path, json=body) as reply:
        data = [sse.payload(event) for event in sse.split(await reply.aread())]
    return [msgspec.json.decode(one) for one in data if one and one != b"[DONE]"]


def as_client_sees(values: list[Any]) -> list[Any]:
    """What a client sees of a stream, with consecutive texts joined."""
    found: list[Any] = []

    def add(*kind: Any, text: str) -> None:
        if found and found[-1][:-1] == kind:
            text = found.pop()[-1] + text
        found.append((*kind, text))

    for value in values:
        assert not value.get("error"), value
        if value.get("type") == "content_block_delta":
            kind, text = value["delta"].values()
            add(value["index"], kind, text=text)
        elif "type" in value:
            found.append([{**value, "message": None}])
        for choice in value.get("choices", ()):
            delta = choice["delta"]
            for name in ("role", "reasoning_content", "content"):
                if delta.get(name):
                    add(name, text=delta[name])
            if choice["finish_reason"]:
                add("end", text=choice["finish_reason"])
        if "choices" in value and value.get("usage"):
            found.append([{**value["usage"], "prompt_tokens_details": None}])
    return found


def told(values: list[Any], *names: str) -> str:
    """What of a stream has these names: its text, or its reasoning."""
    deltas = [value.get("delta") or {} for value in values]
    deltas += [choice["delta"] for value in values for choice in value.get("choices", ())]
    return "".join(delta.get(name) or "" for delta in deltas for name in names)


def reasoning_of(values: list[Any]) -> str:
    return told(values, "thinking", "reasoning_content")


def text_of(values: list[Any]) -> str:
    return told(values, "text", "content")


@pytest.mark.parametrize("path", BODIES)
async def test_a_reasoning_stream_is_resumed_anywhere(
    tmp_path: Path, path: str, model: Path
) -> None:
    plan = CutPlan()
    extra = ("--exact", "--model", str(model))
    async with (
        start_demo_servers(2, slots=1, extra=extra) as servers,
        cutting_proxies(servers, plan) as urls,
        running_gateway(tmp_path, urls, SETTINGS) as running,
    ):
        begin = 1 + ((model.stem == TokenType.CONTROL.name) is (path == "/v1/messages"))
        for words, with_stop, step in QUESTIONS:
            stop = None
            if with_stop:
                # From the middle of one word of the answer, which is a token, to that of another.
                text = text_of(await streamed(running, path, words, None))
                stop = " ".join(text.split(" ")[2:4])[HALF_A_WORD:-HALF_A_WORD]
            whole = await streamed(running, path, words, stop)
            assert reasoning_of(whole)
            assert bool(text_of(whole)) is (words != "Hello there")
            expected = as_client_sees(whole)
            for after in range(begin, len(whole), step):
                if with_stop and path != "/v1/messages" and after == len(whole) - 1:
                    continue  # the missing event has the tokens of the stop sequence
                cuts = plan.cuts
                plan.arm(after)
                assert as_client_sees(await streamed(running, path, words, stop)) == expected, after
                assert plan.cuts == cuts + 1


STREAMS = 20
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
WORDS = "tell me about the sea and stones in winter with songs of birds that fly over green hills"
FRAGMENTS = ("a", "s", "ing", "er", "e", " s", " w", "t")
"""Texts that tokenize differently when they are read as a prompt."""


def a_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path, and a body whose answer has word fragments."""
    text, path = (
        " ".join(rng.choices(WORDS.split(), k=rng.randint(3, 12))),
        rng.choice((CHAT, COMPLETION)),
    )
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    body = {"model": "demo", "temperature": 0, "max_tokens": rng.randint(20, 120), **asked}
    return path, {**body, "logit_bias": [[fragment, 4.0] for fragment in FRAGMENTS]}


def texts_of(values: list[Any]) -> list[str]:
    """The text of each event that has some."""
    choices = [choice for value in values for choice in value["choices"]]
    texts = [one.get("text") or (one.get("delta") or {}).get("content") for one in choices]
    return [text for text in texts if text]


async def from_server(
    server: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> tuple[str, int]:
    """Text and number of tokens of the server's own answer."""
    value = (await server.post(path, json=body)).raise_for_status().json()
    [choice] = value["choices"]
    text = choice["text"] if path == COMPLETION else choice["message"]["content"]
    return text, value["usage"]["completion_tokens"]


async def continuation(
    server: httpx.AsyncClient, path: str, body: dict[str, Any], sent: list[str]
) -> str:
    """What was sent, and the server's own continuation of that."""
    text, left = "".join(sent), {**body, "max_tokens": body["max_tokens"] - len(sent)}
    if path == COMPLETION:
        return text + (await from_server(server, path, left | {"prompt": body["prompt"] + text}))[0]
    messages = [*body["messages"], {"role": "assistant", "content": text}]
    found, _ = await from_server(server, path, left | {"messages": messages})
    return text + found.removeprefix(text)


@pytest.mark.parametrize(
    ("resume", "identical"), [pytest.param("exact", 100, marks=pytest.mark.smoke), ("text", 90)]
)
async def test_resumed_streams_of_word_fragments_are_identical(
    tmp_path: Path, resume: str, identical: int
) -> None:
    """With `text` not always, but then they are the second server's continuation."""
    rng, plan, resumed = random.Random(7), CutPlan(), list[str]()
    cut = same_text = same_usage = 0
    async with (
        start_demo_servers(2, slots=1, extra=("--exact",)) as urls,
        cutting_proxies(urls, plan) as proxies,
        httpx.AsyncClient(base_url=urls[0], timeout=300, trust_env=False) as server,
        running_gateway(tmp_path, proxies, {**SETTINGS, "resume": resume}) as running,
        AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        bus = running.gateway.bus
        bus.subscribe(StreamResumed, lambda event: resumed.append(event.resumed_on or ""))
        for _ in range(STREAMS):
            path, body = a_body(rng)
            whole, count = await from_server(server, path, body)
            # The first event of a chat has the role.
            plan.arm(rng.randint(2, body["max_tokens"] - 1), rng.choice((0, 0, 7, 90)))
            completions: Any = client.chat.completions if path == CHAT else client.completions
            asked = {"model": "demo", "stream": True, "messages" if path == CHAT else "prompt": []}
            more = {**body, "stream_options": {"include_usage": True}}
            stream = await completions.create(**asked, extra_body=more)
            values = [chunk.model_dump() async for chunk in stream]
            if plan.after is not None:
                plan.after = None
                continue  # it ended before its cut
            cut += 1
            text = "".join(texts_of(values))
            if text != whole:
                events = re.findall(rb"data: (\{.*\})\n\n", plan.passed)
                sent = texts_of([json.loads(event) for event in events])
                assert text == await continuation(server, path, body, sent)
            assert len({value["id"] for value in values}) == 1
            choices = [choice for value in values for choice in value["choices"]]
            assert choices[-1]["finish_reason"] in {"length", "stop"}
            same_text += text == whole
            same_usage += values[-1]["usage"]["completion_tokens"] == count
        bus.flush()
    assert cut > STREAMS * 0.9
    assert len(resumed) - resumed.count("") >= cut
    assert min(same_text, same_usage) >= identical * cut / 100
