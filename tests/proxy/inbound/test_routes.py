"""The table of the paths that reach a node."""

from __future__ import annotations

import pytest

from gateway.proxy.inbound.parsed_body import parse_body
from gateway.proxy.inbound.routes import ROUTES, is_infill


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
)
def test_openais_paths_do_without_their_v1(path: str) -> None:
    assert ROUTES[path.removeprefix("/v1")] is ROUTES[path]
    assert ROUTES[path].path == path


def test_only_a_path_that_generates_limits_its_tokens() -> None:
    for route in ROUTES.values():
        assert (route.max_tokens_field is not None) == route.generates
        assert route.takes_slot or not route.generates


@pytest.mark.parametrize(
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
