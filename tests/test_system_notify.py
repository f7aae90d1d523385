from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.system import SystemdNotifier
from tests.virtual import in_virtual_time, now


@pytest.fixture
def heard() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(60.0)
        yield sock


def test_a_notification_is_one_message(heard: socket.socket, tmp_path: Path) -> None:
    heard.bind(str(tmp_path / "notify"))
    SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "notify")}).notify("READY=1", "STATUS=well")
    assert heard.recv(4096) == b"READY=1\nSTATUS=well"


def test_an_abstract_socket_is_used(heard: socket.socket) -> None:
    name = f"notify-{secrets.token_hex(8)}"
    heard.bind("\0" + name)
    SystemdNotifier({"NOTIFY_SOCKET": f"@{name}"}).notify("STOPPING=1")
    assert heard.recv(4096) == b"STOPPING=1"


def test_a_missing_listener_is_no_error(tmp_path: Path) -> None:
    SystemdNotifier({}).notify("READY=1")
    SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).notify("READY=1")


def test_a_full_socket_blocks_nobody(heard: socket.socket, tmp_path: Path) -> None:
    heard.bind(str(tmp_path / "notify"))
    notifier = SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    for _ in range(5000):
        notifier.notify("WATCHDOG=1")
    assert heard.recv(4096) == b"WATCHDOG=1"


@pytest.mark.parametrize(
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
    heard.bind(str(tmp_path / "notify"))
    notifier = SystemdNotifier(
        {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"}
    )
    feeding = asyncio.create_task(notifier.feed_watchdog())
    heard.setblocking(False)
    began = now()
    for number in range(4):
        assert await asyncio.get_running_loop().sock_recv(heard, 100) == b"WATCHDOG=1"
        assert now() - began == pytest.approx(0.05 * number)
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)


async def test_without_a_watchdog_nothing_is_sent() -> None:
    await SystemdNotifier({}).feed_watchdog()
