from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.errors import ConfigError
from gateway.config.inventory import NodeSpec, load_inventory
from gateway.config.settings import load_settings
from tests.each_case import each_case

NODE = "nodes: [{name: a, url: 'http://h', standby: true, model: m, "


def node(folder: Path, text: str, **env: str) -> NodeSpec:
    (folder / "nodes.yaml").write_text(f"{NODE}{text}}}]\n")
    (found,) = load_inventory(folder / "nodes.yaml", env).nodes
    return found


def problem(folder: Path, text: str, **env: str) -> str:
    with pytest.raises(ConfigError) as error:
        node(folder, text, **env)
    return str(error.value)


def test_a_list_is_a_command(tmp_path: Path) -> None:
    spec = node(tmp_path, "start: [vm, start, '${N}'], stop: {command: [vm, stop]}", N="7")
    assert spec.start is not None
    assert spec.stop is not None
    assert spec.start.command == ("vm", "start", "7")
    assert spec.stop.command == ("vm", "stop")
    assert spec.autoscaled


def test_secrets_come_from_variables_and_files_and_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-file\n")
    call = (
        "{url: 'http://c/on?x=1', headers_env: {Authorization: TOKEN}, headers_file: {X-Key: key}}"
    )
    spec = node(tmp_path, f"start: {call}, stop: [vm]", TOKEN="from-variable")
    assert spec.start is not None
    secrets = {name: secret.get_secret_value() for name, secret in spec.start.secrets.items()}
    assert secrets == {"Authorization": "from-variable", "X-Key": "from-file"}
    assert "from-" not in repr(spec)
    assert "from-" not in spec.model_dump_json()


@each_case(
    ("text", "key", "message"),
    [
        ("start: [vm]", "stop", "is missing"),
        ("stop: [vm]", "start", "is missing"),
        ("start: {}, stop: [vm]", "start.command", "does nothing"),
        ("start: [], stop: [vm]", "start", "does nothing"),
        ("start: {command: [vm], url: 'http://c'}, stop: [vm]", "start.url", "can't stand beside"),
        ("start: {url: 'ftp://c'}, stop: [vm]", "start.url", "must be an http or https URL"),
        ("start: {url: 'http://u:p@c'}, stop: [vm]", "start.url", "must not hold a user"),
        (
            "start: {url: 'http://c', headers_env: {Authorization: NONE}}, stop: [vm]",
            "start.headers_env",
            "the variable NONE is not set",
        ),
        (
            "start: {url: 'http://c', secrets: {A: b}}, stop: [vm]",
            "start.secrets",
            "must not stand in this file",
        ),
    ],
)
def test_a_mistake_is_reported_with_its_key(
    tmp_path: Path, text: str, key: str, message: str
) -> None:
    found = problem(tmp_path, text)
    assert f"nodes.yaml:1: nodes[0].{key}" in found
    assert message in found


def test_a_node_that_is_started_on_demand_must_name_its_models(tmp_path: Path) -> None:
    text = "nodes: [{name: a, url: 'http://h', standby: true, start: [vm], stop: [vm]}]"
    (tmp_path / "nodes.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"nodes\[0\].model: is missing"):
        load_inventory(tmp_path / "nodes.yaml", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("elastic: {min: 3, max: 2}", "elastic.max: must not be less than `min`"),
        ("elastic: {backoff: 20m}", "must not be less than `backoff`"),
        ("elastic: {start_abov: 3}", "did you mean start_above"),
    ],
)
def test_limits_must_fit_each_other(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "gateway.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_settings(tmp_path / "gateway.yaml", {})
    assert message in str(error.value)
