"""The images and the compose files of deploy/container, as far as no container engine is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.balancer_files import DEPLOY

FOLDER = DEPLOY / "container"
COMPOSE = ["compose.yaml", "cluster.yaml"]


def stage(name: str) -> str:
    """What the Containerfile says of one image, each instruction in a line."""
    text = (FOLDER / "Containerfile").read_text().replace("\\\n", "")
    return text.partition(f" AS {name}\n")[2].partition("\nFROM ")[0]


def words(name: str, instruction: str) -> list[str]:
    (found,) = re.findall(rf"(?m)^{instruction} .*?(\[.*\])$", stage(name))
    told: list[str] = json.loads(found)
    return told


def services(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / name).read_text())["services"]
    return found


@pytest.mark.parametrize("name", ["gateway", "node"])
def test_the_program_is_on_the_path_of_an_image(name: str) -> None:
    folder = str(Path(words(name, "ENTRYPOINT")[0]).parent)
    (path,) = re.findall(r"\bPATH=(\S+)", stage(name))
    assert path == f"{folder}:$PATH"


@pytest.mark.parametrize("name", COMPOSE)
def test_a_container_that_stays_is_healthy_by_what_its_image_says(name: str) -> None:
    """An image in OCI's format has lost its HEALTHCHECK, so compose has it once more."""
    staying = {
        key: one for key, one in services(name).items() if "build" in one and "restart" in one
    }
    assert len(staying) >= 3
    for key, one in staying.items():
        checked = ["CMD", *words(one["build"]["target"], "HEALTHCHECK")]
        assert one["healthcheck"]["test"] == checked, key


@pytest.mark.parametrize("name", COMPOSE)
def test_ports_are_published_on_loopback_alone_and_the_admin_page_is_among_them(name: str) -> None:
    every = services(name)
    ports = [port for one in every.values() for port in one.get("ports", [])]
    assert {port.split(":")[0] for port in ports} == {"127.0.0.1"}
    gateways = [one for one in every.values() if one.get("build", {}).get("target") == "gateway"]
    staying = [one for one in gateways if "restart" in one]
    assert all(any(port.endswith(":8001") for port in one["ports"]) for one in staying)


def test_the_key_of_the_admin_page_is_made_once_and_the_settings_take_it(tmp_path: Path) -> None:
    one = services("compose.yaml")["admin-key"]
    (script, inside) = one["command"]
    settings = (FOLDER / "config/gateway.yaml").read_text()
    assert yaml.safe_load(settings)["admin"]["key_file"] == inside
    path = tmp_path / "admin.key"
    (tmp_path / "gateway.yaml").write_text(settings.replace(inside, str(path)))

    def make() -> str:
        command = [*one["entrypoint"], script.replace("$$", "$"), str(path)]
        subprocess.run(command, check=True, timeout=30)
        assert path.stat().st_mode & 0o777 == 0o600
        return path.read_text()

    def check() -> subprocess.CompletedProcess[str]:
        files = {"NODES": FOLDER / "config/nodes.yaml", "CONFIG": tmp_path / "gateway.yaml"}
        return subprocess.run(
            [sys.executable, "-m", "gateway", "check", "--host", "0.0.0.0"],
            env=os.environ | {f"LLAMA_GATEWAY_{key}": str(file) for key, file in files.items()},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    assert check().returncode == 2, "without its key the gateway does not start"
    key = make()
    assert len(key.strip()) >= 40
    assert make() == key
    assert check().returncode == 0, check().stderr
