from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.chaos.client import ReceivedResponse
from tests.chaos.gateway_worker import REQUEST_OBJECTS, live_request_objects
from tests.chaos.soak import trend
from tests.chaos.verdict import judge
from tests.chaos.workload import WorkloadRequest
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import chat
from tests.gateways import running_gateway

PATH = "/v1/chat/completions"
ASK = WorkloadRequest(PATH, {"stream": True}, " one two", 2)
PLAIN = WorkloadRequest(PATH, {}, " one two", 2)


def event(delta: dict[str, Any], finish: str | None = None, ident: str = "x") -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({'id': ident, 'choices': [choice]})}\n\n"


ROLE = event({"role": "assistant", "content": None})
ONE, TWO = event({"content": " one"}), event({"content": " two"})
FINISH, DONE = event({}, "length"), "data: [DONE]\n\n"
WHOLE = ROLE + ONE + TWO + FINISH + DONE
FAILURE = {"error": {"message": "no", "type": "server_error", "code": "node_failed"}}
ERROR = f"data: {json.dumps(FAILURE)}\n\n"


def streamed(body: str | bytes) -> ReceivedResponse:
    data = body.encode() if isinstance(body, str) else body
    headers = {"content-type": "text/event-stream"}
    return ReceivedResponse(200, headers, bytearray(data), complete=True)


def plain(value: Any, status: int = 200, reason: str = "") -> ReceivedResponse:
    head = {"content-type": "application/json"} | ({"x-gateway-reason": reason} if reason else {})
    return ReceivedResponse(status, head, bytearray(json.dumps(value).encode()), complete=True)


def answer(text: str, tokens: int = 2) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}}], "usage": {"completion_tokens": tokens}}


@each_case(
    ("asked", "got", "outcome"),
    [
        (ASK, streamed(WHOLE), "whole"),
        (ASK, streamed(":\n" + WHOLE.replace("\n\n", "\n\n:\n", 2)), "whole"),
        (ASK, streamed(ROLE + ONE + ERROR), "event node_failed"),
        (ASK, plain(FAILURE, 502, "node_failed"), "error 502 node_failed"),
        (ASK, ReceivedResponse(200, {}, bytearray(ROLE.encode()), left=True), "left"),
        (PLAIN, plain(answer(" one two")), "whole"),
    ],
)
def test_a_valid_response_or_an_allowed_error_is_no_violation(
    asked: WorkloadRequest, got: ReceivedResponse, outcome: str
) -> None:
    judged = judge(asked, got)
    assert (judged.outcome, judged.problem) == (outcome, None)


@each_case(
    ("asked", "got"),
    [
        *(
            (ASK, streamed(body))
            for body in (
                *(ROLE + ONE, WHOLE[:-1], WHOLE + DONE, WHOLE + ERROR, ROLE + ONE + ERROR + DONE),
                *(ROLE + ROLE + ONE + TWO + FINISH + DONE, ROLE + ONE + FINISH + DONE),
                *(ROLE + ONE + ONE + TWO + FINISH + DONE, ROLE + ONE + TWO + DONE),
                ROLE + ONE + event({"content": " two"}, ident="y") + FINISH + DONE,
                *(ROLE + TWO + ERROR, ROLE + "data: {oops\n\n" + ONE + TWO + FINISH + DONE),
                WHOLE.encode()[:300] + b"\xff\xfe" + WHOLE.encode()[300:],
                "event: error\n" + ROLE,
            )
        ),
        (ASK, ReceivedResponse(200, {}, bytearray(WHOLE.encode()), broke="reset")),
        (ASK, plain(answer(" one two"))),
        (ASK, plain(FAILURE, 502)),
        (ASK, plain(FAILURE, 418, "node_failed")),
        (ASK, plain(FAILURE, 503, "no_node")),
        (ASK, plain({}, 502, "node_failed")),
        *((PLAIN, plain(value)) for value in (answer(" one"), answer(" one two", 3), "oops")),
    ],
)
def test_every_other_response_is_a_violation(asked: WorkloadRequest, got: ReceivedResponse) -> None:
    assert judge(asked, got).problem is not None


def test_growth_is_distinguished_from_noise() -> None:
    rng = random.Random(1)
    noise = [(float(t), 100 + rng.uniform(-1, 1)) for t in range(600)]
    growing = [(t, value + t / 50) for t, value in noise]
    warming = [(t, value - max(0.0, 100 - t)) for t, value in noise]
    spiked = [(t, 1000.0 if t == 590 else value) for t, value in noise]
    flat = [trend(one).is_flat(share=0.02, least=0.5) for one in (noise, growing, warming, spiked)]
    assert flat == [True, False, True, True]


async def test_the_leak_check_finds_the_objects_of_a_running_request(tmp_path: Path) -> None:
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url]) as running:
        node.faults.next("hang", after_events=2)
        async with running.client.stream("POST", PATH, json=chat()) as response:
            await anext(response.aiter_bytes())
            assert set(live_request_objects()) == set(REQUEST_OBJECTS)
