from __future__ import annotations

import re

import pytest

from tests.tools.cli.running import run, run_on_terminal

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
        (
            ("nodes", "drain"),
            "NAME: drain needs the name of a node, --host, --label or --all-but (see ",
        ),
    ],
)
def test_wrong_usage_is_2_and_reported_like_every_other_error(
    arguments: tuple[str, ...], message: str
) -> None:
    ran = run(*arguments)
    assert (ran.status, ran.out) == (2, "")
    (line,) = ran.err.splitlines()
    assert line.startswith(f"error: {message}")


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_errors_are_coloured_on_a_terminal_that_wants_it(
    environment: dict[str, str], coloured: bool
) -> None:
    status, output = run_on_terminal("check", "--nodes", "missing.yaml", **environment)
    assert status == 2
    assert "missing.yaml" in output
    assert ("\x1b[1;31m" in output) == coloured
