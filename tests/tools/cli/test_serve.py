from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import gateway.process
from gateway.startup import Options, StartError
from tests.tools.cli.running import run


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Options]:
    """The options that the gateway would run with; it does not run."""
    seen: list[Options] = []

    def start(options: Options) -> int:
        seen.append(replace(options, restart_command=()))
        return 3

    monkeypatch.setattr(gateway.process, "run", start)
    monkeypatch.chdir(tmp_path)
    return seen


def test_without_flags_the_files_decide(given: list[Options]) -> None:
    assert run("serve").status == 3
    assert given == [Options(inventory_file=Path("config/nodes.yaml"))]


def test_the_default_settings_file_is_used_if_it_exists(given: list[Options]) -> None:
    Path("config").mkdir()
    Path("config/gateway.yaml").touch()
    run("serve")
    assert given[0].settings_file == Path("config/gateway.yaml")


def test_a_named_settings_file_is_used_even_if_missing(given: list[Options]) -> None:
    run("serve", "--config", "missing.yaml")
    assert given[0].settings_file == Path("missing.yaml")


def test_a_flag_beats_the_environment(
    given: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "NODES": "env.yaml",
        "CONFIG": "env-settings.yaml",
        "HOST": "10.0.0.1",
        "PORT": "9000",
        "ADMIN_HOST": "10.0.0.2",
        "ADMIN_PORT": "9001",
        "ADMIN_KEY_FILE": "env.key",
    }.items():
        monkeypatch.setenv(f"LLAMA_GATEWAY_{name}", value)
    run("serve", "--port", "9100", "--admin-host", "::1", "--allow-anonymous")
    assert given == [
        Options(
            inventory_file=Path("env.yaml"),
            settings_file=Path("env-settings.yaml"),
            host="10.0.0.1",
            port=9100,
            admin_host="::1",
            admin_port=9001,
            admin_key_file=Path("env.key"),
            allow_anonymous=True,
        )
    ]


@pytest.mark.parametrize("status", [1, 2])
def test_a_start_error_is_one_line_on_stderr(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    def refuse(_: Options) -> int:
        raise StartError("the port is taken", status)

    monkeypatch.setattr(gateway.process, "run", refuse)
    ran = run("serve")
    assert (ran.status, ran.out, ran.err) == (status, "", "error: the port is taken\n")


@pytest.mark.parametrize("arguments", [("--port", "99999"), ("--port", "x"), ("--bogus",)])
def test_wrong_usage_is_2_and_starts_nothing(
    given: list[Options], arguments: tuple[str, ...]
) -> None:
    ran = run("serve", *arguments)
    assert (ran.status, given) == (2, [])
    assert "Traceback" not in ran.err


def test_a_successor_is_started_by_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Options] = []

    def start(options: Options) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(gateway.process, "run", start)
    run("serve", "--port", "9100")
    assert seen[0].restart_command[-3:] == ("serve", "--port", "9100")
