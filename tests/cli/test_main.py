"""What all commands have in common: their help, their errors, shared options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import __version__
from gateway.config.stored import MOST_SECRET_BYTES, secret_bytes
from tests.cli.running import output, refusal, run, run_process
from tests.known import known


def test_it_is_also_a_module_and_keeps_its_exit_status(tmp_path: Path) -> None:
    ran = run_process(["check", "--nodes", str(tmp_path / "missing.yaml")])
    assert (ran.status, ran.out, "Traceback" in ran.err) == (2, "", False)
    assert run("--version").out == f"llama-gateway {__version__}\n"
    for command in ((), ("keys",)):
        assert refusal(*command).startswith("Usage: llama-gateway")


def test_help_and_completion_load_nothing_heavy() -> None:
    code = (
        "import sys, gateway.cli\n"
        "heavy = {'sqlalchemy', 'pydantic', 'httpx', 'uvicorn', 'starlette', 'yaml', 'structlog',"
        " 'asyncio', 'prometheus_client', 'numpy', 'rich'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    ran = run_process([], code=code)
    assert (ran.status, ran.err) == (0, "")


def test_a_shell_can_complete_commands() -> None:
    asked = {"COMP_WORDS": "llama-gateway no", "COMP_CWORD": "1"}
    ran = run_process([], {"_LLAMA_GATEWAY_COMPLETE": "complete_bash", **asked})
    assert ran.out.split() == ["nodes"]


def test_a_reader_that_leaves_early_is_no_crash() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "gateway", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        known(process.stdout).close()
        assert b"Traceback" not in known(process.stderr).read()


GROUPS = ["", "keys"]
COMMANDS = [
    *("up", "serve", "check", "nodes", "simulate", "topology", "tune"),
    *("keys hash", "keys create", "batch submit", "batch fetch"),
]


@pytest.mark.parametrize("columns", ["20", "80"])
@pytest.mark.parametrize("name", [*GROUPS, *COMMANDS])
def test_nothing_is_cut_from_a_help_however_narrow(
    name: str, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = name.split()
    monkeypatch.setenv("COLUMNS", "1000")
    whole = run(*command, "--help").out
    monkeypatch.setenv("COLUMNS", columns)
    shown = run(*command, "--help").out
    assert shown.split() == whole.split()
    options, _, typed = shown.partition("Examples:")
    assert "…" not in shown
    assert not re.search(r"<\w|range|INTEGER|BOOLEAN|TEXT", options)
    assert typed or name in GROUPS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explode",), "no such command 'explode' (see llama-gateway --help)"),
        (("serve", "--port", "80800"), "--port: must be less than or equal to 65535 (see "),
        (("keys", "create", "--class", "vip"), "--class: 'vip' is not one of 'urgent', "),
    ],
)
def test_wrong_usage_is_2_and_reported_like_every_other_error(
    arguments: tuple[str, ...], message: str
) -> None:
    (line,) = refusal(*arguments).splitlines()
    assert line.startswith(f"error: {message}")


def test_each_secret_is_a_new_one_that_the_settings_take() -> None:
    first, second = (output("webhooks", "secret") for _ in range(2))
    assert first != second
    # Nothing else is written where a file is made of it.
    assert len(first.splitlines()) == 1
    assert 24 <= len(secret_bytes(first.strip())) <= MOST_SECRET_BYTES
