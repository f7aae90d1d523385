"""Units and build switches that the role llama_node makes for machines given as fixtures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.local.topology import read_topology, topology_as_dict
from tests.deploy.control import PLAYBOOKS, play_here
from tests.local.machine import (
    ALTRA,
    EPYC,
    GRAVITON_3,
    SAPPHIRE_RAPIDS,
    make_machine,
    two_sockets_with_smt,
)
from tests.processes import ran

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

MORE = """
    - name: Write what else is made
      ansible.builtin.copy: {content: "{{ item.content }}", dest: "{{ folder }}/{{ item.name }}", mode: "0644"}
      loop:
        - {name: presets.ini, content: "{{ llama_node_presets_body }}"}
        - {name: made.json, content: "{{ {'running': llama_node_running, 'kept': llama_node_kept} | to_json }}"}
      vars:
        llama_node_props:
          results: >-
            {%- set asked = [] -%}
            {%- for one in llama_node_units -%}
            {%- set _ = asked.append({'llama_node_unit': one, 'stdout': told}) -%}
            {%- endfor -%}
            {{ asked }}
"""  # noqa: E501

REFUSALS = """
- hosts: all
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {name: llama_node, tasks_from: preflight}
"""

SWITCHES = """
- hosts: all
  connection: local
  tasks:
    - name: Find the roles' variables
      ansible.builtin.include_vars: {file: "{{ variables }}"}
    - name: Say how each is built for
      ansible.builtin.set_fact:
        made: "{{ made | default({}) | combine({item.name: llama_node_cpu_args}) }}"
      loop: "{{ machines }}"
      vars:
        llama_node_found: "{{ item }}"
    - name: Write
      ansible.builtin.copy: {content: "{{ made | to_json }}", dest: "{{ written }}", mode: "0644"}
"""
KNIGHTS_LANDING = """processor\t: 0
flags\t\t: fpu sse2 lm avx f16c fma bmi2 avx2 avx512f avx512pf avx512er avx512cd
"""
CORTEX_A72 = """processor\t: 0
Features\t: fp asimd evtstrm aes crc32
CPU implementer\t: 0x41
CPU architecture: 8
"""
HOST = "epyc-a,"
ONE_SOCKET = [[[0], [1]]]
TWO_SOCKETS = two_sockets_with_smt()


def units(
    tmp_path: Path, nodes: list[list[list[int]]], play: str = PLAY, **variables: Any
) -> dict[str, str]:
    """The units for a machine of these nodes, by name, and other files that the play writes."""
    machine = make_machine(tmp_path / "machine", nodes)
    made = tmp_path / "units"
    made.mkdir(exist_ok=True)
    settings = {
        "folder": str(made),
        "llama_node_found": {
            "topology": topology_as_dict(read_topology(machine)),
            "architecture": "x86_64",
            "address": "10.0.0.11",
            "units": {},
            "marks": [],
            "published": [],
        },
        "llama_node_key_print": "0123456789abcdef",
        "llama_node_model_file": "mistral-7b.gguf",
        "llama_node_model_sum": "a" * 64,
        "llama_node_program": "/opt/llama-node/1",
        **variables,
    }
    play_here(tmp_path, play, settings, HOST)
    return {path.name: path.read_text() for path in sorted(made.iterdir())}


def test_each_socket_has_its_server_bound_to_its_cores_and_memory(tmp_path: Path) -> None:
    made = units(tmp_path, TWO_SOCKETS)
    assert list(made) == ["llama-server-numa0.service", "llama-server-numa1.service"]
    for number, text in enumerate(made.values()):
        lines = text.splitlines()
        assert f"CPUAffinity={('0-3 8-11', '4-7 12-15')[number]}" in lines
        assert "NUMAPolicy=bind" in lines
        assert f"NUMAMask={number}" in lines
        (start,) = (line for line in lines if line.startswith("ExecStart="))
        assert "--no-mmap" in start
        assert "--threads 4 " in start  # of eight hyperthreads
        assert f"--port {8080 + number} " in start
        assert "--host 10.0.0.11" in start
        assert "StartLimitIntervalSec=0" in lines


def test_a_server_on_one_socket_is_not_pinned(tmp_path: Path) -> None:
    (text,) = units(
        tmp_path,
        ONE_SOCKET,
        llama_node_slots=5,
        llama_node_allow_from=["10.0.0.10"],
        llama_node_mlock=True,
    ).values()
    assert " --mlock" in text
    assert "LimitMEMLOCK=infinity\nAmbientCapabilities=CAP_IPC_LOCK\n" in text
    # The host connects to its own server by its own address, which the firewall must allow.
    assert "IPAddressDeny=any\nIPAddressAllow=localhost 10.0.0.11 10.0.0.10\n" in text
    assert "NUMAPolicy" not in text
    assert "CPUAffinity" not in text
    assert "--no-mmap" not in text
    assert "--slots 5 --ctx 20480 --threads 2 " in text


MODELS: list[dict[str, Any]] = [
    {"name": "qwen-14b", "url": "https://m.example.org/q.gguf?sig=1", "sha256": "b" * 64},
    {
        "name": "embed",
        "file": "/models/e.gguf",
        "args": {"embeddings": True, "pooling": "mean", "ctx-size": 2048},
    },
]
PRESETS = """\
; Managed by Ansible (llama_node).
version = 1

[*]
parallel = 2
ctx-size = 8192

[qwen-14b]
model = /var/lib/llama-node/models/bbbbbbbbbbbb-q.gguf

[embed]
model = /var/lib/llama-node/models/cccccccccccc-e.gguf
ctx-size = 2048
embeddings = true
pooling = mean
"""
ROUTER: dict[str, Any] = {
    "llama_node_model_file": "",
    "llama_node_models": MODELS,
    "llama_node_sent": {"/models/e.gguf": {"checksum": "c" * 64, "size": 9}},
    "llama_node_install": "package",
    "llama_node_program": "/usr/bin/llama-server",
    "llama_node_flags": [
        *("--api-key-file", "--models-preset", "--metrics", "--slots", "--no-ui", "--load-mode"),
        "--slot-save-path",
    ],
    "told": '{"model_alias": "", "total_slots": 0}',
}


def test_routers_of_a_host_share_its_models_and_its_memory(tmp_path: Path) -> None:
    made = units(tmp_path, TWO_SOCKETS, PLAY + MORE, **ROUTER, llama_node_preload=["embed"])
    assert made.pop("presets.ini") == PRESETS
    other = json.loads(made.pop("made.json"))
    presets, *models = sorted(other["kept"], key=lambda name: not name.startswith("router-"))
    assert sorted(models) == ["bbbbbbbbbbbb-q.gguf", "cccccccccccc-e.gguf"]
    assert list(made) == ["llama-server-numa0.service", "llama-server-numa1.service"]
    for number, text in enumerate(made.values()):
        (start,) = (line for line in text.splitlines() if line.startswith("ExecStart="))
        assert start == (
            "ExecStart=/usr/bin/llama-server --models-preset "
            f"/var/lib/llama-node/models/{presets} --models-max 0 --host 10.0.0.11 "
            f"--port {8080 + number} -t 4 -tb 4 -b 512 -ub 256 --api-key-file "
            "/var/lib/llama-node/api.key --metrics --slots --no-ui --load-mode none"
        )
        # A host's memory is counted, so a model may lie on both of its NUMA nodes.
        assert "NUMAPolicy=preferred" in text.splitlines()
    for number, server in enumerate(other["running"]):
        assert server["router"]
        assert server["entry"] == {
            "name": f"epyc-a-numa{number}",
            "url": f"http://10.0.0.11:{8080 + number}",
            "host": "epyc-a",
            "labels": {"numa": str(number)},
            "memory": "62GiB",
            "preload": ["embed"],
        }


NO_MODEL = {"llama_node_model_file": ""}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"llama_node_models": MODELS}, "a model is needed"),
        ({**NO_MODEL, "llama_node_models": MODELS}, "needs llama-server"),
        ({**ROUTER, "llama_node_models": [{"name": "a:b", "file": "x"}]}, "a name for each"),
        ({**ROUTER, "llama_node_models": [{"name": "a", "url": "http://m"}]}, "url and sha256"),
        (
            {**ROUTER, "llama_node_models": [{**MODELS[0], "args": {"api-key": "k"}}]},
            "and no key",
        ),
        (
            {**ROUTER, "llama_node_models": [{**MODELS[0], "args": {"alias": "a\nmodel = b"}}]},
            "one line each",
        ),
        ({**ROUTER, "llama_node_preload": ["other"]}, "none of llama_node_models"),
        ({"llama_node_entry": {"name": "fast"}}, "llama_node_entry can't hold name"),
        ({"llama_node_models_folder": "/home/models"}, "can't be in /home"),
        ({"llama_node_extra_args": ["--api-key", "k"]}, "llama_node_extra_args holds --api-key"),
    ],
)
def test_variables_that_can_not_work_are_refused(
    tmp_path: Path, variables: dict[str, Any], words: str
) -> None:
    given = {"llama_node_model_file": "m.gguf", **variables}
    told = play_here(tmp_path, REFUSALS, given, HOST, status=2)
    assert words in " ".join(told.split())


def test_systemd_accepts_every_line_and_the_unit_is_hardened(tmp_path: Path) -> None:
    made = units(tmp_path, TWO_SOCKETS, llama_node_mlock=True)
    folder = tmp_path / "systemd"
    folder.mkdir()
    for name, text in made.items():
        unit = folder / name
        # This machine has neither the program nor the user.
        here = re.sub(r"(?m)^User=.*$", "User=daemon", text)
        unit.write_text(here.replace("=/opt/llama-node/1/bin/python ", "=/bin/sh "))
        result = ran("systemd-analyze", "verify", unit, status=None)
        # Without a running systemd it prints this, too.
        assert not [line for line in result.stderr.splitlines() if name in line], result.stderr
        ran("systemd-analyze", "security", "--offline=true", "--threshold=20", unit)


def test_llama_cpp_is_built_for_the_instructions_that_the_cpu_has(tmp_path: Path) -> None:
    fixtures = {
        "knights-landing": ("x86_64", KNIGHTS_LANDING),
        "epyc": ("x86_64", EPYC),
        "sapphire-rapids": ("x86_64", SAPPHIRE_RAPIDS),
        "cortex-a72": ("aarch64", CORTEX_A72),
        "altra": ("aarch64", ALTRA),
        "graviton-3": ("aarch64", GRAVITON_3),
    }
    machines = []
    for name, (architecture, cpuinfo) in fixtures.items():
        root = make_machine(tmp_path / name, [[[0], [1]]], cpuinfo=cpuinfo)
        topology = topology_as_dict(read_topology(root))
        machines.append({"name": name, "architecture": architecture, "topology": topology})
    written = tmp_path / "switches.json"
    variables = str(PLAYBOOKS / "roles/llama_node/vars/main.yml")
    settings = {"machines": machines, "variables": variables, "written": str(written)}
    play_here(tmp_path, SWITCHES, settings, HOST)
    given: dict[str, list[str]] = json.loads(written.read_text())

    def on(name: str) -> set[str]:
        switches = dict(word.removeprefix("-DGGML_").split("=") for word in given[name])
        assert set(switches.values()) <= {"ON", "OFF"}
        return {switch for switch, value in switches.items() if value == "ON"}

    avx2 = {"AVX", "F16C", "FMA", "AVX2"}
    avx512 = avx2 | {"AVX512", "AVX512_VNNI", "AVX512_BF16"}
    assert on("knights-landing") == avx2 | {"BMI2"}
    assert on("epyc") == avx512 | {"AVX512_VBMI"}
    amx = {"AMX_TILE", "AMX_INT8", "AMX_BF16"}
    assert on("sapphire-rapids") == avx512 | amx | {"AVX_VNNI"}
    assert given["cortex-a72"] == []  # every such CPU has NEON
    arm = "-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16"
    assert given["altra"] == [arm]
    assert given["graviton-3"] == [f"{arm}+i8mm+bf16+sve"]


# What verify.yml makes of the list of nodes.
