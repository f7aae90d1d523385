from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import __version__
from tests.tools.cli.running import run, run_on_terminal, run_process

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


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples(command: tuple[str, ...]) -> None:
    ran = run(*command, "--help")
    assert ran.status == 0
    assert "Examples" in ran.out
    assert "llama-gateway " + " ".join(command) in ran.out.partition("Examples")[2]
    assert "\x1b" not in ran.out


@pytest.mark.parametrize("columns", ["20", "40", "80", "200"])
@pytest.mark.parametrize("command", [(), ("keys",), *COMMANDS], ids=" ".join)
def test_nothing_is_cut_from_a_help_however_narrow(
    command: tuple[str, ...], columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    whole = run(*command, "--help").out
    monkeypatch.setenv("COLUMNS", columns)
    shown = run(*command, "--help").out
    assert shown.split() == whole.split()
    options, _, typed = shown.partition("Examples:")
    assert "…" not in shown
    assert not re.search(r"<\w|range|INTEGER|BOOLEAN|TEXT", options)
    assert typed or command in {(), ("keys",)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explode",), "no such command 'explode' (see llama-gateway --help)"),
        (("--explode",), "no such option: --explode (see llama-gateway --help)"),
        (("check", "surplus"), "got unexpected extra argument"),
        (("serve", "--port", "80800"), "--port: must be less than or equal to 65535 (see "),
        (("serve", "--port", "x"), "--port: "),
        (("keys", "create", "--class", "vip"), "--class: 'vip' is not one of 'urgent', "),
        (("nodes", "drain"), "NAME: drain needs the name of a node (see llama-gateway nodes"),
    ],
)
def test_wrong_usage_is_2_and_reported_like_every_other_error(
    arguments: tuple[str, ...], message: str
) -> None:
    ran = run(*arguments)
    assert (ran.status, ran.out) == (2, "")
    (line,) = ran.err.splitlines()
    assert line.startswith(f"error: {message}")


def test_without_a_command_the_help_is_shown_and_it_is_wrong_usage() -> None:
    for command in ((), ("keys",)):
        ran = run(*command)
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.startswith("Usage: llama-gateway")


def test_it_is_also_a_module_and_keeps_its_exit_status(tmp_path: Path) -> None:
    assert run_process(["--version"]).out == f"llama-gateway {__version__}\n"
    ran = run_process(["check", "--nodes", str(tmp_path / "missing.yaml")])
    assert (ran.status, ran.out) == (2, "")
    assert "Traceback" not in ran.err


def test_help_and_completion_load_nothing_heavy() -> None:
    code = (
        "import sys, gateway.tools.cli\n"
        "heavy = {'pydantic', 'httpx', 'uvicorn', 'starlette', 'yaml', 'structlog', 'asyncio',"
        " 'prometheus_client', 'numpy', 'rich'}\n"
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


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_errors_are_coloured_on_a_terminal_that_wants_it(
    environment: dict[str, str], coloured: bool
) -> None:
    status, output = run_on_terminal("check", "--nodes", "missing.yaml", **environment)
    assert status == 2
    assert "missing.yaml" in output
    assert ("\x1b[1;31m" in output) == coloured


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
