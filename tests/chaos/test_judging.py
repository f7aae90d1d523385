"""What breaks a promise is found, whatever way it takes; what keeps it is let be."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.chaos import asks
from tests.chaos.asks import Ask
from tests.chaos.client import Got
from tests.chaos.flatness import flatness
from tests.chaos.judging import judge
from tests.chaos.schedule import GATEWAY, MACHINE, schedule

PATH = "/v1/chat/completions"
ASK = Ask(PATH, {"stream": True}, " one two", 2)
PLAIN = Ask(PATH, {}, " one two", 2)


def event(delta: dict[str, Any], finish: str | None = None, ident: str = "x") -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({'id': ident, 'choices': [choice]})}\n\n"


ROLE = event({"role": "assistant", "content": None})
ONE, TWO = event({"content": " one"}), event({"content": " two"})
FINISH, DONE = event({}, "length"), "data: [DONE]\n\n"
WHOLE = ROLE + ONE + TWO + FINISH + DONE
ERROR = (
    'data: {"error": {"message": "The node failed.", "type": "server_error", '
    '"code": "node_failed"}}\n\n'
)


def streamed(body: str | bytes, **more: Any) -> Got:
    data = body.encode() if isinstance(body, str) else body
    headers = {"content-type": "text/event-stream"}
    return Got(200, headers, bytearray(data), complete=True, **more)


def plain(value: Any, status: int = 200, **headers: str) -> Got:
    names = {name.replace("_", "-"): text for name, text in headers.items()}
    head = {"content-type": "application/json", **names}
    return Got(status, head, bytearray(json.dumps(value).encode()), complete=True)


def answer(text: str, tokens: int = 2) -> dict[str, Any]:
    return {
        "choices": [{"message": {"content": text}}],
        "usage": {"completion_tokens": tokens},
    }


ERRING = {"error": {"message": "no", "type": "server_error", "code": "node_failed"}}


@pytest.mark.parametrize(
    ("got", "outcome"),
    [
        (streamed(WHOLE), "whole"),
        (streamed(":\n" + WHOLE.replace("\n\n", "\n\n:\n", 2)), "whole"),
        (streamed(ROLE + ONE + ERROR), "event node_failed"),
        (plain(ERRING, 502, x_gateway_reason="node_failed"), "error 502 node_failed"),
        (Got(200, {}, bytearray(ROLE.encode()), left=True), "left"),
    ],
)
def test_what_keeps_the_promise_is_let_be(got: Got, outcome: str) -> None:
    judged = judge(ASK, got)
    assert (judged.outcome, judged.problem) == (outcome, None)


@pytest.mark.parametrize(
    "got",
    [
        streamed(ROLE + ONE),
        streamed(WHOLE[:-1]),
        streamed(WHOLE + DONE),
        streamed(WHOLE + ERROR),
        streamed(ROLE + ONE + ERROR + DONE),
        streamed(ROLE + ROLE + ONE + TWO + FINISH + DONE),
        streamed(ROLE + ONE + FINISH + DONE),
        streamed(ROLE + ONE + ONE + TWO + FINISH + DONE),
        streamed(ROLE + ONE + TWO + DONE),
        streamed(ROLE + ONE + event({"content": " two"}, ident="y") + FINISH + DONE),
        streamed(ROLE + TWO + ERROR),
        streamed(ROLE + "data: {oops\n\n" + ONE + TWO + FINISH + DONE),
        streamed(WHOLE.encode()[:300] + b"\xff\xfe" + WHOLE.encode()[300:]),
        streamed("event: error\n" + ROLE),
        Got(200, {}, bytearray(WHOLE.encode()), broke="reset"),
        plain(answer(" one two")),
        plain(ERRING, 502),
        plain(ERRING, 418, x_gateway_reason="node_failed"),
        plain(ERRING, 503, x_gateway_reason="no_node"),
        plain({}, 502, x_gateway_reason="node_failed"),
    ],
)
def test_what_breaks_it_is_found(got: Got) -> None:
    assert judge(ASK, got).problem is not None


def test_a_plain_answer_is_held_against_its_text_and_its_tokens() -> None:
    assert judge(PLAIN, plain(answer(" one two"))).problem is None
    assert judge(PLAIN, plain(answer(" one"))).problem is not None
    assert judge(PLAIN, plain(answer(" one two", tokens=3))).problem is not None
    assert judge(PLAIN, plain("oops")).problem is not None


def test_a_seed_says_what_happens() -> None:
    def of(seed: int, *, machine: bool = True) -> list[str]:
        rng = random.Random(seed)
        return [str(one) for one in schedule(rng, 20.0, ["a", "b"], ["r"], machine=machine)]

    assert of(1) == of(1) != of(2)
    kinds = {line.split()[1] for seed in range(40) for line in of(seed)}
    assert kinds >= {"once", "standing", "process", "stop", "wire", *MACHINE}
    assert any(one in " ".join(of(seed)) for seed in range(40) for one in GATEWAY)
    mild = {line.split()[1] for seed in range(40) for line in of(seed, machine=False)}
    assert not mild & set(MACHINE)


def test_asks_follow_from_a_seed_and_no_two_prompts_are_the_same() -> None:
    first, again = random.Random(3), random.Random(3)
    made = [asks.emulated(first, seed=str(n)) for n in range(200)]
    assert made == [asks.emulated(again, seed=str(n)) for n in range(200)]
    prompts = {json.dumps({**ask.body, "stream": None}, sort_keys=True) for ask in made}
    assert len(prompts) == 200


def test_growth_is_told_from_noise() -> None:
    rng = random.Random(1)
    noise = [(float(t), 100 + rng.uniform(-1, 1)) for t in range(600)]
    assert flatness(noise).flat(share=0.02, least=0.5)
    growing = [(t, value + t / 50) for t, value in noise]
    assert not flatness(growing).flat(share=0.02, least=0.5)
    warming = [(t, value - max(0.0, 100 - t)) for t, value in noise]
    assert flatness(warming).flat(share=0.02, least=0.5)
    spiked = [(t, 1000.0 if t == 590 else value) for t, value in noise]
    assert flatness(spiked).flat(share=0.02, least=0.5)


def test_a_reply_that_is_cut_is_told_from_a_client_that_was_not_taken() -> None:
    assert judge(ASK, Got(broke="closed")).outcome == "broke"
    assert judge(ASK, Got(200, {}, bytearray(ROLE.encode()), broke="closed")).outcome == "cut"
