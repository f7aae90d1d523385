from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import gateway
from gateway.local import ServerStartError
from gateway.local.server import (
    LocalFleet,
    ServerEvent,
    ServerSpec,
    find_binary,
    restart_backoff,
)
from tests.known import known
from tests.processes import gone
from tests.servers import demo_model, may_lock, server_binary

ROOT = Path(gateway.__file__).parent.parent


def specs(count: int, model: Path | None = None) -> list[ServerSpec]:
    given = {"model": model or demo_model(), "alias": "demo", "threads": 1, "numa_node": 0}
    plan: dict[str, Any] = {"slots": 2, "context": 2048, **given}
    return [ServerSpec(name=f"local-{index}", **plan) for index in range(count)]


def local_fleet(plan: list[ServerSpec], folder: Path, **options: Any) -> LocalFleet:
    """A fleet on free ports, of the llama.cpp servers that this run is about."""
    return LocalFleet(plan, folder, **{"binary": server_binary(), "base_port": 0, **options})


async def until(condition: Callable[[], bool], limit: float = 60.0) -> None:
    async with asyncio.timeout(limit):
        while not condition():  # noqa: ASYNC110 - a process tells no event
            await asyncio.sleep(0.02)


def test_the_backoff_doubles_up_to_a_limit_and_is_reset_by_uptime() -> None:
    pauses: list[float] = []
    for _ in range(9):
        pauses.append(restart_backoff(pauses[-1] if pauses else None, uptime=1.0))
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert restart_backoff(30.0, uptime=59.9) == 30.0
    assert restart_backoff(30.0, uptime=60.0) == 0.5


@pytest.mark.smoke
@pytest.mark.real
async def test_servers_answer_are_described_as_nodes_and_end_with_the_fleet(tmp_path: Path) -> None:
    events: list[ServerEvent] = []
    fleet = local_fleet(specs(2), tmp_path, on_event=events.append)
    async with fleet, httpx.AsyncClient(timeout=60) as client:
        for url in fleet.urls:
            props = (await client.get(f"{url}/props")).json()
            assert (props["total_slots"], props["model_alias"]) == (2, "demo")
        labels = {"numa": "0", "started_by": "llama-gateway up"}
        assert fleet.inventory() == [
            {"name": f"local-{number}", "url": url, "host": "localhost", "labels": labels}
            for number, url in enumerate(fleet.urls)
        ]
        pids, logs = fleet.pids, [server.log for server in fleet.servers]
        assert not any(gone(pid) for pid in pids)
        # They log from threads of their own.
        await until(lambda: all(log.stat().st_size > 0 for log in logs))
    assert all(gone(pid) for pid in pids)
    assert {event.kind for event in events} >= {"started", "ready"}
    assert sum(event.kind == "ready" for event in events) == 2
    assert all(log.parent == tmp_path for log in logs)


@pytest.mark.real
async def test_a_server_understands_every_option_of_its_plan(tmp_path: Path) -> None:
    memory: dict[str, Any] = {"no_mmap": True, "mlock": may_lock(), "prompt_cache_bytes": 64 << 20}
    plan = replace(*specs(1), **memory, embedding=True, batch=2048, micro_batch=2048)
    async with local_fleet([plan], tmp_path) as fleet, httpx.AsyncClient(timeout=60) as client:
        (url,) = fleet.urls
        answer = await client.post(f"{url}/v1/embeddings", json={"input": "hello"})
        assert answer.status_code == 200, answer.text
        assert (await client.get(f"{url}/metrics")).status_code == 200
        assert (await client.get(f"{url}/slots")).status_code == 200
        # No web page may read it, except one of its own.
        assert answer.headers["access-control-allow-origin"] in {"", url}


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
    # The binary is the embedded server behind llama-server's flags, and deaf.
    binary = find_binary(deaf_binary(tmp_path / "llama-server"))
    async with local_fleet(specs(1), tmp_path, binary=binary, stop_timeout=0.2) as fleet:
        (pid,) = fleet.pids
        assert psutil.Process(pid).cmdline()[1] == str(tmp_path / "llama-server")
        assert os.getsid(pid or 0) == pid, "Ctrl-C must not reach it"
    assert gone(pid)


def deaf_binary(path: Path) -> Path:
    path.write_text(
        f"""#!{sys.executable}
import argparse, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from gateway.local import embedded
parser = argparse.ArgumentParser()
for names in (("-m", "--model"), ("--alias",), ("--host",), ("--port",), ("-np", "--parallel"),
              ("-c", "--ctx-size"), ("-t", "--threads"), ("-tb",), ("-b",), ("-ub",)):
    parser.add_argument(*names)
given = parser.parse_args()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
embedded.main(["--model", given.model, "--alias", given.alias, "--port", given.port,
               "--slots", given.parallel, "--ctx", given.ctx_size])
"""
    )
    path.chmod(0o755)
    return path


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


@pytest.mark.real
async def test_cancelling_the_start_ends_the_started_servers(tmp_path: Path) -> None:
    started = asyncio.Event()
    fleet = local_fleet(specs(2), tmp_path, on_event=lambda _: started.set())
    task = asyncio.create_task(fleet.__aenter__())
    async with asyncio.timeout(60):
        await started.wait()
    pids = fleet.pids
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fleet.pids == (None, None)
    assert all(gone(pid) for pid in pids)
