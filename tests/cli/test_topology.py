from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from gateway.cli.terminal import CommandFailed
from tests.local.machine import make_machine, two_sockets_with_smt, write


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["topology", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_two_sockets_are_shown_with_the_command_for_each(tmp_path: Path) -> None:
    root = str(make_machine(tmp_path, two_sockets_with_smt()))
    shown = run("--root", root)
    assert "8 in 2 sockets and 2 NUMA nodes, 2 threads each" in shown
    assert "numactl --physcpubind=0-3,8-11 --membind=0 llama-server --threads 4 --no-mmap" in shown
    found = json.loads(run("--json", "--root", root))
    assert (found["sockets"], found["cores"], found["cpus"]) == (2, 8, 16)
    assert [node["cores"][0] for node in found["numa_nodes"]] == [[0, 8], [4, 12]]
    assert found["servers"][1] == {
        "numa": 1,
        "threads": 4,
        "cpus": "4-7,12-15",
        "pin": True,
        "bind_memory": True,
        "no_mmap": True,
    }


def test_a_server_on_a_hybrid_processor_is_pinned_to_the_performance_cores(tmp_path: Path) -> None:
    root = make_machine(tmp_path, [[[0, 1], [2], [3]]])
    write(root, "sys/devices/cpu_core/cpus", "0-1\n")
    write(root, "sys/devices/cpu_atom/cpus", "2-3\n")
    output = run("--root", str(root))
    assert "efficiency CPUs 2-3: left out" in output
    assert "numactl --physcpubind=0-1 llama-server --threads 1 ..." in output


def test_this_machine_s_work_is_read() -> None:
    found = json.loads(run("--json"))
    assert found["cores"] >= 1
    assert 0 < found["memory_available"] <= found["memory_total"]


def test_a_folder_without_proc_and_sys_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="--root") as refused:
        run("--root", str(tmp_path))
    assert refused.value.status == 2
