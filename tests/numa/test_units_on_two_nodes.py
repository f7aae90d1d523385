"""The units of the role llama_node on two sockets, deployed over ssh and inspected as they run."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.base_image import cache_folder
from tests.deploy.control import ControlMachine, PlaybookResult, ansible_programs
from tests.deploy.release_files import ReleaseFiles
from tests.numa import placement
from tests.numa.guest_host import SERVERS, SSH_TIMEOUT, Guest, guest
from tests.numa.machine import CORES, SOCKETS

PLAY_LIMIT = 3600  # seconds; on a busy machine it took 23 minutes
pytestmark = [pytest.mark.net, pytest.mark.timeout(2 * PLAY_LIMIT)]

NAME = "two-sockets"
CPUS = ["0-1", "2-3"]
UNITS = [f"llama-server-numa{number}.service" for number in range(SOCKETS)]
HOST_KEYS = ("-o StrictHostKeyChecking=no", "-o UserKnownHostsFile=/dev/null")
SHOWN = "ActiveState,NRestarts,MainPID,User,NUMAPolicy,NUMAMask,CPUAffinity"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ControlMachine, Guest]]:
    if os.geteuid() != 0:
        pytest.fail("needs root: make test-numa as root, or in a virtual machine")
    release_files = ReleaseFiles(tmp_path_factory.mktemp("release_files"), cache_folder())
    began = time.monotonic()
    with guest(NAME, release_files.cache, tmp_path_factory.mktemp("machine")) as (site, host):
        print(f"answers ssh after {time.monotonic() - began:.0f} s")
        control = ControlMachine(ansible_programs(), tmp_path_factory.mktemp("control"), site)
        control.limit = PLAY_LIMIT
        # The plays don't touch the gateway's host.
        control.groups = {"llama_nodes": [NAME], "gateway": ["gw"]}
        control.variables = {
            "ansible_port": host.ports[22],
            "ansible_timeout": SSH_TIMEOUT,
            "ansible_ssh_common_args": " ".join(HOST_KEYS),
            "llama_gateway_release_wheel": str(release_files.wheel()),
            "llama_gateway_release_wheelhouse": str(release_files.wheelhouse()),
            "llama_node_model_file": str(release_files.model()),
            "llama_node_context": 2048,
            "llama_node_mlock": True,
        }
        yield control, host


def play(control: ControlMachine) -> PlaybookResult:
    began = time.monotonic()
    played = control.play("site.yml", "--limit", NAME)
    print(f"played in {time.monotonic() - began:.0f} s")
    return played


@pytest.fixture(scope="module")
def node(machine: tuple[ControlMachine, Guest]) -> Guest:
    """The host, which the playbook has made a node."""
    control, host = machine
    assert set(play(control).changed) == {NAME}
    return host


@pytest.fixture(scope="module")
def units(node: Guest) -> list[dict[str, str]]:
    """systemd's properties of each unit, in the order of the NUMA nodes."""
    output = node.run(f"systemctl show -p {SHOWN} {' '.join(UNITS)}", limit=2 * SSH_TIMEOUT).stdout
    return [dict(re.findall(r"^(\w+)=(.*)$", one, re.MULTILINE)) for one in output.split("\n\n")]


@pytest.fixture(scope="module")
def chats(node: Guest) -> list[httpx.Response]:
    """The answer of each server to a chat."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    urls = [f"http://127.0.0.1:{node.ports[port]}" for port in SERVERS]
    return [httpx.post(f"{url}/v1/chat/completions", json=body, timeout=900) for url in urls]


@pytest.fixture(scope="module")
def servers(
    node: Guest, units: list[dict[str, str]], chats: list[httpx.Response]
) -> list[dict[str, Any]]:
    """The placement of each server after a chat, when its caches have been used."""
    program = Path(placement.__file__).read_text()
    pids = " ".join(unit["MainPID"] for unit in units)
    output = node.run(f"python3 - {pids} <<'END'\n{program}\nEND", limit=4 * SSH_TIMEOUT).stdout
    placements: list[dict[str, Any]] = json.loads(output)
    return placements


def test_each_numa_node_has_its_unit_bound_to_it(units: list[dict[str, str]]) -> None:
    assert [{key: unit[key] for key in unit if key != "MainPID"} for unit in units] == [
        {
            "ActiveState": "active",
            "NRestarts": "0",
            "User": "llama-node",
            "NUMAPolicy": "bind",
            "NUMAMask": str(number),
            "CPUAffinity": CPUS[number],
        }
        for number in range(SOCKETS)
    ]


def test_the_machine_has_no_other_server(node: Guest) -> None:
    listed = node.run(
        "systemctl list-units --plain --no-legend 'llama-*'", limit=2 * SSH_TIMEOUT
    ).stdout
    assert [line.split()[0] for line in listed.splitlines()] == UNITS


def test_every_thread_is_kept_to_the_cores_of_its_node(servers: list[dict[str, Any]]) -> None:
    assert [server["cpus_of_threads"] for server in servers] == [[cpus] for cpus in CPUS]
    assert [placement.flag(server, "--threads") for server in servers] == [str(CORES)] * SOCKETS


def test_memory_is_bound_to_its_node_and_lies_there(servers: list[dict[str, Any]]) -> None:
    for number, server in enumerate(servers):
        placement.check_memory(server, number)


def test_each_has_a_copy_of_the_model_and_locks_it_without_root(
    servers: list[dict[str, Any]],
) -> None:
    for server in servers:
        placement.check_model(server)


def test_each_server_is_healthy_and_answers_a_chat(
    node: Guest, chats: list[httpx.Response]
) -> None:
    for port in SERVERS:
        response = httpx.get(f"http://127.0.0.1:{node.ports[port]}/health", timeout=SSH_TIMEOUT)
        assert response.status_code == 200
    assert [chat.status_code for chat in chats] == [200] * SOCKETS
    assert [chat.json()["usage"]["completion_tokens"] for chat in chats] == [8] * SOCKETS


def test_a_second_run_changes_nothing(machine: tuple[ControlMachine, Guest], node: Guest) -> None:
    control, _ = machine
    assert play(control).changed == {}
