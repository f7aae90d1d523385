"""Supervises the servers of this machine: starts them, restarts those that exit, ends them.

`async with LocalFleet(specs, log_folder) as fleet:` waits until every server is ready. A server
that exits later is restarted on its port, after a backoff that doubles while it keeps exiting.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from gateway.config.inventory import STARTED_BY, UP
from gateway.local import ServerStartError
from gateway.local.server import (
    BASE_PORT,
    ServerBinary,
    ServerProcess,
    ServerSpec,
    claim_free_port,
    claimed_port,
)

START_TIMEOUT = 600.0  # seconds; a large model on a slow disk takes minutes
STOP_TIMEOUT = 5.0  # seconds between SIGTERM and SIGKILL
HEALTH_TIMEOUT = 2.0  # seconds for a response
FIRST_BACKOFF = 0.5  # seconds before a restart
LONGEST_BACKOFF = 30.0
BACKOFF_RESET_AFTER = 60.0  # seconds of uptime after which the backoff begins anew


@dataclass(frozen=True, slots=True)
class ServerStarted:
    """A server's process was started."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class ServerLoading:
    """A server responds, but is still loading its model."""

    name: str


@dataclass(frozen=True, slots=True)
class ServerReady:
    """A server takes requests, `seconds` after its process was started."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ServerExited:
    """A server exited and will be restarted."""

    name: str
    exit_description: str  # such as `killed by SIGKILL`
    restart_in: float  # seconds


ServerEvent = ServerStarted | ServerLoading | ServerReady | ServerExited


def restart_backoff(last: float | None, uptime: float) -> float:
    """Return the seconds before a restart, after a backoff of `last` and `uptime` seconds."""
    if last is None or uptime >= BACKOFF_RESET_AFTER:
        return FIRST_BACKOFF
    return min(last * 2, LONGEST_BACKOFF)


class LocalFleet:
    """Runs one process per spec while its context is open.

    The processes die with the thread that entered the context, so enter it in the main thread.
    Ports are the first free ones from `base_port` (0: any). Timeouts are in seconds.
    """

    def __init__(
        self,
        specs: Sequence[ServerSpec],
        log_folder: Path,
        *,
        binary: ServerBinary | None = None,
        on_event: Callable[[ServerEvent], None] = lambda _: None,
        base_port: int = BASE_PORT,
        start_timeout: float = START_TIMEOUT,
        stop_timeout: float = STOP_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._specs = tuple(specs)
        self._log_folder = log_folder
        self._binary = binary
        self._on_event = on_event
        self._base_port = base_port
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._clock = clock
        self._claims: list[socket.socket] = []
        self._servers: list[ServerProcess] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._client = httpx.AsyncClient(
            timeout=HEALTH_TIMEOUT,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Self:
        """Start all servers and wait until each is ready.

        Raises ServerStartError when one ends before that or takes longer than `start_timeout`, and
        OSError when the log folder can't be written or no port is free.
        """
        try:
            self._claim_ports()
            self._tasks = [asyncio.create_task(self._start(server)) for server in self._servers]
            await asyncio.gather(*self._tasks)
            self._tasks = [asyncio.create_task(self._supervise(server)) for server in self._servers]
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End all servers: SIGTERM, and SIGKILL to those that take too long."""
        await self._end()

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers' addresses, which stay the same after a restart."""
        return tuple(server.url for server in self._servers)

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The PIDs of the servers; None for one that is down."""
        return tuple(server.pid for server in self._servers)

    @property
    def logs(self) -> tuple[Path, ...]:
        """The servers' log files."""
        return tuple(server.log for server in self._servers)

    def inventory(self) -> list[dict[str, Any]]:
        """Return the servers as nodes of an inventory, in the form of `config/nodes.yaml`.

        They have one `host`, since they fail together with this machine.
        """
        return [
            {
                "name": server.spec.name,
                "url": server.url,
                "host": "localhost",
                "labels": {"numa": str(server.spec.numa_node), STARTED_BY: UP},
            }
            for server in self._servers
        ]

    def _claim_ports(self) -> None:
        for spec in self._specs:
            self._claims.append(claim_free_port(spec.host, self._base_port))
            port = claimed_port(self._claims[-1])
            self._servers.append(
                ServerProcess(
                    spec,
                    port,
                    # Two gateways of one user share the folder, but never a port.
                    self._log_folder / f"{spec.name}-{port}.log",
                    binary=self._binary,
                    clock=self._clock,
                )
            )

    async def _start(self, server: ServerProcess) -> None:
        name = server.spec.name
        await server.start()
        self._on_event(ServerStarted(name, server.url))
        await server.wait_until_ready(
            self._client, self._start_timeout, lambda: self._on_event(ServerLoading(name))
        )
        self._on_event(ServerReady(name, self._clock() - server.started_at))

    async def _supervise(self, server: ServerProcess) -> None:
        backoff: float | None = None
        while True:
            await server.wait()
            backoff = restart_backoff(backoff, self._clock() - server.started_at)
            self._on_event(ServerExited(server.spec.name, server.exit_description(), backoff))
            await asyncio.sleep(backoff)
            try:
                await self._start(server)
            except (ServerStartError, OSError):
                await server.stop(self._stop_timeout)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(server.stop(self._stop_timeout) for server in self._servers))
        await self._client.aclose()
        for claim in self._claims:
            claim.close()
