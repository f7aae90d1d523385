from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.app.handover import (
    LEARNT_VARIABLE,
    READY_TIMEOUT,
    SOCKETS_VARIABLE,
    HandoverFailed,
    inherit_from_environment,
    restart_command,
    start_successor,
    successor_environment,
)
from gateway.app.startup import StartError
from gateway.callers.keys import AnonymousAccess
from gateway.lease import HASH_KEY_BYTES

KEY = bytes(range(HASH_KEY_BYTES))


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def passed(sock: socket.socket) -> int:
    """A duplicate descriptor, as a child process has."""
    number = os.dup(sock.fileno())
    os.set_inheritable(number, True)
    return number


def systemd(*sockets: socket.socket, names: str = "") -> dict[str, str]:
    return {
        "LISTEN_PID": str(os.getpid()),
        "LISTEN_FDS": str(len(sockets)),
        "LISTEN_FDNAMES": names,
    }


def test_a_successor_takes_the_socket_of_its_own_address(listening: socket.socket) -> None:
    reader, writer = os.pipe()
    inherited = inherit_from_environment(
        {SOCKETS_VARIABLE: f"public={passed(listening)} ready={writer}"}
    )
    port = listening.getsockname()[1]
    assert inherited.take_socket("public", [("127.0.0.1", port + 1)]) is None
    assert inherited.take_socket("admin", [("127.0.0.1", port)]) is None
    taken = inherited.take_socket("public", [("127.0.0.1", port)])
    assert taken is not None
    with taken:
        assert taken.getsockname() == listening.getsockname()
        assert not taken.get_inheritable()
    inherited.notify_ready()
    assert os.read(reader, 8) == b"1"
    assert os.read(reader, 8) == b""
    os.close(reader)


@pytest.mark.parametrize(
    ("door", "customised"),
    [
        pytest.param(AnonymousAccess(), True, id="it had no keys"),
        pytest.param(AnonymousAccess(had_keys=True), False, id="it had keys"),
        pytest.param(AnonymousAccess(had_keys=True, allowed=True), True, id="beside keys"),
    ],
)
def test_a_successor_knows_its_predecessors_files_and_whom_it_let_in(
    door: AnonymousAccess, customised: bool, listening: socket.socket
) -> None:
    reader, writer = os.pipe()
    more = {"customised": customised, "had_admin_keys": not customised}
    result = successor_environment(door, Path("config/gateway.yaml"), **more)
    assert result["LLAMA_GATEWAY_CONFIG"] == "config/gateway.yaml"
    inherited = inherit_from_environment(
        {SOCKETS_VARIABLE: f"public={passed(listening)} ready={writer}", **result}
    )
    assert (inherited.anonymous_access, inherited.customised) == (door, customised)
    assert inherited.had_admin_keys is not customised
    inherited.notify_ready()
    os.close(reader)
    assert "LLAMA_GATEWAY_CONFIG" not in successor_environment(door, None, **more)


def test_a_socket_of_another_kind_is_refused(listening: socket.socket, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="FileDescriptorName=public or admin"):
        inherit_from_environment(systemd(listening, listening, names="admin:metrics"))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
        reader, writer = os.pipe()
        with pytest.raises(StartError, match="ListenStream=ADDRESS:PORT"):
            inherit_from_environment({SOCKETS_VARIABLE: f"public={passed(sock)} ready={writer}"})
        os.close(reader)
        os.close(writer)


def test_a_script_is_restarted_by_the_name_that_was_used_and_a_module_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = tmp_path / "release-1"
    release.touch(mode=0o755)
    current = tmp_path / "llama-gateway"
    current.symlink_to(release)
    monkeypatch.setattr(sys, "argv", [str(current), "serve", "--port", "1"])
    assert restart_command() == (str(current), "serve", "--port", "1")
    monkeypatch.setattr(sys, "argv", ["somewhere/gateway/__main__.py", "serve"])
    assert restart_command() == (sys.executable, "-m", "gateway", "serve")


async def succeed(
    sock: socket.socket, *command: str, timeout: float = READY_TIMEOUT
) -> subprocess.Popen[bytes]:
    return await start_successor(
        command, {"public": sock}, from_systemd=False, hash_key=KEY, timeout=timeout
    )


@pytest.mark.parametrize(
    ("command", "timeout", "why"),
    [
        ((sys.executable, "-c", "raise SystemExit(3)"), READY_TIMEOUT, "ended before it was ready"),
        ((sys.executable, "-c", "import time; time.sleep(600)"), 0.2, "not ready within"),
        (("no-such-command",), READY_TIMEOUT, "No such file"),
    ],
)
async def test_a_successor_that_ends_or_hangs_or_is_not_there_takes_nothing_over(
    listening: socket.socket, command: tuple[str, ...], timeout: float, why: str
) -> None:
    with pytest.raises(HandoverFailed, match=why):
        await succeed(listening, *command, timeout=timeout)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


READS_KEY = """
import os, sys
from gateway.app.handover import inherit_from_environment
inherited = inherit_from_environment()
open(sys.argv[1], "wb").write(inherited.hash_key)
open(sys.argv[2], "wb").write(open("/proc/self/environ", "rb").read())
open(sys.argv[3], "wb").write(open("/proc/self/cmdline", "rb").read())
inherited.notify_ready()
"""


async def test_a_successor_gets_the_hash_key_where_nobody_else_can_read_it(
    listening: socket.socket, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("key", "environ", "cmdline")]
    before = open_descriptors()
    process = await succeed(listening, sys.executable, "-c", READS_KEY, *map(str, files))
    assert await asyncio.to_thread(process.wait, 60) == 0
    key, *readable = (file.read_bytes() for file in files)
    assert key == KEY
    assert not any(KEY in data or KEY.hex().encode() in data for data in readable)
    assert open_descriptors() == before, "no descriptor is left open"


async def test_a_successor_knows_when_its_predecessor_is_done(listening: socket.socket) -> None:
    reader, writer = os.pipe()
    ready_reader, ready = os.pipe()
    numbers = f"public={passed(listening)} ready={ready}"
    inherited = inherit_from_environment({SOCKETS_VARIABLE: numbers, LEARNT_VARIABLE: str(reader)})
    waiting = asyncio.create_task(inherited.wait_for_learnt())
    await asyncio.sleep(0)
    assert not waiting.done()
    os.close(writer)
    async with asyncio.timeout(60):
        await waiting
    inherited.notify_ready()
    os.close(ready_reader)
