"""The wheel, as people install it: `make test-all ARGS=wheel`."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.processes import ran

pytestmark = [pytest.mark.net, pytest.mark.real, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
TOOLS = ("pipx==1.18.4", "uv==0.13.9")
LIMIT = 600.0  # seconds to install; all of it may have to be fetched
START_LIMIT = 120.0  # seconds
# How this machine reaches its package index; all else of the environment is left out.
INDEX = re.compile(r"(PIP|UV|SSL|REQUESTS|CURL)_|(?i:https?_proxy|no_proxy)$")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
    ran(*pip, "-w", folder, ROOT, limit=LIMIT)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    ran(sys.executable, "-m", "venv", folder, limit=LIMIT)
    ran(folder / "bin/pip", "install", "-qq", *TOOLS, limit=LIMIT)
    return folder / "bin"


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a new account: an empty home, and no checkout on any path."""
    home = tmp_path / "home"
    home.mkdir()
    index = {name: value for name, value in os.environ.items() if INDEX.match(name)}
    return {**index, "HOME": str(home), "PATH": "/usr/bin:/bin", "UV_PYTHON_DOWNLOADS": "never"}


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize(
    "words", [("pipx", "install"), ("uv", "tool", "install")], ids=["pipx", "uv"]
)
def test_the_installed_command_starts_a_server_and_serves_it(
    words: tuple[str, ...], wheel: Path, tools: Path, bare: dict[str, str]
) -> None:
    home = Path(bare["HOME"])
    python = Path(sys.base_prefix, "bin", f"python{platform.python_version().rpartition('.')[0]}")
    command = [str(tools / words[0]), *words[1:], "--python", str(python), f"{wheel}[local]"]
    ran(*command, env=bare, cwd=home, limit=LIMIT)
    program = home / ".local/bin/llama-gateway"

    refused = ran(program, "serve", env=bare, cwd=home, status=2, limit=START_LIMIT)
    assert "config/nodes.yaml: there is no such file" in refused.stderr

    with serving(program, bare, home) as url:
        asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        result = httpx.post(
            f"{url}/chat/completions", json=asked, timeout=60, trust_env=False
        ).json()
    assert result["choices"][0]["message"]["content"]


@contextmanager
def serving(program: Path, environment: dict[str, str], home: Path) -> Iterator[str]:
    """The URL of `llama-gateway up`, which has ended afterwards."""
    log = home / "up.log"
    with log.open("w") as file:
        up = subprocess.Popen(
            [program, "up", "--servers", "1", "--port", "0", "--admin-port", "0"],
            env=environment, cwd=home, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_LIMIT
        while not (found := re.search(r"Serving .* at (\S+)", log.read_text())):
            assert up.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield found[1]
        up.terminate()
        assert up.wait(START_LIMIT) == 0
    finally:
        up.kill()
        up.wait()
