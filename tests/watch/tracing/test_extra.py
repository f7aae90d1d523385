"""A gateway whose settings want traces, where the packages of the extra `otel` are missing."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

REMEDY = "-m pip install 'opentelemetry-proto<2,>=1.30', or remove the key"
HIDES = """
import sys

class Hides:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hides())
"""


async def test_the_remedy_is_named_and_without_traces_nothing_is_missing(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDES)
    nodes, config = tmp_path / "nodes.yaml", tmp_path / "gateway.yaml"
    nodes.write_text("nodes: [{name: a, url: 'http://127.0.0.1:9'}]")
    said = {}
    for traces in ("endpoint: 'http://127.0.0.1:4318'", "share: 0.5"):
        config.write_text(f"telemetry: {{traces: {{{traces}}}}}")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "check", "--nodes", str(nodes), "--config",
            str(config), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "hidden")},
        )  # fmt: skip
        out, _ = await asyncio.wait_for(process.communicate(), 120)
        said[process.returncode] = " ".join(out.decode().split())
    assert REMEDY not in said.pop(0)
    (missing,) = said.values()
    assert "telemetry.traces.endpoint" in missing
    assert REMEDY in missing
    assert "Traceback" not in missing
