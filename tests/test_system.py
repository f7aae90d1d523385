"""What the machine is told and asked for: systemd's messages, open files, extras' packages."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.system import SystemdNotifier, connection_limits, install_command
from tests.each_case import each_case
from tests.virtual import in_virtual_time, now


@pytest.fixture
def heard() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(60.0)
        yield sock


@pytest.mark.parametrize("abstract", [False, True])
def test_a_notification_is_one_message(
    heard: socket.socket, tmp_path: Path, abstract: bool
) -> None:
    name = f"notify-{secrets.token_hex(8)}" if abstract else str(tmp_path / "notify")
    heard.bind("\0" * abstract + name)
    SystemdNotifier({"NOTIFY_SOCKET": "@" * abstract + name}).notify("READY=1", "STATUS=well")
    assert heard.recv(4096) == b"READY=1\nSTATUS=well"


async def test_nobody_who_listens_is_no_error_and_a_full_socket_blocks_nobody(
    heard: socket.socket, tmp_path: Path
) -> None:
    SystemdNotifier({}).notify("READY=1")
    await SystemdNotifier({}).feed_watchdog()
    notifier = SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    notifier.notify("READY=1")
    heard.bind(str(tmp_path / "notify"))
    for _ in range(5000):
        notifier.notify("WATCHDOG=1")
    assert heard.recv(4096) == b"WATCHDOG=1"


@each_case(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdogs_interval_comes_from_the_environment(
    environment: dict[str, str], seconds: float | None
) -> None:
    assert SystemdNotifier(environment).watchdog_seconds == seconds


@in_virtual_time
async def test_the_watchdog_is_notified_twice_per_interval(
    heard: socket.socket, tmp_path: Path
) -> None:
    path = str(tmp_path / "notify")
    heard.bind(path)
    heard.setblocking(False)
    notifier = SystemdNotifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "100000"})
    feeding = asyncio.create_task(notifier.feed_watchdog())
    began = now()
    for number in range(4):
        assert await asyncio.get_running_loop().sock_recv(heard, 100) == b"WATCHDOG=1"
        assert now() - began == pytest.approx(0.05 * number)
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)


@each_case(
    ("files", "public", "admin"),
    [(1 << 20, 12_000, 12_000), (20_000, 12_000, 2_500), (1024, 640, 128), (1, 1, 1)],
)
def test_connection_limits_leave_open_files_for_nodes(files: int, public: int, admin: int) -> None:
    assert connection_limits(files, 12_000, 12_000) == (public, admin)


def test_an_extras_packages_are_installed_by_what_works_where_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shlex.split(install_command("plots")) == [
        *(sys.executable, "-m", "pip", "install", "matplotlib>=3.9")
    ]
    there = importlib.util.find_spec
    with monkeypatch.context() as without_pip:
        without_pip.setattr(
            importlib.util, "find_spec", lambda name: None if name == "pip" else there(name)
        )
        command = shlex.split(install_command("plots"))
        assert command == ["uv", "pip", "install", "--python", sys.executable, "matplotlib>=3.9"]

    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as never_installed:
        never_installed.setattr(importlib.metadata, "requires", missing)
        checkout = Path(__file__).parent.parent
        assert shlex.split(install_command("tui"))[-1] == f"{checkout}[tui]"
    (tmp_path / "llama-gateway").mkdir()
    (tmp_path / "llama-gateway/pipx_metadata.json").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "llama-gateway"))
    assert install_command("plots") == "pipx inject llama-gateway 'matplotlib>=3.9'"
