from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from setup.install import Pip

ROOT = Path(__file__).parents[2]
LIMIT = 120.0


def test_progress_of_pip_is_read_from_its_output_and_the_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pip = Pip({"numpy": "2.4.6", "pykdtree": "1.4.3", "absent-here": "1"})
    assert str(pip) == "[0/3] getting the list"
    pip.read("Ignoring absent_here: markers 'sys_platform == \"win32\"' don't match")
    pip.read("Collecting numpy==2.4.6 (from -r requirements/local.txt (line 12))")
    pip.read("  Using cached numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.whl (16.9 MB)")
    assert str(pip) == "[1/2] getting numpy 2.4.6"
    pip.read("Installing collected packages: pykdtree, numpy")
    monkeypatch.setattr("setup.install.installed", lambda: {"pykdtree": "1.4.3"})
    assert str(pip) == "[1/2] installing numpy"


def make_wheel(folder: Path, name: str) -> str:
    """Make an empty package. Returns its pin."""
    file = folder / f"{name}-1.0-py3-none-any.whl"
    home = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(f"{home}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{home}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{home}/RECORD", "")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return f"{name}==1.0 \\\n    --hash=sha256:{digest}\n"


@pytest.mark.slow
def test_a_set_is_installed_once_and_pips_output_is_shown_on_failure(tmp_path: Path) -> None:
    (tmp_path / "setup").mkdir()
    shutil.copy(ROOT / "setup/install.py", tmp_path / "setup")
    pins = tmp_path / "requirements"
    pins.mkdir()
    (pins / "local.txt").write_text(make_wheel(tmp_path, "one") + make_wheel(tmp_path, "two_more"))
    (pins / "build.txt").write_text(make_wheel(tmp_path, "three"))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=LIMIT)
    without_index = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
    }

    def install() -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / "venv/bin/python"), str(tmp_path / "setup/install.py"), "local"]
        return subprocess.run(
            command, env=without_index, capture_output=True, text=True, timeout=LIMIT, check=False
        )

    first = install()
    assert first.returncode == 0, first.stdout
    begin, *_, end = first.stdout.splitlines()
    assert begin == "Getting 3 packages of requirements/local.txt"
    assert end.startswith("Installed 3 packages of requirements/local.txt")
    second = install()
    assert (second.returncode, second.stdout) == (0, "")

    wrong_hash = re.sub(r"sha256:\w+", f"sha256:{'0' * 64}", make_wheel(tmp_path, "four"))
    (pins / "local.txt").write_text(wrong_hash)
    wrong = install()
    assert wrong.returncode == 1
    for said in ("four", f"Expected sha256 {'0' * 64}", "pip failed with status", "Remedy: "):
        assert said in wrong.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose install script only records the sets it is asked for."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copytree(ROOT / "setup", tmp_path / "setup")
    (tmp_path / "setup/install.py").write_text(
        "import sys\nwith open('asked', 'a') as file:\n    print(sys.argv[1], file=file)\n"
    )
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    return tmp_path


def make(checkout: Path, *words: str) -> str:
    usual = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    usual.pop("PYTHON", None)
    done = subprocess.run(
        ["make", "--no-print-directory", *words],
        cwd=checkout, env=usual, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def requested_sets(checkout: Path) -> list[str]:
    file = checkout / "asked"
    found = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return found


def test_each_set_is_installed_once_and_one_within_a_larger_when_its_pins_change(
    checkout: Path,
) -> None:
    make(checkout, ".venv/.build")
    make(checkout, ".venv/.build")
    assert requested_sets(checkout) == ["build"]
    make(checkout, "dev")
    assert requested_sets(checkout) == ["dev"]
    make(checkout, "install", ".venv/.build", ".venv/.test")
    assert requested_sets(checkout) == []
    later = (checkout / ".venv/.dev").stat().st_mtime + 10
    os.utime(checkout / "requirements/local.txt", (later, later))
    make(checkout, "install")
    assert requested_sets(checkout) == ["local"]


def test_another_python_recreates_the_environment(checkout: Path) -> None:
    make(checkout, "install")
    requested_sets(checkout)
    ours = os.path.realpath(sys.executable)
    assert "venv --clear" not in make(checkout, "-n", "install", f"PYTHON={ours}")
    other = checkout / "other"
    other.write_text(f"#!/bin/sh\necho {other}\n")
    other.chmod(0o755)
    assert "venv --clear" in make(checkout, "-n", "install", f"PYTHON={other}")
