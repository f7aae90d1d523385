from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gateway
from tests.local.machine import make_machine, two_sockets_with_smt

RUN = """
import sys, runpy
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("gateway.local.topology", run_name="__main__", alter_sys=True)
"""
MODULES = (
    "tools/__init__",
    "tools/local/__init__",
    "tools/local/topology",
)
"""The modules that a playbook runs on a host, beside an empty `gateway/__init__.py`."""


def test_a_bare_python_reads_the_topology(tmp_path: Path) -> None:
    copied = tmp_path / "gateway/workshop/local"
    copied.mkdir(parents=True)
    (tmp_path / "gateway/__init__.py").touch()
    for module in MODULES:
        shutil.copy(
            Path(gateway.__file__).parent / f"{module}.py", tmp_path / f"gateway/{module}.py"
        )
    machine = make_machine(tmp_path / "machine", two_sockets_with_smt())
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c",
         RUN, str(tmp_path), str(machine)],
        capture_output=True, check=True, text=True, timeout=120,
    )  # fmt: skip
    found = json.loads(result.stdout)
    assert (found["sockets"], found["cores"]) == (2, 8)
    assert [server["threads"] for server in found["servers"]] == [4, 4]
