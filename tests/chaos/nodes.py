"""Nodes in processes of their own, which can be stopped, killed and started on the same port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from socket import socket
from typing import Any, Protocol, Self

import httpx

from gateway.tools.local.server_process import claim_port, claimed_port
from tests.chaos.asks import EMULATED, REAL, Ask, real_bodies
from tests.chaos.reading import read_plain
from tests.chaos.wire import Wire
from tests.servers import DemoServer, spawn_demo_server, stop_demo_server, wait_for_demo_server

START_LIMIT = 120.0
HEALING = 60.0
"""Seconds within which a node that nothing is wrong with must obey."""
CONTEXT = 2048
LOOPBACK = "127.0.0.1"


class Node(Protocol):
    """What happens to either kind."""

    name: str
    url: str
    """Where the gateway finds it."""
    own_url: str
    """Where its `/slots` can be asked, whatever is wrong between it and the gateway."""

    @property
    def pid(self) -> int: ...

    async def die(self) -> None:
        """As by kill -9."""

    async def come_back(self) -> None:
        """On the same port, if it is gone."""

    async def heal(self) -> None:
        """Nothing is wrong with it any more."""


class Emulator:
    """`python -m tests.emulator` as a child."""

    def __init__(self, name: str, host: str, within: tuple[str, ...]) -> None:
        self.name = name
        self._host = host
        self._within = within
        # Nobody else gets the port while the node is down.
        self._claim = claim_port(LOOPBACK)
        self._process = self._spawn(claimed_port(self._claim))
        self.url = self.own_url = ""
        self._desk = ""
        self.leaving = asyncio.Lock()
        """Held by what takes its listener or its process away, until it is back."""

    @classmethod
    async def start(cls, name: str, host: str = LOOPBACK, within: tuple[str, ...] = ()) -> Self:
        """`within` is a command that runs another one, in a network of its own, say."""
        made = cls(name, host, within)
        try:
            await made._listens()
        except BaseException:
            made.close()
            raise
        return made

    @property
    def pid(self) -> int:
        return self._process.pid

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        command = [
            *(*self._within, sys.executable, "-m", "tests.emulator", "--slots", "2"),
            *("--model", EMULATED, "--host", self._host, "--port", str(port)),
            *("--answer-tokens", "100000", "--embeddings"),
            *("--prefill-tps", "1500", "--decode-tps", "250", "--ping-interval", "0.3"),
        ]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)

    async def _listens(self) -> None:
        assert self._process.stdout is not None
        async with asyncio.timeout(START_LIMIT):
            lines = [await asyncio.to_thread(self._process.stdout.readline) for _ in range(2)]
        self.url, self._desk = (line.decode().strip() for line in lines)
        self.own_url = self.url

    async def order(self, do: str, *, limit: float = 1.0, **options: Any) -> None:
        """An order for its desk; forgotten where it is stopped or gone for `limit` seconds."""
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(trust_env=False, verify=False, timeout=limit) as client:
                await client.post(f"{self._desk}/__faults", json={"do": do, **options})

    async def die(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def come_back(self) -> None:
        if self._process.poll() is None:
            return
        self._end()
        self._process = self._spawn(claimed_port(self._claim))
        await self._listens()

    async def heal(self) -> None:
        await self.come_back()
        os.kill(self.pid, signal.SIGCONT)
        await self.order("clear", limit=HEALING)
        await self.order("loading", limit=HEALING, on=False)
        await self.order("revive", limit=HEALING)

    def close(self) -> None:
        self._end()
        self._claim.close()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Real:
    """A real llama.cpp server with one slot, behind a wire."""

    def __init__(self, name: str, server: DemoServer, wire: Wire, claim: socket) -> None:
        self.name = name
        self.wire = wire
        self.url = wire.url
        self.own_url = f"http://{LOOPBACK}:{claimed_port(claim)}"
        self.leaving = asyncio.Lock()
        """Held by what ends or stops the process, until it is back."""
        self._server = server
        self._claim = claim

    @classmethod
    async def start(cls, name: str) -> Self:
        claim = claim_port(LOOPBACK)
        server = _spawn_real(claimed_port(claim))
        await asyncio.to_thread(wait_for_demo_server, server, START_LIMIT)
        wire = await Wire((LOOPBACK, claimed_port(claim))).__aenter__()
        return cls(name, server, wire, claim)

    @property
    def pid(self) -> int:
        return self._server.pid

    async def die(self) -> None:
        await asyncio.to_thread(self._server.kill)

    async def come_back(self) -> None:
        if self._server.process.poll() is None:
            return
        stop_demo_server(self._server)
        self._server = _spawn_real(claimed_port(self._claim))
        await asyncio.to_thread(wait_for_demo_server, self._server, START_LIMIT)

    async def heal(self) -> None:
        await self.come_back()
        os.kill(self.pid, signal.SIGCONT)
        self.wire.heal()

    async def aclose(self) -> None:
        await self.wire.__aexit__()
        stop_demo_server(self._server)
        self._claim.close()


def _spawn_real(port: int) -> DemoServer:
    # What a token's odds are must not depend on whether it was written or read.
    return spawn_demo_server(slots=1, context=CONTEXT, alias=REAL, port=port, extra=("--exact",))


async def references(url: str, prompts: int) -> list[Ask]:
    """What the server itself answers to all that it will be asked, uninterrupted."""
    asks = []
    async with httpx.AsyncClient(
        base_url=url, trust_env=False, verify=False, timeout=300
    ) as client:
        for path, body, tokens in real_bodies(prompts):
            answer = await client.post(path, json=body)
            read = read_plain(path, answer.content)
            asks.append(Ask(path, body, read.text, tokens, real=True))
    return asks


async def busy(url: str) -> int | None:
    """Slots that a node itself shows busy; None where it doesn't answer."""
    try:
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=30) as client:
            slots = (await client.get(f"{url}/slots")).json()
    except (httpx.HTTPError, ValueError):
        return None
    return sum(bool(slot["is_processing"]) for slot in slots)
