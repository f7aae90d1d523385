"""Unit files and compose files that are shipped, as far as they can be tried by themselves."""

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

from gateway.app.startup import Options, store_location
from gateway.callers.callers import is_loopback
from gateway.config.settings import Settings
from tests.deploy.balancer_files import DEPLOY

FOLDER = DEPLOY / "systemd"
PROGRAM = "#!/bin/sh\nenv\necho ARGUMENTS=$*\n"
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def lines(name: str, key: str) -> list[str]:
    return re.findall(rf"(?m)^{key}=(.*)$", (FOLDER / name).read_text())


def test_the_socket_listens_where_the_gateway_would() -> None:
    settings = Settings()
    (address,) = lines("llama-gateway.socket", "ListenStream")
    assert address == f"{settings.listen.host}:{settings.listen.port}"
    assert is_loopback(settings.listen.host)


def test_the_memory_of_the_unit_is_above_the_worst_of_the_default_limits() -> None:
    """For two processes, since a successor starts in the same unit."""
    limits = Settings().limits
    (most,) = lines("llama-gateway.service", "MemoryMax")
    bodies = limits.buffered_bytes * 5 // 4
    worst = 2 * ((768 << 20) + limits.connections * 25600 + bodies)
    assert worst <= int(most[:-1]) * UNITS[most[-1]]


def test_the_store_of_the_unit_is_where_it_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = lines("llama-gateway.service", "StateDirectory")
    # ProtectSystem=strict leaves the service nothing else to write into; systemd tells it where.
    assert lines("llama-gateway.service", "ProtectSystem") == ["strict"]
    assert lines("llama-gateway.service", "ReadWritePaths") == []
    monkeypatch.setenv("STATE_DIRECTORY", f"/var/lib/{name}")
    location = store_location(Options(Path("nodes.yaml")), Settings())
    assert location is not None
    assert location.path == Path("/var/lib/llama-gateway/gateway.db")
    # A PostgreSQL server may be on this host, behind a socket, or on another.
    (families,) = lines("llama-gateway.service", "RestrictAddressFamilies")
    assert {"AF_UNIX", "AF_INET", "AF_INET6"} <= set(families.split())


def run_command(folder: Path, *arguments: str, **environment: str) -> dict[str, str]:
    """Run the shipped command with files below `folder`; the variables that the program has got."""
    program = folder / "opt/llama-gateway/current/bin/llama-gateway"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    command = folder / "llama-gateway"
    words = (FOLDER / "llama-gateway.py").read_text()
    command.write_text(re.sub(r'"(/etc/|/opt/)', rf'"{folder}\1', words))
    done = subprocess.run(
        [sys.executable, "-I", str(command), *arguments],
        env={"PATH": os.defpath, **environment},
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_the_command_gives_the_program_what_the_service_has(tmp_path: Path) -> None:
    """As the playbooks write `environment` (JSON's quotes), and as one writes it by hand."""
    folder = tmp_path / "etc/llama-gateway"
    folder.mkdir(parents=True)
    secret = 'a "quoted" $word `of` C:\\\\ # and more'
    told = f"# Managed by Ansible\nSTORE_PASSWORD={json.dumps(secret)}\nPLAIN = two words\n"
    (folder / "environment").write_text(told)
    got = run_command(tmp_path, "why", "a b", TERM="dumb")
    assert got["STORE_PASSWORD"] == secret
    assert got["PLAIN"] == "two words"
    assert got["LLAMA_GATEWAY_CONFIG"] == str(folder / "gateway.yaml")
    assert got["LLAMA_GATEWAY_NODES"] == str(folder / "nodes.yaml")
    assert got["ARGUMENTS"] == "why a b"
    assert got["TERM"] == "dumb"


@pytest.mark.parametrize("name", ["llama-server@.service", "llama-router@.service"])
def test_a_server_reads_its_key_from_a_file(name: str) -> None:
    (start,) = lines(name, "ExecStart")
    assert " --api-key-file ${CREDENTIALS_DIRECTORY}/api.key" in start
    (credential,) = lines(name, "LoadCredential")
    assert credential.startswith("api.key:")


CONTAINER = DEPLOY / "container"
COMPOSE = ["compose.yaml", "cluster.yaml"]


def services(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((CONTAINER / name).read_text())["services"]
    return found


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
    settings = (CONTAINER / "config/gateway.yaml").read_text()
    assert yaml.safe_load(settings)["admin"]["key_file"] == inside
    path = tmp_path / "admin.key"
    (tmp_path / "gateway.yaml").write_text(settings.replace(inside, str(path)))

    def make() -> str:
        command = [*one["entrypoint"], script.replace("$$", "$"), str(path)]
        subprocess.run(command, check=True, timeout=30)
        assert path.stat().st_mode & 0o777 == 0o600
        return path.read_text()

    def check() -> subprocess.CompletedProcess[str]:
        files = {"NODES": CONTAINER / "config/nodes.yaml", "CONFIG": tmp_path / "gateway.yaml"}
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
