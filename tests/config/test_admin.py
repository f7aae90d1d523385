from __future__ import annotations

from tests.config.conftest import LoadSettings, Problems
from tests.each_case import each_case

HASH = "0123456789abcdef" * 4


def entry(name: str = "a", sha256: str = HASH, role: str = "viewer") -> str:
    return f"{{id: {name}, sha256: {sha256}, role: {role}}}"


def test_keys_and_roles_are_read_and_hashes_are_not_shown(load_gateway: LoadSettings) -> None:
    (key,) = load_gateway(f"admin: {{keys: [{entry('a', HASH.upper(), 'Operator')}]}}").admin.keys
    assert (key.id, key.sha256, key.role) == ("a", HASH, "operator")
    assert HASH not in repr(key)


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


def test_a_duplicate_id_is_reported_with_both_lines(gateway_problems: Problems) -> None:
    problems = gateway_problems(f"admin:\n  keys:\n    - {entry()}\n    - {entry()}\n")
    messages = {(problem.line, problem.key): problem.message for problem in problems}
    assert "line 3" in messages[4, "admin.keys[1].id"]
