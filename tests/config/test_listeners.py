from __future__ import annotations

import json
from pathlib import Path

from tests.config.conftest import LoadSettings, Problems
from tests.each_case import each_case

HASH = "0123456789abcdef" * 4


def entry(name: str = "a", sha256: str = HASH, role: str = "viewer") -> str:
    return f"{{id: {name}, sha256: {sha256}, role: {role}}}"


def test_keys_are_read_and_their_hashes_are_not_shown(load_gateway: LoadSettings) -> None:
    (key,) = load_gateway(f"keys: [{{id: a, sha256: {HASH.upper()}, models: m}}]").keys
    assert (key.id, key.sha256, key.name, key.models) == ("a", HASH, "", ("m",))
    own = entry("a", HASH.upper(), "Operator")
    (admin_key,) = load_gateway(f"admin: {{keys: [{own}]}}").admin.keys
    assert (admin_key.id, admin_key.sha256, admin_key.role) == ("a", HASH, "operator")
    assert HASH not in repr(key) + repr(admin_key)


def test_files_start_in_the_folder_of_the_settings(
    load_gateway: LoadSettings, tmp_path: Path
) -> None:
    for name in ("cert.pem", "key.pem", "admin.key"):
        (tmp_path / name).write_text("x")
    settings = load_gateway(
        "listen: {tls: {cert: cert.pem, key: key.pem}}\n"
        "admin: {key_file: admin.key, tls: {cert: cert.pem, key: key.pem}}"
    )
    for tls in (settings.listen.tls, settings.admin.tls):
        assert tls is not None
        assert (tls.cert, tls.key) == (tmp_path / "cert.pem", tmp_path / "key.pem")
    assert settings.admin.key_file == tmp_path / "admin.key"


def test_a_duplicate_id_is_reported_with_both_lines(gateway_problems: Problems) -> None:
    text = f"keys:\n  - id: a\n    sha256: {HASH}\n  - id: a\n    sha256: short\n"
    problems = gateway_problems(text)
    assert [(p.line, p.key) for p in problems] == [(4, "keys[1].id"), (5, "keys[1].sha256")]
    assert "line 2" in problems[0].message
    problems = gateway_problems(f"admin:\n  keys:\n    - {entry()}\n    - {entry()}\n")
    messages = {(problem.line, problem.key): problem.message for problem in problems}
    assert "line 3" in messages[4, "admin.keys[1].id"]


@each_case(
    ("text", "key"),
    [
        ("{id: a, sha256: HASH}", "admin.keys[0].role"),
        (entry(role="root"), "admin.keys[0].role"),
        (entry("with_underscore"), "admin.keys[0].id"),
        (entry(sha256="lg_a_secret"), "admin.keys[0].sha256"),
        *((entry(name), "admin.keys[0].id") for name in ("local", "File", "signal", "gateway")),
    ],
)
def test_a_wrong_key_is_reported_at_its_place(
    gateway_problems: Problems, text: str, key: str
) -> None:
    (problem,) = gateway_problems(f"admin: {{keys: [{text.replace('HASH', HASH)}]}}")
    assert problem.key == key
    assert "lg_a_secret" not in str(problem)


RESERVED = (
    *("Host", "content-length", "Connection", "Transfer-Encoding", "TE", "Upgrade"),
    *("content-encoding", "Authorization", "X-API-Key", "Cookie", "Set-Cookie"),
    *("Proxy-Authorization", "X-Request-ID", "X-Priority", "X-Gateway-Node"),
    *("Access-Control-Allow-Origin", "X-Accel-Redirect"),
)
HEADERS = [
    *((name, "a node's own key is named by its api_key_env") for name in RESERVED),
    *((name, "each name") for name in ("X-Custom-*", "*")),
    *((name, "such as") for name in ("two words", "colon:", "line\nbreak", "", "x" * 200)),
]


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
