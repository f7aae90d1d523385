from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from setup.llama_server import BUILD, EXPECTED_BUILD

PROGRAM = Path(__file__).parents[2] / "setup/llama_server.py"
LIMIT = 60.0
APT_GET = """
case "$2" in
  update) grep -q ' http://mirror.test/debian/ sid main$' "$(dirname "$APT_CONFIG")/sources.list" ;;
  download) echo fetched >>"$FETCHES"; sleep 0.3; touch llama.deb ;;
esac
case "$1" in indextargets) printf 'http://other.test/other/\\n%s\\n' "$ARCHIVE" ;; esac
"""
DPKG_DEB = """
mkdir -p "$3/usr/bin" "$3/usr/lib/x86_64-linux-gnu/ggml/backends0"
cd "$3/usr"
printf '#!/bin/sh\\necho "version: 0.7.0 (build 12, commit Debian)"\\n' >bin/llama-server
printf '#!/bin/sh\\n' >lib/x86_64-linux-gnu/ld-linux-x86-64.so.2
touch lib/x86_64-linux-gnu/ggml/backends0/libggml-cpu-x64.so
chmod +x bin/llama-server lib/x86_64-linux-gnu/ld-linux-x86-64.so.2
"""


class Machine:
    """A Debian whose apt-get and dpkg-deb are scripts: what they fetch tells build 12."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tools = folder / "tools"
        self.tools.mkdir()
        self.archive = "http://mirror.test/debian/"
        self.write("apt-get", APT_GET)
        self.write("dpkg-deb", DPKG_DEB)

    def write(self, name: str, script: str) -> None:
        (self.tools / name).write_text(f"#!/bin/bash\nset -e\n{script}")
        (self.tools / name).chmod(0o755)

    @property
    def kept(self) -> Path:
        return self.folder / "cache" / "llama-gateway-tests"

    @property
    def fetches(self) -> int:
        file = self.folder / "fetches"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def run(self, *arguments: str) -> tuple[int, str, str]:
        env = {
            "PATH": f"{self.tools}:{os.environ['PATH']}",
            "ARCHIVE": self.archive,
            "FETCHES": str(self.folder / "fetches"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }
        done = subprocess.run(
            [sys.executable, PROGRAM, *arguments],
            env=env, capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_server_is_fetched_once_and_renewed_when_asked(machine: Machine) -> None:
    server = machine.kept / "llama-server" / "llama-server"
    expected = f"Ready: {server} (build 12; the tests expect build {EXPECTED_BUILD})\n"
    assert machine.run() == (0, expected, "")
    assert (server.parent / "libggml-cpu-x64.so").exists()
    assert machine.run() == (0, expected, "")
    assert machine.fetches == 1
    assert machine.run("--renew") == (0, expected, "")
    assert machine.fetches == 2


def test_a_failed_fetch_tells_the_remedy_and_leaves_nothing(machine: Machine) -> None:
    machine.archive = "http://mirror.test/ubuntu/"
    status, _, told = machine.run()
    assert (status, "name no Debian archive" in told) == (1, True)
    machine.archive = "http://mirror.test/debian/"
    machine.write("dpkg-deb", "echo 'no space' >&2; exit 2")
    status, _, told = machine.run()
    assert (status, "no space" in told, "Remedy:" in told) == (1, True, True)
    assert [path.name for path in machine.kept.iterdir()] == ["llama-server.lock"]


def test_the_build_is_read_from_debian_s_and_from_upstream_s_words() -> None:
    for told, build in (
        ("version: 0.7.0 (build 11669, commit Debian)\nbuilt with GNU 16.2.0\n", ("11669", None)),
        ("load_backend: loaded CPU\nversion: 6123 (79c1160b)\n", (None, "6123")),
    ):
        found = BUILD.search(told)
        assert found
        assert found.groups() == build
    assert BUILD.search("version: unknown\n") is None
