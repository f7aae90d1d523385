"""What is shipped for several gateways beside the playbooks: certificates, HAProxy, compose."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.balancer_files import DEPLOY, RENDERED, configuration

SCRIPT = DEPLOY / "cluster/certificates.sh"
needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl")


def make(folder: Path, *words: str, **environment: str) -> list[str]:
    """Run the script; what it has made."""
    done = subprocess.run(
        [str(SCRIPT), str(folder), *words],
        env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout.split()


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
def test_two_members_know_each_other_by_their_own_certificates(
    tmp_path: Path,
) -> None:
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
    with pytest.raises(subprocess.CalledProcessError) as refused:
        make(tmp_path / "made", name)
    assert refused.value.returncode == 2
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
    files = ("--nodes", str(shipped / "nodes.yaml"), "--config", str(tmp_path / "gateway.yaml"))
    checked = subprocess.run(
        [sys.executable, "-m", "gateway", "check", *files, "--host", "0.0.0.0"],
        env={**os.environ, "STORE_PASSWORD": "a-word"},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr
