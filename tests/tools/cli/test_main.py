from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gateway import __version__
from tests.tools.cli.running import run, run_process

COMMANDS = [
    ("up",),
    ("serve",),
    ("check",),
    ("nodes",),
    ("simulate",),
    ("topology",),
    ("tune",),
    ("keys", "hash"),
    ("keys", "create"),
    ("batch", "submit"),
    ("batch", "fetch"),
]


def test_the_version() -> None:
    ran = run("--version")
    assert (ran.status, ran.out) == (0, f"llama-gateway {__version__}\n")


def test_help_names_every_command() -> None:
    ran = run("--help")
    assert ran.status == 0
    for command in COMMANDS:
        assert command[0] in ran.out
    assert "--install-completion" in ran.out


def test_without_a_command_the_help_is_shown_and_it_is_wrong_usage() -> None:
    for command in ((), ("keys",)):
        ran = run(*command)
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.startswith("Usage: llama-gateway")


def test_it_is_also_a_module_and_keeps_its_exit_status(tmp_path: Path) -> None:
    ran = run_process(["check", "--nodes", str(tmp_path / "missing.yaml")])
    assert (ran.status, ran.out) == (2, "")
    assert "Traceback" not in ran.err


def test_help_and_completion_load_nothing_heavy() -> None:
    code = (
        "import sys, gateway.tools.cli\n"
        "heavy = {'sqlalchemy', 'pydantic', 'httpx', 'uvicorn', 'starlette', 'yaml', 'structlog',"
        " 'asyncio', 'prometheus_client', 'numpy', 'rich'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    ran = run_process([], code=code)
    assert (ran.status, ran.err) == (0, "")


def test_a_shell_can_complete_commands() -> None:
    ran = run_process(
        [],
        {
            "_LLAMA_GATEWAY_COMPLETE": "complete_bash",
            "COMP_WORDS": "llama-gateway no",
            "COMP_CWORD": "1",
        },
    )
    assert ran.out.split() == ["nodes"]


def test_a_reader_that_leaves_early_is_no_crash() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    output = process.stderr.read().decode()
    process.stderr.close()
    process.wait(120)
    assert "Traceback" not in output
