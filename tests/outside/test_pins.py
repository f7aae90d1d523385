"""The outside stays as it is: commands, documents, metrics, settings, log events, files, store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.__main__ import PROGRAMS
from tests.outside.pins import FOLDER, PINS, ROOT, meaning

REMEDY = "if the CHANGELOG tells the change: python -m tests.outside.pins"


@pytest.mark.parametrize("name", PINS)
def test_what_users_see_is_as_it_was(name: str) -> None:
    pinned, made = (FOLDER / name).read_text(), PINS[name]()
    if name.endswith(".json"):
        assert meaning(made) == meaning(pinned), REMEDY
    else:
        assert made == pinned, REMEDY


def test_hosts_start_programs_by_names_that_stay() -> None:
    files = [*Path(ROOT, "deploy").rglob("*.yml"), *Path(ROOT, "deploy").rglob("*.j2")]
    files += [*Path(ROOT, "deploy/systemd").iterdir(), ROOT / "deploy/container/Containerfile"]
    texts = [file.read_text() for file in files]
    assert [text for text in texts if "-m" in text and "gateway.workshop" in text] == []
    assert sum("node-server" in text for text in texts) >= 2


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(("name", "module"), PROGRAMS.items())
def test_a_program_needs_no_package_of_the_command(name: str, module: str) -> None:
    ran = run(
        "-c",
        "import sys; sys.modules.update(dict.fromkeys(['typer', 'pydantic', 'httpx', 'yaml']));"
        f"from gateway.__main__ import main; sys.argv = ['gateway', {name!r}, '--help']; main()",
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith(f"usage: llama-gateway {name}")
    # Hosts that the playbooks of 0.1.0 set up start the servers by the module.
    assert run("-P", "-m", module, "--help").returncode == 0
