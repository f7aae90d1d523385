"""The route table: each path's API, and which plain responses can be assembled from streams."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.request.body import parse_body
from gateway.request.preparation import can_assemble, is_infill
from gateway.request.routes import NATIVE_ROUTE, ROUTES
from tests.each_case import each_case
from tests.forward import proxy_over_nodes

BODIES = proxy_over_nodes.BODIES | {"/infill": {"input_prefix": "hello"}}


def test_every_path_that_generates_says_where_its_prompt_and_limit_are() -> None:
    for route in ROUTES.values():
        if route.generates:
            assert route.prompt_field in BODIES[route.path]
            assert route.api.max_tokens_fields
    assert NATIVE_ROUTE.path == "/completion"


def assembles(path: str, slots: int = 1, **more: Any) -> bool:
    body = msgspec.json.encode(BODIES.get(path, {}) | more)
    return can_assemble(ROUTES[path], body, parse_body(body).messages, slots)


@each_case("path", BODIES)
def test_plain_responses_are_assembled_from_streams(path: str) -> None:
    assert assembles(path)
    for field in ("response_fields", "return_progress", "timings_per_token", "verbose", "echo"):
        assert not assembles(path, **{field: True})


def test_several_answers_are_assembled_only_where_events_tell_them_apart() -> None:
    assert [path for path in BODIES if assembles(path, slots=2)] == ["/v1/chat/completions"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_plain_response_that_repeats_the_last_message_is_not_assembled(path: str) -> None:
    begun = {"role": "assistant", "content": "a"}
    assert not assembles(path, messages=[*proxy_over_nodes.MESSAGES, begun])
    assert assembles(path, messages=[*proxy_over_nodes.MESSAGES, begun, *proxy_over_nodes.MESSAGES])
    assert not assembles(path, messages=["assistant"])


@each_case(
    ("path", "body", "infill"),
    [
        ("/infill", b'{"input_prefix":"a"}', True),
        ("/v1/completions", b'{"prompt":"a","suffix":"b"}', True),
        ("/completion", b'{"prompt":"a","suffix":"\\u0062"}', True),
        ("/v1/completions", b'{"prompt":"a"}', False),
        ("/v1/completions", b'{"prompt":"a","suffix":""}', False),
        ("/v1/completions", b'{"prompt":"a","suffix":null}', False),
        ("/v1/chat/completions", b'{"messages":[],"suffix":"b"}', False),
    ],
)
def test_a_suffix_makes_a_completion_an_infill(path: str, body: bytes, infill: bool) -> None:
    assert is_infill(ROUTES[path], parse_body(body)) is infill
