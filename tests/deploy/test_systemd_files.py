"""The unit files that are shipped in deploy/systemd."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.app.startup import Options, store_location
from gateway.callers.callers import is_loopback
from gateway.config.settings import Settings

FOLDER = Path(__file__).parents[2] / "deploy/systemd"
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


@pytest.mark.parametrize("name", ["llama-server@.service", "llama-router@.service"])
def test_a_server_reads_its_key_from_a_file(name: str) -> None:
    (start,) = lines(name, "ExecStart")
    assert " --api-key-file ${CREDENTIALS_DIRECTORY}/api.key" in start
    (credential,) = lines(name, "LoadCredential")
    assert credential.startswith("api.key:")


def test_a_router_differs_from_a_server_in_its_models_alone() -> None:
    server, router = (
        (FOLDER / f"llama-{name}@.service").read_text().partition("[Unit]")[2]
        for name in ("server", "router")
    )
    models = "--models-dir ${MODELS} --models-max 0"
    assert router == server.replace("--model ${MODEL}", models).replace(
        "server %i", "server %i, models on demand"
    )
