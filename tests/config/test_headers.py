from __future__ import annotations

import json

from tests.config.conftest import LoadSettings, Problems
from tests.each_case import each_case

HEADERS = [
    ("Host", "makes its own"), ("content-length", "makes its own"), ("Connection", "makes its own"),
    ("Transfer-Encoding", "makes its own"), ("TE", "makes its own"), ("Upgrade", "makes its own"),
    ("content-encoding", "makes its own"), ("Authorization", "api_key_env"),
    ("X-API-Key", "api_key_env"), ("Cookie", "api_key_env"), ("Set-Cookie", "api_key_env"),
    ("Proxy-Authorization", "api_key_env"), ("X-Request-ID", "the gateway itself"),
    ("X-Priority", "the gateway itself"), ("X-Gateway-Node", "the gateway itself"),
    ("Access-Control-Allow-Origin", "the gateway itself"),
    ("X-Accel-Redirect", "the gateway itself"), ("X-Custom-*", "each name"), ("*", "each name"),
    ("two words", "such as"), ("colon:", "such as"), ("line\nbreak", "such as"), ("", "such as"),
    ("x" * 200, "such as"),
]  # fmt: skip


@each_case(("name", "remedy"), HEADERS)
def test_headers_that_may_never_pass_are_refused_with_the_remedy(
    gateway_problems: Problems, name: str, remedy: str
) -> None:
    listed = f"[X-Fine, {json.dumps(name)}]"
    problems = gateway_problems(f"headers: {{to_nodes: {listed}, to_clients: {listed}}}")
    assert [problem.key for problem in problems] == ["headers.to_nodes[1]", "headers.to_clients[1]"]
    assert all(remedy in problem.remedy for problem in problems)


def test_further_headers_are_named_one_or_many(load_gateway: LoadSettings) -> None:
    found = load_gateway("headers: {to_nodes: X-Team, to_clients: [X-A, x-b]}").headers
    assert (found.to_nodes, found.to_clients) == (("X-Team",), ("X-A", "x-b"))
