"""`llama-gateway up` on two NUMA nodes, with a real kernel in an emulated machine."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.deploy.base_image import cache_folder
from tests.deploy.release_files import ReleaseFiles
from tests.numa.machine import CORES, SOCKETS, THREADS, run_in_two_nodes
from tests.numa.placement import check_memory, check_model, flag

pytestmark = [pytest.mark.net, pytest.mark.timeout(3600)]

CPUS = ["0-3", "4-7"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if os.geteuid() != 0:
        pytest.fail("needs root: make test-numa as root, or in a virtual machine")
    release_files = ReleaseFiles(tmp_path_factory.mktemp("release_files"), cache_folder())
    output = run_in_two_nodes(release_files, tmp_path_factory.mktemp("machine"))
    report: dict[str, Any] = json.loads(output)
    print(f"booted in {report['boot']:.0f} s, looked at in {report['seconds']:.0f} s")
    assert "error" not in report, f"{report['error']}\n{report['log']}"
    return report


def test_topology_finds_both_nodes(report: dict[str, Any]) -> None:
    found = report["topology"]
    assert found["sockets"] == SOCKETS
    assert found["cores"] == SOCKETS * CORES
    assert found["cpus"] == SOCKETS * CORES * THREADS
    nodes = found["numa_nodes"]
    assert [node["sockets"] for node in nodes] == [[0], [1]]
    assert [node["cores"] for node in nodes] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert [node["distances"] for node in nodes] == [[10, 21], [21, 10]]
    assert all(node["memory_available"] > 2 << 30 for node in nodes)
    bound = {"threads": CORES, "pin": True, "bind_memory": True, "no_mmap": True}
    assert found["servers"] == [
        {"numa": number, "cpus": cpus, **bound} for number, cpus in enumerate(CPUS)
    ]


def test_a_server_is_pinned_to_each_node_with_a_thread_for_each_physical_core(
    report: dict[str, Any],
) -> None:
    assert report["nodes"] == {"local-0": "ready", "local-1": "ready"}
    assert sorted(server["cpus"] for server in report["servers"]) == CPUS
    assert [flag(server, "--threads") for server in report["servers"]] == [str(CORES)] * SOCKETS


@pytest.mark.parametrize("when", ["servers", "servers_later"])
def test_their_memory_is_bound_to_their_node_and_lies_there(
    report: dict[str, Any], when: str
) -> None:
    for server in report[when]:
        check_memory(server, CPUS.index(server["cpus"]))


def test_each_has_a_copy_of_the_model_and_locks_it(report: dict[str, Any]) -> None:
    for server in report["servers"]:
        check_model(server)


def test_both_answer_chats(report: dict[str, Any]) -> None:
    assert {chat["status"] for chat in report["chats"]} == {200}
    assert {chat["tokens"] for chat in report["chats"]} == {8}
    assert {chat["node"] for chat in report["chats"]} == {"local-0", "local-1"}


def test_nothing_is_left_when_it_ends(report: dict[str, Any]) -> None:
    assert report["status"] == 0
    assert report["left"] == []
