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


@pytest.mark.parametrize(
    ("pythons", "named", "found"),
    [
        # The system's is preferred to a newer one on PATH.
        ({"system/python3": 11, "path/python3.14": 14}, "", "system/python3"),
        ({"path/python3": 15, "path/python3.12": 12, "path/python3.13": 13}, "", "path/python3.13"),
        ({"system/python3": 15, "system/python3.14": 14}, "", "system/python3.14"),
        ({"system/python3": 13, "path/mine": 12}, "mine", "path/mine"),
    ],
)
def test_a_suitable_python_is_found(
    pythons: dict[str, int], named: str, found: str, system: Path, path: Path
) -> None:
    for name, minor in pythons.items():
        python(system.parent, name, (3, minor))
    assert find(system, path, named).stdout == f"{system.parent / found}\n"


@pytest.mark.parametrize(
    ("version", "venv", "message"),
    [
        ((3, 10), True, "is Python 3.10; supported are 3.11 to 3.14"),
        ((3, 12), False, "has no venv module (apt-get install python3.12-venv)"),
        (None, True, "there is no such program"),
    ],
)
def test_an_unsuitable_python_is_refused_with_the_reason_and_the_remedy(
    version: tuple[int, int] | None, venv: bool, message: str, system: Path, path: Path
) -> None:
    if version:
        python(path, "mine", version, venv=venv)
        python(path, "python3", version, venv=venv)
    python(system, "python3", (3, 11), venv=False)
    for named in ("mine", ""):
        done = find(system, path, named)
        assert (done.returncode, done.stdout) == (1, "")
        assert "Remedy: " in done.stderr
        assert not named or message in done.stderr
    done = find(system, path)
    assert f"{system}/python3 has no venv module" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr
