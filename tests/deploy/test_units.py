"""The units of a machine with two sockets, written by the role from the topology of a fixture."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway.local.description import described
from gateway.local.topology import read_topology
from tests.deploy.control import PLAYBOOKS, ansible_programs
from tests.local.machine import make_machine, two_sockets_with_smt

pytestmark = [pytest.mark.net, pytest.mark.timeout(120)]

PLAY = """
- hosts: all
  connection: local
  tasks:
    - name: Plan
      ansible.builtin.import_role: {name: llama_node, tasks_from: plan}
      vars:
        llama_node_servers: "{{ llama_node_servers_found }}"
    - name: Write
      ansible.builtin.copy: {content: "{{ item.content }}", dest: "{{ folder }}/{{ item.name }}", mode: "0644"}
      loop: "{{ llama_node_units }}"
"""  # noqa: E501


def units(tmp_path: Path, topology: dict[str, Any], **variables: Any) -> dict[str, str]:
    """The units by name."""
    made = tmp_path / "units"
    made.mkdir()
    play = tmp_path / "play.yml"
    play.write_text(PLAY)
    told = {
        "ansible_python_interpreter": "python3",
        "folder": str(made),
        "llama_node_found": {
            "topology": topology,
            "architecture": "x86_64",
            "address": "10.0.0.11",
            "units": {},
            "marks": [],
        },
        "llama_node_model_file": "mistral-7b.gguf",
        "llama_node_model_sum": "a" * 64,
        "llama_node_program": "/opt/llama-node/1",
        **variables,
    }
    programs = ansible_programs()
    subprocess.run(
        [
            *(str(programs / "ansible-playbook"), "-i", "epyc-a,", str(play)),
            *("-e", json.dumps(told)),
        ],
        cwd=PLAYBOOKS,
        check=True,
        timeout=100,
    )
    return {path.name: path.read_text() for path in sorted(made.iterdir())}


def test_each_socket_has_its_server_bound_to_its_cores_and_memory(tmp_path: Path) -> None:
    machine = make_machine(tmp_path / "machine", two_sockets_with_smt())
    topology = described(read_topology(machine))
    made = units(tmp_path, topology)
    assert list(made) == ["llama-server-numa0.service", "llama-server-numa1.service"]
    for number, text in enumerate(made.values()):
        server = topology["servers"][number]
        lines = text.splitlines()
        assert f"CPUAffinity={server['cpus'].replace(',', ' ')}" in lines
        assert "NUMAPolicy=bind" in lines
        assert f"NUMAMask={number}" in lines
        (start,) = (line for line in lines if line.startswith("ExecStart="))
        assert "--no-mmap" in start
        assert "--threads 4 " in start  # of eight hyperthreads
        assert f"--port {8080 + number} " in start
        assert "--host 10.0.0.11" in start
        assert "StartLimitIntervalSec=0" in lines


def test_one_socket_is_left_to_the_kernel(tmp_path: Path) -> None:
    machine = make_machine(tmp_path / "machine", [[[0], [1]]])
    (text,) = units(tmp_path, described(read_topology(machine)), llama_node_slots=5).values()
    assert "NUMAPolicy" not in text
    assert "CPUAffinity" not in text
    assert "--no-mmap" not in text
    assert "--slots 5 --ctx 20480 --threads 2 " in text
