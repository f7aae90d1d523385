"""The servers of this machine, kept alive: started together, restarted when they die, ended.

`async with LocalFleet(specs, logs) as fleet:` waits until every server answers. A server that
dies later is started again on its port, after a pause that doubles while it keeps dying.
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

from gateway.tools.local.errors import ServerStartError
from gateway.tools.local.plan import ServerSpec
from gateway.tools.local.server_command import ServerBinary
from gateway.tools.local.server_process import (
    BASE_PORT,
    ServerProcess,
    claim_free_port,
    claimed_port,
)

START_TIMEOUT = 600.0  # seconds; a large model on a slow disk takes minutes

STOP_TIMEOUT = 5.0  # seconds between SIGTERM and SIGKILL

HEALTH_TIMEOUT = 2.0  # seconds for an answer

FIRST_BACKOFF = 0.5  # seconds before a dead server is started again

LONGEST_BACKOFF = 30.0

BACKOFF_RESET_AFTER = 60.0  # seconds alive, after which the next pause is the first again


@dataclass(frozen=True, slots=True)
class ServerStarted:
    """A server's process runs."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class ServerLoading:
    """A server answers, but still reads its model."""

    name: str


@dataclass(frozen=True, slots=True)
class ServerReady:
    """A server takes requests; `seconds` since its process was started."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ServerExited:
    """A server ended by itself and will be started again."""

    name: str
    exit_description: str  # such as `killed by SIGKILL`
    restart_in: float  # seconds


ServerEvent = ServerStarted | ServerLoading | ServerReady | ServerExited


def restart_backoff(last: float | None, uptime: float) -> float:
    """Seconds to wait before a restart, after a pause of `last` and a life of `alive`."""
    if last is None or uptime >= BACKOFF_RESET_AFTER:
        return FIRST_BACKOFF
    return min(last * 2, LONGEST_BACKOFF)


class LocalFleet:
    """Runs one process per spec for as long as its context is open.

    The processes die with the thread that entered the context, whatever ends it: enter it from
    the main one. Ports are the first free ones from `base_port` (0: any). Limits are in seconds.
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
        self._tell = on_event
        self._base_port = base_port
        self._start_limit = start_timeout
        self._stop_limit = stop_timeout
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
        """Start all servers and wait until each answers.

        Raises ServerStartError when one ends before that or takes longer than the limit, and
        OSError when the log folder can't be written or no port is to be had.
        """
        try:
            self._claim_ports()
            self._tasks = [asyncio.create_task(self._start(server)) for server in self._servers]
            await asyncio.gather(*self._tasks)
            self._tasks = [asyncio.create_task(self._keep(server)) for server in self._servers]
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
        """Where the servers listen; the same after a restart."""
        return tuple(server.url for server in self._servers)

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The servers' processes; None for one that is down."""
        return tuple(server.pid for server in self._servers)

    @property
    def logs(self) -> tuple[Path, ...]:
        """The servers' log files."""
        return tuple(server.log for server in self._servers)

    def inventory(self) -> list[dict[str, Any]]:
        """The servers as nodes of an inventory, in the form of `config/nodes.yaml`.

        They name one `host`, since they share the fate of this machine.
        """
        return [
            {
                "name": server.spec.name,
                "url": server.url,
                "host": "localhost",
                "labels": {"numa": str(server.spec.numa_node)},
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
                    # Two gateways of one user may share the folder, but no port.
                    self._log_folder / f"{spec.name}-{port}.log",
                    binary=self._binary,
                    clock=self._clock,
                )
            )

    async def _start(self, server: ServerProcess) -> None:
        name = server.spec.name
        await server.start()
        self._tell(ServerStarted(name, server.url))
        await server.wait_until_ready(
            self._client, self._start_limit, lambda: self._tell(ServerLoading(name))
        )
        self._tell(ServerReady(name, self._clock() - server.started_at))

    async def _keep(self, server: ServerProcess) -> None:
        pause: float | None = None
        while True:
            await server.wait()
            pause = restart_backoff(pause, self._clock() - server.started_at)
            self._tell(ServerExited(server.spec.name, server.exit_description(), pause))
            await asyncio.sleep(pause)
            try:
                await self._start(server)
            except (ServerStartError, OSError):
                await server.stop(self._stop_limit)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(server.stop(self._stop_limit) for server in self._servers))
        await self._client.aclose()
        for claim in self._claims:
            claim.close()
