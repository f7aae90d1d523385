"""Nodes in processes of their own, which can be stopped, killed and restarted on the same port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import IO, Any, Self

import httpx

from gateway.local.server import claim_port, claimed_port
from tests.chaos.faulty_link import FaultyLink
from tests.chaos.response_reader import read_plain
from tests.chaos.workload import EMULATED_MODEL, REAL_MODEL, WorkloadRequest, real_request_bodies
from tests.emulator.process import send_command
from tests.known import known
from tests.servers import spawn_demo_server, wait_for_demo_server

START_LIMIT = 120.0
RECOVERY_LIMIT = 60.0  # seconds within which a node without faults must carry out a command
CONTEXT = 2048
LOOPBACK = "127.0.0.1"


class ChaosNode(ABC):
    """A node in a process of its own. An asynchronous context manager."""

    def __init__(self, name: str) -> None:
        self.name = name
        # No other process gets the port while the node is down.
        self._claim = claim_port(LOOPBACK)
        self.port = claimed_port(self._claim)
        self.process: subprocess.Popen[bytes] | None = None
        self.files = ExitStack()  # that are open until its end
        self.url = ""
        self.direct_url = ""  # where it answers whatever the connection to `url` does
        self.down = asyncio.Lock()
        """Held by a fault that takes down its listener or process, until it is back."""

    @abstractmethod
    async def begin(self) -> None:
        """Start the process, and wait until it listens."""

    async def __aenter__(self) -> Self:
        try:
            await self.begin()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process is not None:
            await self.kill()
        self.files.close()
        self._claim.close()

    @property
    def pid(self) -> int:
        return known(self.process).pid

    async def kill(self) -> None:
        known(self.process).kill()
        await asyncio.to_thread(known(self.process).wait)

    async def restart(self) -> None:
        """Start it on the same port, if it has ended."""
        if known(self.process).poll() is not None:
            await self.begin()

    async def recover(self) -> None:
        await self.restart()
        os.kill(self.pid, signal.SIGCONT)


class EmulatorProcess(ChaosNode):
    """An emulated node; `prefix`: a command that runs it, for example in a network namespace."""

    def __init__(self, name: str, host: str = LOOPBACK, prefix: tuple[str, ...] = ()) -> None:
        super().__init__(name)
        self._command = (
            *(*prefix, sys.executable, "-m", "tests.emulator", "--slots", "2"),
            *("--model", EMULATED_MODEL, "--host", host, "--port", str(self.port)),
            *("--answer-tokens", "100000", "--embeddings"),
            *("--prefill-tps", "1500", "--decode-tps", "250", "--ping-interval", "0.3"),
        )
        self._commands_at = ""

    async def begin(self) -> None:
        told = self.files.enter_context(self._spawn())
        async with asyncio.timeout(START_LIMIT):
            lines = [await asyncio.to_thread(told.readline) for _ in range(2)]
        self.url, self._commands_at = (line.decode().strip() for line in lines)
        self.direct_url = self.url

    def _spawn(self) -> IO[bytes]:
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        return known(self.process.stdout)

    async def command(self, do: str, *, limit: float = 1.0, **options: Any) -> None:
        """Send it a command, which is dropped when no answer comes within `limit`."""
        with contextlib.suppress(OSError, ValueError):
            async with asyncio.timeout(limit):
                await send_command(self._commands_at, do=do, **options)

    async def recover(self) -> None:
        await super().recover()
        await self.command("clear", limit=RECOVERY_LIMIT)
        await self.command("loading", limit=RECOVERY_LIMIT, on=False)
        await self.command("revive", limit=RECOVERY_LIMIT)


class RealServer(ChaosNode):
    """A real llama.cpp server with one slot, behind a faulty link."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.link = FaultyLink((LOOPBACK, self.port))
        self.direct_url = f"http://{LOOPBACK}:{self.port}"

    async def begin(self) -> None:
        # A token's probability must not depend on whether it was decoded or prefilled.
        server = spawn_demo_server(
            slots=1, context=CONTEXT, alias=REAL_MODEL, port=self.port, extra=("--exact",)
        )
        self.process = server.process
        self.files.enter_context(server.log)
        await asyncio.to_thread(wait_for_demo_server, server, START_LIMIT)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.url = (await self.link.__aenter__()).url
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.url:
            await self.link.__aexit__()
        await super().__aexit__()

    async def recover(self) -> None:
        await super().recover()
        self.link.repair()


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
