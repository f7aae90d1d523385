"""A gateway whose settings want traces, where the packages of the extra `otel` are missing."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

REMEDY = "-m pip install 'opentelemetry-proto<2,>=1.30', or remove the key"
HIDES = """
import sys

class Hides:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hides())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDES)
    (tmp_path / "nodes.yaml").write_text("nodes: [{name: a, url: 'http://127.0.0.1:9'}]")
    return tmp_path


async def run(folder: Path, settings: str, *command: str) -> tuple[int | None, str]:
    (folder / "gateway.yaml").write_text(settings)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *command,
        *("--nodes", str(folder / "nodes.yaml"), "--config", str(folder / "gateway.yaml")),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(folder / "hidden"), "XDG_STATE_HOME": str(folder)},
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, " ".join(out.decode().split())


@pytest.mark.parametrize("command", [pytest.param("serve", marks=pytest.mark.slow), "check"])
async def test_the_remedy_is_named(folder: Path, command: str) -> None:
    settings = "telemetry: {traces: {endpoint: 'http://127.0.0.1:4318'}}"
    status, said = await run(folder, settings, command)
    assert status not in {0, None}
    assert "telemetry.traces.endpoint" in said
    assert REMEDY in said
    assert "Traceback" not in said


async def test_without_traces_nothing_is_missing(folder: Path) -> None:
    status, said = await run(folder, "telemetry: {traces: {share: 0.5}}", "check")
    assert (status, REMEDY in said) == (0, False)
