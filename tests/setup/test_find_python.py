from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.known import known

PROGRAM = Path(__file__).parents[2] / "setup/find-python"


@pytest.fixture
def system(tmp_path: Path) -> Path:
    (tmp_path / "system").mkdir()
    return tmp_path / "system"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder on PATH; the shell is in another, since this machine's have other Pythons."""
    for name in ("path", "tools"):
        (tmp_path / name).mkdir()
    for name in ("bash", "env", "sh"):
        (tmp_path / "tools" / name).symlink_to(known(shutil.which(name)))
    return tmp_path / "path"


def python(folder: Path, name: str, version: tuple[int, int], *, venv: bool = True) -> Path:
    """A program that behaves like a Python of this version."""
    change = f"sys.version_info = {(*version, 0, 'final', 0)}; sys.executable = sys.argv[1]"
    if not venv:
        change += "; sys.modules['ensurepip'] = None"
    program = folder / name
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; {change}; exec(sys.argv[2])" "$0" "$2"\n'
    )
    program.chmod(0o755)
    return program


def find(system: Path, path: Path, name: str = "") -> subprocess.CompletedProcess[str]:
    tools = path.with_name("tools")
    bare = {"PATH": f"{path}:{tools}", "SYSTEM_PYTHONS": str(system), "PYTHON": name}
    return subprocess.run([PROGRAM], env=bare, capture_output=True, text=True, check=False)


def test_the_systems_python_is_preferred_to_a_newer_one_on_path(system: Path, path: Path) -> None:
    ours = python(system, "python3", (3, 11))
    python(path, "python3.14", (3, 14))
    assert find(system, path).stdout == f"{ours}\n"


def test_without_one_the_newest_supported_python_on_path_is_used(system: Path, path: Path) -> None:
    python(system, "python3", (3, 11), venv=False)
    python(path, "python3", (3, 15))
    python(path, "python3.12", (3, 12))
    newest = python(path, "python3.13", (3, 13))
    assert find(system, path).stdout == f"{newest}\n"


def test_another_python_of_the_system_is_used_if_its_python3_is_too_new(
    system: Path, path: Path
) -> None:
    python(system, "python3", (3, 15))
    older = python(system, "python3.14", (3, 14))
    assert find(system, path).stdout == f"{older}\n"


def test_a_python_that_is_named_is_used(system: Path, path: Path) -> None:
    python(system, "python3", (3, 13))
    named = python(path, "mine", (3, 12))
    assert find(system, path, "mine").stdout == f"{named}\n"
    assert find(system, path, str(named)).stdout == f"{named}\n"


@pytest.mark.parametrize(
    ("version", "venv", "message"),
    [
        ((3, 10), True, "is Python 3.10; supported are 3.11 to 3.14"),
        ((3, 15), True, "is Python 3.15; supported are 3.11 to 3.14"),
        ((3, 12), False, "has no venv module (apt-get install python3.12-venv)"),
        (None, True, "there is no such program"),
    ],
)
def test_an_unsuitable_named_python_is_refused_with_the_reason(
    version: tuple[int, int] | None, venv: bool, message: str, system: Path, path: Path
) -> None:
    python(system, "python3", (3, 13))
    if version:
        python(path, "mine", version, venv=venv)
    done = find(system, path, "mine")
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert "Remedy: " in done.stderr


def test_if_none_is_suitable_each_is_listed_with_its_reason_and_the_remedy(
    system: Path, path: Path
) -> None:
    python(system, "python3", (3, 11), venv=False)
    python(path, "python3", (3, 9))
    done = find(system, path)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{system}/python3 has no venv module" in done.stderr
    assert f"{path}/python3 is Python 3.9" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr
