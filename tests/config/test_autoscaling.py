from __future__ import annotations

from pathlib import Path

from tests.config.conftest import LoadNodes, Problems
from tests.each_case import each_case

NODE = "nodes: [{{name: a, url: 'http://h', standby: true, {}}}]\n"


def test_a_list_is_a_command(load_nodes: LoadNodes) -> None:
    hooks = "model: m, start: [vm, start, '${N}'], stop: {command: [vm, stop]}"
    (spec,) = load_nodes(NODE.format(hooks), N="7").nodes
    assert spec.start is not None
    assert spec.stop is not None
    assert spec.start.command == ("vm", "start", "7")
    assert spec.stop.command == ("vm", "stop")
    assert spec.autoscaled


def test_secrets_come_from_variables_and_files_and_are_not_shown(
    load_nodes: LoadNodes, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("from-file\n")
    headers = "headers_env: {Authorization: TOKEN}, headers_file: {X-Key: key}"
    hooks = f"model: m, start: {{url: 'http://c/on?x=1', {headers}}}, stop: [vm]"
    (spec,) = load_nodes(NODE.format(hooks), TOKEN="from-variable").nodes
    assert spec.start is not None
    secrets = {name: secret.get_secret_value() for name, secret in spec.start.secrets.items()}
    assert secrets == {"Authorization": "from-variable", "X-Key": "from-file"}
    assert "from-" not in repr(spec)
    assert "from-" not in spec.model_dump_json()


@each_case(
    ("text", "key", "message"),
    [
        ("start: [vm], stop: [vm]", "model", "is missing"),
        ("start: [vm]", "stop", "is missing"),
        ("stop: [vm]", "start", "is missing"),
        ("start: {}, stop: [vm]", "start.command", "does nothing"),
        ("start: [], stop: [vm]", "start", "does nothing"),
        ("start: {command: [vm], url: 'http://c'}, stop: [vm]", "start.url", "can't stand beside"),
        ("start: {url: 'ftp://c'}, stop: [vm]", "start.url", "must be an http or https URL"),
        ("start: {url: 'http://u:p@c'}, stop: [vm]", "start.url", "must not hold a user"),
        (
            "start: {url: 'http://c', headers_env: {A: B}}, stop: [vm]",
            "start.headers_env",
            "not set",
        ),
        (
            "start: {url: 'http://c', secrets: {A: b}}, stop: [vm]",
            "start.secrets",
            "must not stand",
        ),
    ],
)
def test_a_mistake_is_reported_with_its_key(
    nodes_problems: Problems, text: str, key: str, message: str
) -> None:
    model = "" if key == "model" else "model: m, "
    problem = nodes_problems(NODE.format(model + text))[0]
    assert problem.line == 1
    assert problem.key.startswith(f"nodes[0].{key}")
    assert message in problem.message


@each_case(
    ("text", "message"),
    [
        ("elastic: {min: 3, max: 2}", "elastic.max: must not be less than `min`"),
        ("elastic: {backoff: 20m}", "must not be less than `backoff`"),
        ("elastic: {start_abov: 3}", "did you mean start_above"),
    ],
)
def test_limits_must_fit_each_other(gateway_problems: Problems, text: str, message: str) -> None:
    (problem,) = gateway_problems(text)
    assert message in str(problem)
