"""Reasoning streams of real servers, cut anywhere: the client sees them uninterrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.api import sse
from gateway.local.demo_model import CHAT_TEMPLATE, DEMO_SHAPES, Token, TokenType, write_model
from tests.gateways import Running, running_gateway
from tests.reliability.cuts import SETTINGS, Outcome, run_cuts
from tests.reliability.cutting_proxy import CutPlan, cutting_proxies
from tests.servers import start_demo_servers

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

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


def reasoning_of(values: list[Any]) -> str:
    deltas = [value.get("delta") or {} for value in values]
    deltas += [choice["delta"] for value in values for choice in value.get("choices", ())]
    return "".join(d.get("thinking") or d.get("reasoning_content") or "" for d in deltas)


def text_of(values: list[Any]) -> str:
    deltas = [value.get("delta") or {} for value in values]
    deltas += [choice["delta"] for value in values for choice in value.get("choices", ())]
    return "".join(d.get("text") or d.get("content") or "" for d in deltas)


@pytest.mark.parametrize("path", BODIES)
async def test_a_reasoning_stream_is_resumed_anywhere(
    tmp_path: Path, path: str, model: Path
) -> None:
    plan = CutPlan()
    retries = {"backoff": 0.0, "quarantine": 0, "budget_min": 1000}
    extra = ("--exact", "--model", str(model))
    async with (
        start_demo_servers(2, slots=1, extra=extra) as servers,
        cutting_proxies(servers, plan) as urls,
        running_gateway(tmp_path, urls, SETTINGS | {"retries": retries}) as running,
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


def check(outcome: Outcome, *, identical: int) -> None:
    assert outcome.wrong == []
    assert outcome.streams > STREAMS * 0.9
    assert outcome.resumed >= outcome.streams
    assert outcome.identical + outcome.other_continuation == outcome.streams
    assert outcome.identical >= identical * outcome.streams / 100
    assert outcome.usage_equal >= identical * outcome.streams / 100


async def test_resumed_streams_of_word_fragments_are_nearly_always_identical() -> None:
    check(await run_cuts(STREAMS, 7, "text", fragments=True), identical=90)


@pytest.mark.smoke
async def test_exactly_resumed_streams_are_always_identical() -> None:
    check(await run_cuts(STREAMS, 7, "exact", fragments=True), identical=100)
