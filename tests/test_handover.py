from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.access.exposure import AnonymousAccess
from gateway.handover import (
    SOCKETS_VARIABLE,
    HandoverFailed,
    InheritedState,
    inherit_from_environment,
    restart_command,
    start_successor,
    successor_environment,
)
from gateway.startup import Options, StartError

TELLS_READY = """
import os, sys
numbers = dict(part.split("=") for part in os.environ["LLAMA_GATEWAY_SOCKETS"].split())
os.write(int(numbers["ready"]), b"1")
"""


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def passed(sock: socket.socket) -> int:
    """A descriptor of the same socket, as a child has it."""
    number = os.dup(sock.fileno())
    os.set_inheritable(number, True)
    return number


def systemd(*sockets: socket.socket, names: str = "") -> dict[str, str]:
    """The environment with which systemd passes these sockets."""
    return {
        "LISTEN_PID": str(os.getpid()),
        "LISTEN_FDS": str(len(sockets)),
        "LISTEN_FDNAMES": names,
    }


def test_a_process_that_nobody_left_anything_to_inherits_nothing() -> None:
    assert inherit_from_environment({}).sockets == {}
    assert inherit_from_environment({"LISTEN_PID": "1", "LISTEN_FDS": "2"}).sockets == {}


def test_a_successor_takes_the_socket_that_stands_where_it_shall_listen(
    listening: socket.socket,
) -> None:
    reader, writer = os.pipe()
    left = inherit_from_environment(
        {SOCKETS_VARIABLE: f"public={passed(listening)} ready={writer}"}
    )
    port = listening.getsockname()[1]
    assert left.take_socket("public", [("127.0.0.1", port + 1)]) is None
    assert left.take_socket("admin", [("127.0.0.1", port)]) is None
    taken = left.take_socket("public", [("127.0.0.1", port)])
    assert taken is not None
    with taken:
        assert taken.getsockname() == listening.getsockname()
        assert not taken.get_inheritable()
    left.notify_ready()
    assert os.read(reader, 8) == b"1"
    assert os.read(reader, 8) == b""
    os.close(reader)


@pytest.mark.parametrize("customised", [True, False])
@pytest.mark.parametrize(
    "door",
    [
        AnonymousAccess(),
        AnonymousAccess(had_keys=True),
        AnonymousAccess(had_keys=True, allowed=True),
    ],
)
def test_a_successor_knows_what_its_predecessor_kept_shut(
    door: AnonymousAccess, customised: bool, listening: socket.socket
) -> None:
    reader, writer = os.pipe()
    told = successor_environment(door, Path("config/gateway.yaml"), customised=customised)
    assert told["LLAMA_GATEWAY_CONFIG"] == "config/gateway.yaml"
    left = inherit_from_environment(
        {SOCKETS_VARIABLE: f"public={passed(listening)} ready={writer}", **told}
    )
    assert (left.anonymous_access, left.customised) == (door, customised)
    left.notify_ready()
    os.close(reader)
    assert "LLAMA_GATEWAY_CONFIG" not in successor_environment(door, None, customised=customised)


def test_any_port_will_do_where_none_was_asked_for(listening: socket.socket) -> None:
    left = InheritedState({"public": listening})
    assert left.take_socket("public", [("127.0.0.1", 0)]) is listening


def test_a_socket_that_is_not_taken_is_closed_when_the_successor_is_ready(
    listening: socket.socket,
) -> None:
    left = InheritedState({"public": listening})
    left.notify_ready()
    assert listening.fileno() == -1


def test_sockets_of_systemd_say_where_the_gateway_listens(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.handover.LISTEN_FDS_START", passed(listening))
    left = inherit_from_environment(systemd(listening))
    options = left.apply_to(Options(Path("nodes.yaml"), port=1))
    assert (options.host, options.port) == listening.getsockname()
    assert options.admin_port is None
    left.notify_ready()


def test_systemds_names_tell_the_listeners_apart(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.handover.LISTEN_FDS_START", passed(listening))
    left = inherit_from_environment(systemd(listening, names="admin"))
    assert list(left.sockets) == ["admin"]
    left.notify_ready()


def test_a_name_of_systemds_that_is_no_listener_is_told_with_the_remedy(
    listening: socket.socket,
) -> None:
    with pytest.raises(StartError, match="FileDescriptorName=public or admin"):
        inherit_from_environment(systemd(listening, listening, names="admin:metrics"))


def test_a_unix_socket_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
        reader, writer = os.pipe()
        with pytest.raises(StartError, match="ListenStream=ADDRESS:PORT"):
            inherit_from_environment({SOCKETS_VARIABLE: f"public={passed(sock)} ready={writer}"})
        os.close(reader)
        os.close(writer)


def test_a_script_is_started_again_by_the_name_it_was_called_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = tmp_path / "release-1"
    release.touch(mode=0o755)
    current = tmp_path / "llama-gateway"
    current.symlink_to(release)
    monkeypatch.setattr(sys, "argv", [str(current), "serve", "--port", "1"])
    assert restart_command() == (str(current), "serve", "--port", "1")


def test_a_module_is_started_again_as_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["somewhere/gateway/__main__.py", "serve"])
    assert restart_command() == (sys.executable, "-m", "gateway", "serve")


async def test_a_successor_that_says_it_is_ready_has_taken_over(listening: socket.socket) -> None:
    command = (sys.executable, "-c", TELLS_READY)
    process = await start_successor(command, {"public": listening}, from_systemd=False)
    assert await asyncio.to_thread(process.wait, 60) == 0


async def test_a_successor_that_ends_before_it_is_ready_takes_nothing_over(
    listening: socket.socket,
) -> None:
    with pytest.raises(HandoverFailed, match="ended before it was ready"):
        await start_successor(
            (sys.executable, "-c", "raise SystemExit(3)"), {"public": listening}, from_systemd=False
        )


async def test_a_successor_that_hangs_is_ended(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.handover.READY_TIMEOUT", 0.2)
    with pytest.raises(HandoverFailed, match="not ready within"):
        await start_successor(
            (sys.executable, "-c", "import time; time.sleep(600)"),
            {"public": listening},
            from_systemd=False,
        )


async def test_a_command_that_is_not_there_is_told(listening: socket.socket) -> None:
    with pytest.raises(HandoverFailed, match="No such file"):
        await start_successor(("no-such-command",), {"public": listening}, from_systemd=False)
