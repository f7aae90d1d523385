"""The store fails under load, and no request does.

A gateway with a metered key serves streams and plain responses over emulated nodes while its store
is taken away for some seconds: a PostgreSQL server is halted (SIGSTOP) or killed (SIGKILL) and
started again; another process holds SQLite's lock; its file is moved away. At the end each request
has its one row in the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Connection, func, select

from gateway.callers.keys import new_key
from gateway.store.schema import open_requests, usage
from tests.emulator import EmulatedNode
from tests.gateways import NO_TLS, running_gateway, until
from tests.postgres import PostgresServer
from tests.store.stores import opened

CLIENTS = 16
LIMIT = 60.0  # seconds to come back
AROUND = 2.0  # seconds of load before and after
CHAT = "/v1/chat/completions"


@dataclass
class Phase:
    name: str
    seconds: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    phases: list[Phase]
    states: list[str]
    """The store's states, in their order."""
    rows: int
    """Rows of the ledger at the end."""
    left_open: int
    """Requests that the ledger believes to run at the end."""

    @property
    def requests(self) -> int:
        return sum(len(phase.seconds) for phase in self.phases)

    @property
    def failed(self) -> list[str]:
        return [why for phase in self.phases for why in phase.failed]


async def outage(
    folder: Path, url: str, begin: Callable[[], None], end: Callable[[], None], seconds: float
) -> Outcome:
    """Take the store away by `begin` for so many seconds under load, and give it back by `end`."""
    key = new_key("metered")
    limits = {"rpm": 10_000_000, "tpm": 1_000_000_000, "budget": "1000000/month"}
    settings = {
        "store": {"url": url},
        "keys": [{"id": key.id, "sha256": key.sha256, "name": "metered", "limits": limits}],
    }
    phases = [Phase("before")]
    states: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(EmulatedNode(slots=CLIENTS, decode_tps=200.0))
            for _ in range(2)
        ]
        running = await stack.enter_async_context(
            running_gateway(folder, [node.url for node in nodes], settings)
        )
        store = running.gateway.store
        assert store is not None
        stopping = asyncio.Event()

        async def client(number: int) -> None:
            headers = {"authorization": f"Bearer {key.text}"}
            async with httpx.AsyncClient(
                base_url=running.url, timeout=LIMIT, trust_env=False, verify=NO_TLS
            ) as http:
                while not stopping.is_set():
                    number += 1
                    await _request(http, headers, phases[-1], stream=number % 2 == 0)

        async def watch() -> None:
            while not stopping.is_set():
                state = store.status().state
                if states[-1:] != [state]:
                    states.append(state)
                await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
        tasks.append(asyncio.create_task(watch()))
        try:
            await asyncio.sleep(AROUND)
            phases.append(Phase("meanwhile"))
            await asyncio.to_thread(begin)
            try:
                await asyncio.sleep(seconds)
            finally:
                await asyncio.to_thread(end)
            phases.append(Phase("afterwards"))
            await until(lambda: store.status().up, LIMIT, store.status)
            await asyncio.sleep(AROUND)
        finally:
            stopping.set()
            await asyncio.gather(*tasks)
    return Outcome(phases, states, *await asyncio.to_thread(_counted, url))


async def _request(
    http: httpx.AsyncClient, headers: dict[str, str], phase: Phase, *, stream: bool
) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 20,
        "stream": stream,
    }
    began = time.monotonic()
    try:
        response = await http.post(CHAT, json=body, headers=headers)
        if response.status_code != 200:
            phase.failed.append(f"{response.status_code} {response.text[:200]}")
        elif stream and not response.text.rstrip().endswith("data: [DONE]"):
            phase.failed.append("a stream without its end")
    except httpx.HTTPError as error:
        phase.failed.append(repr(error))
    phase.seconds.append(time.monotonic() - began)


def _counted(url: str) -> tuple[int, int]:
    def count(connection: Connection) -> tuple[int, int]:
        rows, left = (
            connection.scalar(select(func.count()).select_from(table)) or 0
            for table in (usage, open_requests)
        )
        return rows, left

    with opened(url) as store:
        return store.run_now(count)


async def server_halted(server: PostgresServer, folder: Path, seconds: float) -> Outcome:
    return await outage(folder, server.new_database(), server.halt, server.go_on, seconds)


async def server_killed(server: PostgresServer, folder: Path, seconds: float) -> Outcome:
    return await outage(folder, server.new_database(), server.kill, server.start, seconds)


async def file_locked(folder: Path, seconds: float) -> Outcome:
    file = folder / "gateway.db"
    script = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60);"
        "c.execute('BEGIN IMMEDIATE'); print(flush=True); sys.stdin.read()"
    )
    holders: list[subprocess.Popen[bytes]] = []

    def begin() -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", script, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        holders.append(process)
        assert process.stdout is not None
        process.stdout.readline()

    def end() -> None:
        for process in holders:
            process.kill()
            process.communicate()

    return await outage(folder, f"sqlite:///{file}", begin, end, seconds)


async def file_away(folder: Path, seconds: float) -> Outcome:
    file, aside = folder / "gateway.db", folder / "aside.db"

    def begin() -> None:
        file.rename(aside)

    def end() -> None:
        aside.rename(file)

    return await outage(folder, f"sqlite:///{file}", begin, end, seconds)
