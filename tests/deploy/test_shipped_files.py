"""What is shipped beside the playbooks, as far as it can be tried by itself: unit files, compose
files, certificates of members, HAProxy's configuration."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.app.startup import Options, store_location
from gateway.callers.callers import is_loopback
from gateway.config.settings import Settings
from tests.deploy.balancer_files import DEPLOY, RENDERED, configuration
from tests.processes import ran

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
    environment = {"PATH": os.defpath, **environment}
    done = ran(sys.executable, "-I", command, *arguments, env=environment)
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


def check(nodes: Path, settings: Path, status: int = 0, **environment: str) -> None:
    """Check these files as a container's gateway would; it must end with this status."""
    command = (sys.executable, "-m", "gateway", "check", "--host", "0.0.0.0")
    files = ("--nodes", nodes, "--config", settings)
    ran(*command, *files, status=status, env=os.environ | environment)


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
        ran(*command)
        assert path.stat().st_mode & 0o777 == 0o600
        return path.read_text()

    files = CONTAINER / "config/nodes.yaml", tmp_path / "gateway.yaml"
    check(*files, status=2)  # without its key the gateway does not start
    key = make()
    assert len(key.strip()) >= 40
    assert make() == key
    check(*files)


# For a cluster.

SCRIPT = DEPLOY / "cluster/certificates.sh"
needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl")


def make(folder: Path, *words: str, **environment: str) -> list[str]:
    """Run the script; what it has made."""
    return ran(SCRIPT, folder, *words, env={**os.environ, **environment}).stdout.split()


def context(folder: Path, name: str, purpose: ssl.Purpose) -> ssl.SSLContext:
    """One side that shows its certificate and wants to see the other's."""
    made = ssl.create_default_context(purpose, cafile=str(folder / "ca.pem"))
    made.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    made.verify_mode = ssl.CERT_REQUIRED
    return made


def handshake(folder: Path, client: str, server: str, host: str) -> list[set[Any]]:
    """The names that client and server have seen in each other's certificates."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = context(folder, client, ssl.Purpose.SERVER_AUTH).wrap_bio(
        to_client, to_server, server_hostname=host
    )
    answering = context(folder, server, ssl.Purpose.CLIENT_AUTH).wrap_bio(
        to_server, to_client, server_side=True
    )
    waiting = [asking, answering]
    for _ in range(8):
        for side in list(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)
        if not waiting:
            break
    seen = [side.getpeercert() for side in (asking, answering)]
    assert all(seen)
    return [set((one or {})["subjectAltName"]) for one in seen]


@needs_openssl
def test_two_members_know_each_other_by_their_own_certificates(tmp_path: Path) -> None:
    assert make(tmp_path, "gw-a", "10.0.0.1") == ["ca.pem", "gw-a.pem"]
    assert make(tmp_path, "gw-b", "fd00::2", "gw-b.example.org") == ["gw-b.pem"]
    server, client = handshake(tmp_path, "gw-a", "gw-b", "gw-b.example.org")
    assert {("DNS", "gw-b"), ("DNS", "gw-b.example.org")} < server
    assert client == {("DNS", "gw-a"), ("IP Address", "10.0.0.1")}
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, "gw-a", "gw-b", "gw-c")
    # Of another authority.
    make(tmp_path / "other", "gw-b")
    assert {one.stat().st_mode & 0o077 for one in (tmp_path / "other").iterdir()} == {0}
    assert (tmp_path / "other").stat().st_mode & 0o077 == 0
    for kind in ("key", "pem"):
        shutil.copy(tmp_path / f"other/gw-b.{kind}", tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, "gw-a", "gw-b", "gw-b")


@needs_openssl
def test_a_certificate_is_renewed_in_time_and_when_its_names_change(tmp_path: Path) -> None:
    make(tmp_path, "gw-a", "10.0.0.1", DAYS="90")
    assert make(tmp_path, "gw-a", "10.0.0.1", DAYS="90") == []
    assert make(tmp_path, "gw-a", "10.0.0.1", DAYS="300") == ["gw-a.pem"]  # 90 of 300 are left
    assert make(tmp_path, "gw-a", "10.0.0.2", DAYS="300") == ["gw-a.pem"]
    (tmp_path / "ca.key").unlink()
    assert make(tmp_path, "gw-a", "10.0.0.2", DAYS="300") == ["ca.pem", "gw-a.pem"]


@pytest.mark.parametrize("name", ["", "../gw-a", "ca", ".gw", "gw a", "gw-a/x"])
def test_names_that_are_no_members_are_refused(tmp_path: Path, name: str) -> None:
    ran(SCRIPT, tmp_path / "made", name, status=2)
    assert not (tmp_path / "made").exists()


def test_the_written_configuration_of_haproxy_is_that_of_the_template() -> None:
    pytest.importorskip("jinja2", reason="`make dev` installs it")
    assert RENDERED.read_text() == configuration(), (
        "run: python -m tests.deploy.balancer_files --write"
    )


@needs_openssl
def test_the_settings_of_compose_are_good(tmp_path: Path) -> None:
    """Each container's host name is its member's; here it is this machine's."""
    member = socket.gethostname()
    make(tmp_path, member)
    for kind in ("key", "pem"):
        (tmp_path / f"{member}.{kind}").rename(tmp_path / f"member.{kind}")
    (tmp_path / "admin.key").write_text("made-by-compose\n")
    shipped = DEPLOY / "container/cluster"
    settings = (shipped / "gateway.yaml").read_text()
    for path in ("/etc/llama-gateway-member", "/srv/files"):
        settings = settings.replace(path, str(tmp_path))
    (tmp_path / "gateway.yaml").write_text(settings)
    check(shipped / "nodes.yaml", tmp_path / "gateway.yaml", STORE_PASSWORD="a-word")
