from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.base_image import cache_folder
from tests.deploy.control import ControlMachine, PlaybookResult, ansible_programs
from tests.deploy.hosts import HostNetwork, running_hosts, unsupported_reason
from tests.deploy.release_files import ReleaseFiles
from tests.processes import ran


@pytest.fixture(scope="session")
def release_files(tmp_path_factory: pytest.TempPathFactory) -> ReleaseFiles:
    """The files that the control machine sends: wheels of two versions, dependencies, a model."""
    return ReleaseFiles(tmp_path_factory.mktemp("release_files"), cache_folder())


@pytest.fixture(scope="session")
def hosts() -> Iterator[HostNetwork]:
    """Four hosts: one for gateway, edge and monitoring, two nodes, and one that is added later."""
    if reason := unsupported_reason():
        pytest.skip(reason)
    with running_hosts(["gw", "n1", "n2", "n3"]) as made:
        yield made


@pytest.fixture(scope="session")
def key() -> ClientKey:
    """The key of the fleet's clients."""
    return create_key("clients")


@pytest.fixture(scope="session")
def control(
    hosts: HostNetwork,
    release_files: ReleaseFiles,
    key: ClientKey,
    tmp_path_factory: pytest.TempPathFactory,
) -> ControlMachine:
    """The control machine, with an inventory of the gateway and two nodes."""
    made = ControlMachine(ansible_programs(), tmp_path_factory.mktemp("control"), hosts)
    made.groups = {
        "llama_nodes": ["n1", "n2"],
        "gateway": ["gw"],
        "edge": ["gw"],
        "monitoring": ["gw"],
    }
    made.variables = variables_of(release_files, key)
    return made


def variables_of(release_files: ReleaseFiles, key: ClientKey) -> dict[str, Any]:
    """The variables of a fleet of the release, for clients with a key."""
    return {
        "llama_gateway_release_wheel": str(release_files.wheel()),
        "llama_gateway_release_wheelhouse": str(release_files.wheelhouse()),
        "llama_node_model_file": str(release_files.model()),
        "llama_node_threads": 1,
        "llama_node_context": 2048,
        "gateway_settings": {"keys": [key.entry]},
    }


@dataclass(frozen=True, slots=True)
class ClientKey:
    """A key of the gateway, and its entry in the settings."""

    secret: str
    entry: dict[str, str]


def create_key(name: str) -> ClientKey:
    """Create a key as an operator does."""
    program = Path(sys.executable).with_name("llama-gateway")
    entry: dict[str, str] = json.loads(ran(program, "keys", "hash", "--id", name, "--json").stdout)
    return ClientKey(entry.pop("key"), {**entry, "name": name})


def chat(url: str, key: str | None, **more: Any) -> httpx.Response:
    """The answer to a chat with this key."""
    return httpx.post(
        f"{url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **more},
        headers={"Authorization": f"Bearer {key}"} if key else {},
        verify=False,
        timeout=60,
    )


@dataclass(frozen=True, slots=True)
class DeployedFleet:
    """A fleet that serves, with the result of the playbook that deployed it."""

    control: ControlMachine
    hosts: HostNetwork
    result: PlaybookResult
    key: ClientKey
    address: str

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a caller with a key."""
        return {"Authorization": f"Bearer {self.key.secret}"}

    @property
    def url(self) -> str:
        """The URL of the edge, or of the balancers."""
        return f"https://{self.address}"

    def chat(self) -> dict[str, Any]:
        """The answer to a chat through the edge."""
        answer = chat(self.url, self.key.secret)
        assert answer.status_code == 200, answer.text
        completion: dict[str, Any] = answer.json()
        return completion

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The gateway's nodes, by name."""
        output = self.hosts["gw"].run("sudo llama-gateway nodes --json")
        return {node["name"]: node for node in json.loads(output.stdout)["nodes"]}


@pytest.fixture(scope="session")
def fleet(control: ControlMachine, hosts: HostNetwork, key: ClientKey) -> DeployedFleet:
    """The fleet that site.yml deploys to bare hosts."""
    return DeployedFleet(control, hosts, control.play("site.yml"), key, hosts["gw"].address)
