from __future__ import annotations

import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.local import LocalFleetError, ServerStartError
from gateway.local.embedded import argument_parser
from gateway.local.server import (
    FLAG_PATTERN,
    LocalFleet,
    ServerBinary,
    ServerEvent,
    ServerSpec,
    claim_free_port,
    claim_port,
    claimed_port,
    find_binary,
    last_lines,
    open_log,
    restart_backoff,
    server_command,
    truncate_log,
)
from gateway.local.topology import read_fields
from tests.each_case import each_case
from tests.gateways import until
from tests.known import known
from tests.processes import gone
from tests.servers import demo_model, server_binary

SPEC = ServerSpec(
    name="local-0",
    model=Path("/models/m.gguf"),
    alias="m",
    slots=2,
    context=4096,
    threads=8,
    numa_node=0,
    prompt_cache_bytes=3 << 30,
)
PINNED = replace(SPEC, cpus=(4, 5), memory_node=1, no_mmap=True, embedding=True)
LOCKED = replace(PINNED, mlock=True)
HELP = """\
-h,    --help, --usage                  print usage and exit
-m,    --model FNAME                    model path (env: LLAMA_ARG_MODEL)
--port PORT                             port to listen
-np,   --parallel N                     number of server slots
"""


def help_with(*flags: str) -> ServerBinary:
    return ServerBinary(
        Path("/bin/llama-server"), frozenset(FLAG_PATTERN.findall(HELP)) | set(flags)
    )


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def split(command: list[str]) -> tuple[list[str], list[str]]:
    at = command.index("--")
    return command[:at], command[at + 1 :]


@pytest.mark.parametrize("binary", [None, help_with("--metrics")], ids=["embedded", "binary"])
def test_a_server_is_launched_on_its_node_with_its_batches_and_dies_with_its_parent(
    binary: ServerBinary | None,
) -> None:
    launch, _ = split(server_command(SPEC, 8081, parent=42, binary=binary))
    assert launch[launch.index("--parent") + 1] == "42"
    assert not {"--cpus", "--memory-node"} & set(launch)
    launch, _ = split(server_command(PINNED, 8081, parent=1, binary=binary))
    assert launch[launch.index("--cpus") + 1] == "4,5"
    assert launch[launch.index("--memory-node") + 1] == "1"
    b, ub = ("-b", "-ub") if binary else ("--batch", "--ubatch")
    given = replace(SPEC, batch=1024, micro_batch=128)
    for spec, sizes in ((SPEC, (512, 256)), (PINNED, (4096, 4096)), (given, (1024, 128))):
        flags = f"{b} {sizes[0]} {ub} {sizes[1]}"
        assert flags in " ".join(server_command(spec, 8081, parent=1, binary=binary))


def test_the_embedded_server_understands_its_command_line() -> None:
    _, server = split(server_command(LOCKED, 8081, parent=1))
    options = argument_parser().parse_args(server[server.index("node-server") + 1 :])
    assert (options.model, options.alias, options.port) == (SPEC.model, "m", 8081)
    assert (options.slots, options.ctx, options.threads) == (2, 8192, 8)
    assert (options.cache_ram, options.no_mmap, options.embedding) == (3072, True, True)
    assert options.mlock


def test_a_binary_gets_only_flags_that_it_has() -> None:
    _, old = split(server_command(PINNED, 8081, parent=1, binary=help_with()))
    assert " ".join(old) == (
        "/bin/llama-server -m /models/m.gguf --alias m --host 127.0.0.1 --port 8081 "
        "-np 2 -c 8192 -t 8 -tb 8 -b 4096 -ub 4096"
    )
    wanted = ("--metrics", "--slots", "--no-webui", "--no-mmap", "--embedding", "--cache-ram")
    _, middle = split(server_command(PINNED, 8081, parent=1, binary=help_with(*wanted)))
    assert set(wanted) <= set(middle)
    assert middle[middle.index("--cache-ram") + 1] == "3072"


def test_a_router_gets_its_preset_and_no_flag_that_the_preset_sets() -> None:
    router = replace(LOCKED, model=Path("/run/models.ini"), is_router=True)
    wanted = ("--metrics", "--cache-ram", "--pooling", "--embeddings", "--mlock", "--no-mmap")
    _, command = split(server_command(router, 8081, parent=1, binary=help_with(*wanted)))
    assert " ".join(command) == (
        "/bin/llama-server --models-preset /run/models.ini --models-max 0 --host 127.0.0.1 "
        "--port 8081 -t 8 -tb 8 -b 4096 -ub 4096 --metrics --mlock --no-mmap --embeddings"
    )


@each_case(
    ("has", "no_mmap", "given"),
    [
        (("--load-mode", "--mlock", "--no-mmap"), True, "--load-mode mlock"),
        (("--load-mode", "--mlock", "--no-mmap"), False, "--load-mode mmap+mlock"),
        (("--mlock", "--no-mmap"), True, "--mlock --no-mmap"),
        (("--mlock", "--no-mmap"), False, "--mlock"),
        (("--no-ui", "--no-webui", "--mlock"), False, "--no-ui --mlock"),  # the newer name
    ],
)
def test_a_model_is_locked_by_the_flags_of_the_binary(
    has: tuple[str, ...], no_mmap: bool, given: str
) -> None:
    spec = replace(SPEC, mlock=True, no_mmap=no_mmap)
    launch, server = split(server_command(spec, 8081, parent=1, binary=help_with(*has)))
    assert "--mlock" in launch
    assert " ".join(server).endswith(f" {given}")


def test_a_binary_on_path_is_found_with_its_flags_and_its_version(tmp_path: Path) -> None:
    version = "[ $1 = --version ] && echo 'version: 0.7.0 (build 11669, commit x)' >&2 && exit"
    program = script(tmp_path / "llama-server", f"{version}\n/bin/cat <<'E'\n{HELP}E")
    found = known(find_binary(None, str(tmp_path)))
    assert found.path == program
    assert "--parallel" in found.flags
    assert found.version == "0.7.0 (build 11669, commit x)"
    script(program, f"/bin/cat <<'E'\n{HELP}E")
    assert known(find_binary(None, str(tmp_path))).version is None
    for text, told in (("exit 3", "exit status 3"), ("echo text", "is not a llama-server's")):
        with pytest.raises(LocalFleetError, match=told):
            find_binary(script(program, text))
    program.unlink()
    assert find_binary(None, str(tmp_path)) is None
    with pytest.raises(LocalFleetError, match="no such program"):
        find_binary(program)


# Ports.


HOST = "127.0.0.1"


def listen_as_a_server(port: int, option: int) -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, option, 1)
        server.bind((HOST, port))
        server.listen()


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_the_server_can_listen_on_its_claimed_port(option: int) -> None:
    with claim_port(HOST) as claim:
        listen_as_a_server(claimed_port(claim), option)
        listen_as_a_server(claimed_port(claim), option)  # and once more after its end


def test_the_first_port_from_the_base_that_is_not_claimed_is_else_any() -> None:
    with claim_port(HOST) as taken:
        with pytest.raises(OSError, match="in use"):
            claim_port(HOST, claimed_port(taken))
        with claim_free_port(HOST, claimed_port(taken)) as claim:
            assert claimed_port(claim) > claimed_port(taken)
    with claim_free_port(HOST, 65536) as claim:
        assert claimed_port(claim) > 0


# Logs.


def test_a_log_that_grows_past_its_limit_is_cut_under_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    with open_log(path) as log:
        log.write(b"a" * 100 + b"\n")
        truncate_log(path, limit=101)
        log.write(b"b\n")
        truncate_log(path, limit=101)
        log.write(b"c\n")
    assert path.read_bytes() == b"c\n"
    assert path.with_name("x.log.1").read_bytes() == b"a" * 100 + b"\nb\n"
    # That of the previous run stays, too.
    open_log(path).close()
    assert last_lines(path.with_name("x.log.1")) == ["c"]
    assert last_lines(tmp_path / "none.log") == []


# Fleets of them.


def specs(count: int, model: Path | None = None) -> list[ServerSpec]:
    given = {"model": model or demo_model(), "alias": "demo", "threads": 1, "numa_node": 0}
    plan: dict[str, Any] = {"slots": 2, "context": 2048, **given}
    return [ServerSpec(name=f"local-{index}", **plan) for index in range(count)]


def local_fleet(plan: list[ServerSpec], folder: Path, **options: Any) -> LocalFleet:
    """A fleet on free ports, of the llama.cpp servers that this run is about."""
    return LocalFleet(plan, folder, **{"binary": server_binary(), "base_port": 0, **options})


def test_the_backoff_doubles_up_to_a_limit_and_is_reset_by_uptime() -> None:
    pauses: list[float] = []
    for _ in range(9):
        pauses.append(restart_backoff(pauses[-1] if pauses else None, uptime=1.0))
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert restart_backoff(30.0, uptime=59.9) == 30.0
    assert restart_backoff(30.0, uptime=60.0) == 0.5


@pytest.mark.real
async def test_a_server_that_is_late_or_waits_for_its_restart_or_ignores_sigterm_is_ended(
    tmp_path: Path,
) -> None:
    late = local_fleet(specs(1), tmp_path, start_timeout=0.001)
    with pytest.raises(ServerStartError, match="not ready after"):
        await late.__aenter__()
    assert late.pids == (None,)
    events: list[ServerEvent] = []
    async with local_fleet(specs(1), tmp_path, on_event=events.append) as fleet:
        os.kill(known(fleet.pids[0]), signal.SIGKILL)
        await until(lambda: any(event.kind == "exited" for event in events))
    assert fleet.pids == (None,)
    assert sum(event.kind == "started" for event in events) == 1
    # Servers inherit the mask, so that they are deaf to SIGTERM.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        async with local_fleet(specs(1), tmp_path, stop_timeout=0.2) as fleet:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            (pid,) = fleet.pids
            assert os.getsid(pid or 0) == pid, "Ctrl-C must not reach it"
            blocked = int(read_fields(Path(f"/proc/{pid}/status"))["SigBlk"], 16)
            assert blocked & 1 << signal.SIGTERM - 1
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    assert gone(pid)


@pytest.mark.real
async def test_a_server_that_cannot_start_is_reported_with_its_log_and_ends_the_others(
    tmp_path: Path,
) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"no model")
    fleet = local_fleet([*specs(1), *specs(2, bad)[1:]], tmp_path / "logs")
    with pytest.raises(ServerStartError) as caught:
        await fleet.__aenter__()
    message = str(caught.value)
    assert message.startswith("local-1: the llama.cpp server ended (exit status 1)")
    assert str(fleet.servers[1].log) in message
    assert str(bad) in message.partition("the end of its log")[2]
    assert fleet.pids == (None, None)
