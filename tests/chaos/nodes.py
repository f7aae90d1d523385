"""Nodes in processes of their own, which can be stopped, killed and restarted on the same port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from socket import socket
from typing import Any, Self

import httpx

from gateway.local.server import claim_port, claimed_port
from tests.chaos.faulty_link import FaultyLink
from tests.chaos.response_reader import read_plain
from tests.chaos.workload import EMULATED_MODEL, REAL_MODEL, WorkloadRequest, real_request_bodies
from tests.emulator.admin import send_command
from tests.servers import DemoServer, spawn_demo_server, stop_demo_server, wait_for_demo_server

START_LIMIT = 120.0
RECOVERY_LIMIT = 60.0
"""Seconds within which a node without faults must carry out a command."""
CONTEXT = 2048
LOOPBACK = "127.0.0.1"


class EmulatorProcess:
    """An emulated node, `python -m tests.emulator`, as a child process."""

    def __init__(self, name: str, host: str, prefix: tuple[str, ...]) -> None:
        self.name = name
        self._host = host
        self._command_prefix = prefix
        # No other process gets the port while the node is down.
        self._claim = claim_port(LOOPBACK)
        self._process = self._spawn(claimed_port(self._claim))
        self.url = self.direct_url = ""
        self._commands = ""
        self.down = asyncio.Lock()
        """Held by a fault that takes down its listener or process, until it is back."""

    @classmethod
    async def start(cls, name: str, host: str = LOOPBACK, prefix: tuple[str, ...] = ()) -> Self:
        """Start a node. `prefix`: a command that runs it, for example in a network namespace."""
        emulator = cls(name, host, prefix)
        try:
            await emulator._wait_until_listening()
        except BaseException:
            emulator.close()
            raise
        return emulator

    @property
    def pid(self) -> int:
        return self._process.pid

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        command = [
            *(*self._command_prefix, sys.executable, "-m", "tests.emulator", "--slots", "2"),
            *("--model", EMULATED_MODEL, "--host", self._host, "--port", str(port)),
            *("--answer-tokens", "100000", "--embeddings"),
            *("--prefill-tps", "1500", "--decode-tps", "250", "--ping-interval", "0.3"),
        ]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)

    async def _wait_until_listening(self) -> None:
        assert self._process.stdout is not None
        async with asyncio.timeout(START_LIMIT):
            lines = [await asyncio.to_thread(self._process.stdout.readline) for _ in range(2)]
        self.url, self._commands = (line.decode().strip() for line in lines)
        self.direct_url = self.url

    async def command(self, do: str, *, limit: float = 1.0, **options: Any) -> None:
        """Send it a command, which is dropped when no answer comes within `limit`."""
        with contextlib.suppress(OSError, ValueError):
            async with asyncio.timeout(limit):
                await send_command(self._commands, do=do, **options)

    async def kill(self) -> None:
        """Kill the process, as by kill -9."""
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def restart(self) -> None:
        """Start it on the same port, if it has ended."""
        if self._process.poll() is None:
            return
        self._end()
        self._process = self._spawn(claimed_port(self._claim))
        await self._wait_until_listening()

    async def recover(self) -> None:
        """End all its faults."""
        await self.restart()
        os.kill(self.pid, signal.SIGCONT)
        await self.command("clear", limit=RECOVERY_LIMIT)
        await self.command("loading", limit=RECOVERY_LIMIT, on=False)
        await self.command("revive", limit=RECOVERY_LIMIT)

    def close(self) -> None:
        self._end()
        self._claim.close()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class RealServer:
    """A real llama.cpp server with one slot, behind a faulty link.

    The gateway finds it at `url`; at `direct_url` it answers whatever the link does.
    """

    def __init__(self, name: str, server: DemoServer, link: FaultyLink, claim: socket) -> None:
        self.name = name
        self.link = link
        self.url = link.url
        self.direct_url = f"http://{LOOPBACK}:{claimed_port(claim)}"
        self.down = asyncio.Lock()
        """Held by a fault that kills or stops the process, until it is back."""
        self._server = server
        self._claim = claim

    @classmethod
    async def start(cls, name: str) -> Self:
        claim = claim_port(LOOPBACK)
        server = _spawn_server(claimed_port(claim))
        await asyncio.to_thread(wait_for_demo_server, server, START_LIMIT)
        link = await FaultyLink((LOOPBACK, claimed_port(claim))).__aenter__()
        return cls(name, server, link, claim)

    @property
    def pid(self) -> int:
        return self._server.pid

    async def kill(self) -> None:
        """Kill the process, as by kill -9."""
        await asyncio.to_thread(self._server.kill)

    async def restart(self) -> None:
        """Start it on the same port, if it has ended."""
        if self._server.process.poll() is None:
            return
        stop_demo_server(self._server)
        self._server = _spawn_server(claimed_port(self._claim))
        await asyncio.to_thread(wait_for_demo_server, self._server, START_LIMIT)

    async def recover(self) -> None:
        """End all its faults."""
        await self.restart()
        os.kill(self.pid, signal.SIGCONT)
        self.link.repair()

    async def aclose(self) -> None:
        await self.link.__aexit__()
        stop_demo_server(self._server)
        self._claim.close()


def _spawn_server(port: int) -> DemoServer:
    # A token's probability must not depend on whether it was decoded or prefilled.
    return spawn_demo_server(
        slots=1, context=CONTEXT, alias=REAL_MODEL, port=port, extra=("--exact",)
    )


async def reference_answers(url: str, prompts: int) -> list[WorkloadRequest]:
    """The server's own, uninterrupted answers to all requests of the load."""
    requests = []
    async with httpx.AsyncClient(
        base_url=url, trust_env=False, verify=False, timeout=300
    ) as client:
        for path, body, tokens in real_request_bodies(prompts):
            answer = await client.post(path, json=body)
            read = read_plain(path, answer.content)
            requests.append(WorkloadRequest(path, body, read.text, tokens, real=True))
    return requests


async def busy_slots(url: str) -> int | None:
    """Busy slots by the node's own `/slots`; None when it does not answer."""
    try:
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=30) as client:
            slots = (await client.get(f"{url}/slots")).json()
    except (httpx.HTTPError, ValueError):
        return None
    return sum(bool(slot["is_processing"]) for slot in slots)
