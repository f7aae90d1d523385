from __future__ import annotations

import json
from typing import Any

from tests.chaos.client import ReceivedResponse
from tests.chaos.verdict import judge
from tests.chaos.workload import WorkloadRequest
from tests.each_case import each_case

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
ERROR = (
    'data: {"error": {"message": "The node failed.", "type": "server_error", '
    '"code": "node_failed"}}\n\n'
)


def streamed(body: str | bytes, **more: Any) -> ReceivedResponse:
    data = body.encode() if isinstance(body, str) else body
    headers = {"content-type": "text/event-stream"}
    return ReceivedResponse(200, headers, bytearray(data), complete=True, **more)


def plain(value: Any, status: int = 200, **headers: str) -> ReceivedResponse:
    names = {name.replace("_", "-"): text for name, text in headers.items()}
    head = {"content-type": "application/json", **names}
    return ReceivedResponse(status, head, bytearray(json.dumps(value).encode()), complete=True)


def answer(text: str, tokens: int = 2) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}}], "usage": {"completion_tokens": tokens}}


ERRING = {"error": {"message": "no", "type": "server_error", "code": "node_failed"}}


@each_case(
    ("got", "outcome"),
    [
        (streamed(WHOLE), "whole"),
        (streamed(":\n" + WHOLE.replace("\n\n", "\n\n:\n", 2)), "whole"),
        (streamed(ROLE + ONE + ERROR), "event node_failed"),
        (plain(ERRING, 502, x_gateway_reason="node_failed"), "error 502 node_failed"),
        (ReceivedResponse(200, {}, bytearray(ROLE.encode()), left=True), "left"),
    ],
)
def test_a_valid_response_or_an_allowed_error_is_no_violation(
    got: ReceivedResponse, outcome: str
) -> None:
    judged = judge(ASK, got)
    assert (judged.outcome, judged.problem) == (outcome, None)


@each_case(
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
        ReceivedResponse(200, {}, bytearray(WHOLE.encode()), broke="reset"),
        plain(answer(" one two")),
        plain(ERRING, 502),
        plain(ERRING, 418, x_gateway_reason="node_failed"),
        plain(ERRING, 503, x_gateway_reason="no_node"),
        plain({}, 502, x_gateway_reason="node_failed"),
    ],
)
def test_every_other_response_is_a_violation(got: ReceivedResponse) -> None:
    assert judge(ASK, got).problem is not None


def test_a_plain_answer_is_compared_by_text_and_token_count() -> None:
    assert judge(PLAIN, plain(answer(" one two"))).problem is None
    assert judge(PLAIN, plain(answer(" one"))).problem is not None
    assert judge(PLAIN, plain(answer(" one two", tokens=3))).problem is not None
    assert judge(PLAIN, plain("oops")).problem is not None


def test_a_cut_response_differs_from_a_client_that_was_not_accepted() -> None:
    assert judge(ASK, ReceivedResponse(broke="closed")).outcome == "broke"
    assert (
        judge(ASK, ReceivedResponse(200, {}, bytearray(ROLE.encode()), broke="closed")).outcome
        == "cut"
    )
