"""The command that installs an extra's packages names what works where the program runs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
import sys
from pathlib import Path

import pytest

from gateway.system import install_command


def test_a_pip_environment_gets_the_packages_of_the_metadata() -> None:
    assert shlex.split(install_command("plots")) == [
        *(sys.executable, "-m", "pip", "install", "matplotlib>=3.9")
    ]
    named = [word.partition(">")[0] for word in shlex.split(install_command("local"))[4:]]
    assert named == ["gguf", "pykdtree", "xllamacpp"]


def test_pipx_injects_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama-gateway").mkdir()
    (tmp_path / "llama-gateway/pipx_metadata.json").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "llama-gateway"))
    assert install_command("plots") == "pipx inject llama-gateway 'matplotlib>=3.9'"


def test_without_pip_it_is_uv_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else there(name)
    )
    command = shlex.split(install_command("plots"))
    assert command == ["uv", "pip", "install", "--python", sys.executable, "matplotlib>=3.9"]


def test_a_checkout_that_was_never_installed_is_named_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    checkout = Path(__file__).parent.parent
    assert shlex.split(install_command("tui"))[-1] == f"{checkout}[tui]"
