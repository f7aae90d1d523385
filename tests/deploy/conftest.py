from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.base_image import cache_folder
from tests.deploy.control import Control, Played, ansible_programs
from tests.deploy.host_support import why_not
from tests.deploy.hosts import Site, site
from tests.deploy.release_files import ReleaseFiles


@pytest.fixture(scope="session")
def parcels(tmp_path_factory: pytest.TempPathFactory) -> ReleaseFiles:
    """What the control machine sends: wheels of two versions, their dependencies, a model."""
    return ReleaseFiles(tmp_path_factory.mktemp("parcels"), cache_folder())


@pytest.fixture(scope="session")
def hosts() -> Iterator[Site]:
    """Four machines: one for the gateway and what is around it, two nodes, one for later."""
    if reason := why_not():
        pytest.skip(reason)
    with site(["gw", "n1", "n2", "n3"]) as made:
        yield made


@pytest.fixture(scope="session")
def key() -> Key:
    """The one that clients of the fleet have."""
    return made_key("clients")


@pytest.fixture(scope="session")
def control(
    hosts: Site, parcels: ReleaseFiles, key: Key, tmp_path_factory: pytest.TempPathFactory
) -> Control:
    """The control machine, with an inventory of the gateway and two nodes."""
    made = Control(ansible_programs(), tmp_path_factory.mktemp("control"), hosts)
    made.groups = {
        "llama_nodes": ["n1", "n2"],
        "gateway": ["gw"],
        "edge": ["gw"],
        "monitoring": ["gw"],
    }
    made.variables = {
        "llama_gateway_release_wheel": str(parcels.wheel()),
        "llama_gateway_release_wheelhouse": str(parcels.wheelhouse()),
        "llama_node_model_file": str(parcels.model()),
        "llama_node_threads": 1,
        "llama_node_context": 2048,
        "gateway_settings": {"keys": [key.entry]},
    }
    return made


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the gateway, and its entry in the settings."""

    secret: str
    entry: dict[str, str]


def made_key(name: str) -> Key:
    """As an operator makes one."""
    program = Path(sys.executable).with_name("llama-gateway")
    command = [str(program), "keys", "create", "--id", name, "--name", name, "--json"]
    told = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    entry: dict[str, str] = json.loads(told)
    return Key(entry.pop("key"), entry)


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet that serves, and how the playbook that made it ended."""

    control: Control
    hosts: Site
    made: Played
    key: Key

    @property
    def headers(self) -> dict[str, str]:
        """Of a caller with a key."""
        return {"Authorization": f"Bearer {self.key.secret}"}

    @property
    def url(self) -> str:
        """The edge."""
        return f"https://{self.hosts['gw'].address}"

    def chat(self) -> dict[str, Any]:
        """The answer to a chat through the edge."""
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        url = f"{self.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=self.headers, verify=False, timeout=60)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The nodes that the gateway has, by name."""
        told = self.hosts["gw"].run(
            "/opt/llama-gateway/current/bin/llama-gateway nodes --json"
            " --config /etc/llama-gateway/gateway.yaml"
        )
        return {node["name"]: node for node in json.loads(told.stdout)["nodes"]}


@pytest.fixture(scope="session")
def fleet(control: Control, hosts: Site, key: Key) -> Fleet:
    """The whole of site.yml over bare machines."""
    return Fleet(control, hosts, control.play("site.yml"), key)
