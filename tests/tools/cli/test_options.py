from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gateway.tools.cli.options import (
    DEFAULT_CONFIG,
    check_plot_file,
    examples_epilog,
    settings_file,
)
from gateway.tools.cli.terminal import CommandFailed
from tests.tools.cli.running import run


def test_the_settings_file_is_the_named_one_else_the_default_one_if_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings_file(Path("mine.yaml")) == Path("mine.yaml")
    assert settings_file(None) is None
    DEFAULT_CONFIG.parent.mkdir()
    DEFAULT_CONFIG.touch()
    assert settings_file(None) == DEFAULT_CONFIG


def test_examples_stand_above_their_meaning() -> None:
    assert examples_epilog(("gateway up", "starts it"), ("gateway top", "shows it")).split(
        "\n"
    ) == [
        "Examples:",
        "  gateway up",
        "    starts it",
        "  gateway top",
        "    shows it",
    ]


def test_no_plot_needs_no_check() -> None:
    check_plot_file(None)


@pytest.mark.parametrize("name", ["plot.txt", "plot", "plot.gif", "no/such/folder/plot.png"])
def test_a_plot_that_cannot_be_written_is_wrong_usage(tmp_path: Path, name: str) -> None:
    with pytest.raises(CommandFailed, match="--plot") as caught:
        check_plot_file(tmp_path / name)
    assert caught.value.status == 2


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.parametrize("name", ["plot.png", "plot.SVG", "plot.pdf"])
def test_a_plot_in_a_known_format_can_be_written(tmp_path: Path, name: str) -> None:
    check_plot_file(tmp_path / name)


@pytest.mark.parametrize(("flag", "value"), [("--port", "65536"), ("--admin-port", "-1")])
def test_a_port_that_does_not_exist_is_wrong_usage_that_names_the_flag(
    flag: str, value: str
) -> None:
    ran = run("serve", flag, value)
    assert ran.status == 2
    assert flag in ran.err
