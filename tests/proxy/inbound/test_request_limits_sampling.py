"""Options that make a node send or compute far more than their size are bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config.listeners import LimitSettings
from gateway.fleet.node import NodeState
from gateway.proxy.inbound.request_limits import ECHO_FACTOR, max_event_bytes
from gateway.proxy.sse import GROWTH_PER_EVENT, EventFramer
from gateway.transport.errors import InvalidResponse
from tests.each_case import each_case
from tests.gateways import running_gateway
from tests.proxy.inbound.test_edits import result
from tests.proxy.inbound.test_prepare import prepared, refused
from tests.proxy.proxy_over_nodes import BODIES, GENERATION_PATHS
from tests.servers import start_demo_servers

MIB = 1 << 20
HUGE: dict[str, Any] = {
    "stop": ["q" * 3 * MIB],
    "stop_sequences": ["q" * 5000],
    "logit_bias": [["x" * 100, 1.0]] * 1000,
    "response_fields": ["a/b"] * 20_000,
    "samplers": "t" * 60_000,
    "dry_sequence_breakers": [f"b{number}" for number in range(500)],
}


@each_case("path", GENERATION_PATHS)
@each_case("field", HUGE)
def test_options_that_a_node_echoes_are_bounded(path: str, field: str) -> None:
    body = {"model": "demo", **BODIES[path], field: HUGE[field]}
    assert refused(body, path) == (400, "invalid_request", field)


def test_a_refusal_names_the_setting() -> None:
    body = {"model": "demo", "prompt": "a", "stop": "q" * 5000}
    assert refused(body, "/completion")[0] == 400
    prepared(body, "/completion", stop_bytes=8192)


def test_samplers_are_few() -> None:
    body = {"model": "demo", "prompt": "a"}
    for value in ("d" * 33, ["dry"] * 33):
        assert refused(body | {"samplers": value}, "/completion")[2] == "samplers"
    for most in ("d" * 32, ["dry"] * 32, None, 1):
        prepared(body | {"samplers": most}, "/completion")


@each_case("value", [[{"type": 2, "value": "((.*)*)*b"}], {"type": 2}, "x", 1])
def test_a_grammar_trigger_is_refused(value: Any) -> None:
    body = {"model": "demo", "prompt": "a", "grammar_lazy": True, "grammar_triggers": value}
    assert refused(body, "/completion") == (400, "invalid_request", "grammar_triggers")


def test_usual_options_pass() -> None:
    body = {
        "model": "demo",
        "prompt": "a",
        "stop": ["\n\n", "User:", "</s>"],
        "logit_bias": {str(token): -100 for token in range(300)},
        "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
        "dry_sequence_breakers": ["\n", ":", '"', "*"],
        "grammar_triggers": [],
    }
    prepared(body, "/completion")


@each_case("value", [65, 100_000, 100_000.5, 1e300, 1 << 70])
def test_a_number_of_logprobs_is_bounded(value: float) -> None:
    assert result({"logprobs": value}) == {"logprobs": 64}
    assert result({"logprobs": value, "n_probs": value, "top_logprobs": value}) == {
        "logprobs": 64,
        "n_probs": 64,
        "top_logprobs": 64,
    }


@each_case("value", [True, False, None, 0, 5, 64, -1])
def test_other_logprobs_stay_as_they_are(value: object) -> None:
    assert result({"logprobs": value}) == {"logprobs": value}


@pytest.mark.parametrize("value", ["100000", [5], {"n": 5}])
def test_logprobs_are_a_number_or_a_switch(value: object) -> None:
    body = {"model": "demo", "prompt": "a", "logprobs": value}
    assert refused(body, "/v1/completions") == (400, "invalid_request", "logprobs")


def test_a_larger_request_may_cause_larger_events() -> None:
    limits = LimitSettings()
    assert max_event_bytes(100, limits, logprobs=False) == MIB + ECHO_FACTOR * 100
    assert max_event_bytes(64 * MIB, limits, logprobs=False) == limits.response_bytes
    assert max_event_bytes(100, limits, logprobs=True) == limits.response_bytes


@each_case(
    ("field", "value", "logprobs"),
    [
        ("logprobs", True, True), ("logprobs", 5, True), ("n_probs", 1, True),
        ("top_logprobs", 2, True), ("logprobs", False, False), ("logprobs", None, False),
        ("n_probs", 0, False), ("stop", "a", False),
    ],
)  # fmt: skip
def test_a_request_for_logprobs_is_recognised(field: str, value: object, logprobs: bool) -> None:
    body = {"model": "demo", "prompt": "a", field: value}
    assert prepared(body, "/completion").logprobs is logprobs


def test_an_event_may_be_larger_after_many() -> None:
    framer = EventFramer(64, ceiling=4 * GROWTH_PER_EVENT)
    framer.feed(b"data: {}\n\n" * 3)
    framer.feed(b"data: " + (3 * GROWTH_PER_EVENT) * b"x")
    framer.feed(b"\n\n")
    with pytest.raises(InvalidResponse, match=str(4 * GROWTH_PER_EVENT)):
        framer.feed(b"data: " + 5 * GROWTH_PER_EVENT * b"x")


LOUD: list[dict[str, Any]] = [
    {"stop": ["q" * 3 * MIB]},
    {"logprobs": 100_000},
    {"grammar": "root ::= [a-z]* # " + "x" * 120_000, "verbose": True},
    {"logit_bias": [["abcdefgh" * 400, 1.5]] * 20, "verbose": True},
    {"samplers": "t" * 60_000},
    {"n_probs": 1000, "stop": ["q" * 4000], "grammar": 'root ::= "q"*', "n_predict": 300},
    {"grammar_lazy": True, "grammar": 'root ::= "q"*',
     "grammar_triggers": [{"type": 2, "value": "((.*)*)*b{5}$"}]},
    {"dry_multiplier": 0.8, "dry_sequence_breakers": [f"b{n}" for n in range(5000)]},
]  # fmt: skip


@pytest.mark.real
@pytest.mark.slow
async def test_no_request_makes_real_servers_fail(tmp_path: Path) -> None:
    async with start_demo_servers(2) as urls, running_gateway(tmp_path, urls) as running:
        nodes = running.gateway.fleet.nodes.values()
        for extra in LOUD:
            for path in ("/completion", "/v1/completions", "/v1/chat/completions"):
                body = {**BODIES[path], "max_tokens": 40, "stream": True, **extra}
                reply = await running.client.post(path, content=json.dumps(body))
                assert reply.status_code in {200, 400}, reply.text[:300]
                assert '"error"' not in reply.text or reply.status_code == 400
                assert all(node.state is NodeState.READY for node in nodes)
                assert all(not node.circuit.suspect_callers for node in nodes)
