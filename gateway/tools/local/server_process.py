"""Runs one llama.cpp server as a child process, with its port and its log."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import httpx

from gateway.tools.local import ServerStartError
from gateway.tools.local.server_command import (
    ServerBinary,
    ServerSpec,
    server_command,
    server_environment,
)

READY_POLL_INTERVAL = 0.1  # seconds between two health checks of a starting server

LOG_CHECK_INTERVAL = 10.0  # seconds between two checks of a log's size


class ServerProcess:
    """The process of one spec, which may be started again after its end.

    It dies with the thread that starts it.
    """

    def __init__(
        self,
        spec: ServerSpec,
        port: int,
        log: Path,
        *,
        binary: ServerBinary | None,
        clock: Callable[[], float],
    ) -> None:
        self.spec = spec
        host = f"[{spec.host}]" if ":" in spec.host else spec.host
        self.url = f"http://{host}:{port}"
        self.started_at = clock()
        self.log = log
        self._port = port
        self._binary = binary
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The PID of the process while it runs."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    async def start(self) -> None:
        """Start the process. Raises OSError when the log or the process can't be created."""
        self.started_at = self._clock()
        command = server_command(self.spec, self._port, parent=os.getpid(), binary=self._binary)
        with open_log(self.log) as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=server_environment(),
                # Ctrl-C must reach the gateway only, which drains before it ends its servers.
                start_new_session=True,
            )

    async def wait_until_ready(
        self, client: httpx.AsyncClient, timeout: float, on_loading: Callable[[], None]
    ) -> None:
        """Wait until `/health` gives 200; call `on_loading` once if it gives 503 first.

        Raises ServerStartError when the process ends, or is not ready after `timeout` seconds.
        """
        loading = False
        while self._clock() - self.started_at < timeout:
            if self.pid is None:
                raise self._start_error(f"ended ({self.exit_description()}) before it was ready")
            with suppress(httpx.HTTPError):
                status = (await client.get(f"{self.url}/health")).status_code
                if status == 200:
                    return
                if status == 503 and not loading:
                    loading = True
                    on_loading()
            await self._ended_within(READY_POLL_INTERVAL)
        raise self._start_error(f"was not ready after {timeout:.0f} s")

    async def wait(self) -> None:
        """Wait until the process has ended, and bound the size of its log meanwhile."""
        while not await self._ended_within(LOG_CHECK_INTERVAL):
            await asyncio.to_thread(truncate_log, self.log)

    async def stop(self, timeout: float) -> None:
        """End the process: SIGTERM, and SIGKILL after `timeout` seconds or when cancelled."""
        if self._process is None or self.pid is None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await self._ended_within(timeout)
        finally:
            if self.pid is not None:
                with suppress(ProcessLookupError):
                    self._process.kill()
        await self._process.wait()

    def exit_description(self) -> str:
        """Describe how the process ended."""
        status = self._process.returncode if self._process else None
        if status is None:
            return "not started"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"

    async def _ended_within(self, limit: float) -> bool:
        if self._process is None:
            return True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), limit)
        return self._process.returncode is not None

    def _start_error(self, problem: str) -> ServerStartError:
        lines = "".join(f"\n  {line}" for line in last_lines(self.log))
        return ServerStartError(
            f"{self.spec.name}: the llama.cpp server {problem}; the end of its log {self.log}:"
            f"{lines or ' nothing'}"
        )


BASE_PORT = 8081

MOST_PORTS_TRIED = 1000


def claim_port(host: str, port: int = 0) -> socket.socket:
    """Bind `port` (0: any free one) for a server that sets SO_REUSEADDR or SO_REUSEPORT.

    Raises OSError when the port is taken. The options are set after the bind: set before, the bind
    would succeed although another process has claimed the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    claim = socket.socket(family, socket.SOCK_STREAM)
    try:
        claim.bind((host, port))
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        claim.close()
        raise
    return claim


def claim_free_port(host: str, base: int = BASE_PORT) -> socket.socket:
    """Claim the first free port from `base` upwards, else any.

    Raises OSError when the host isn't an address of this machine.
    """
    for port in range(base, min(base + MOST_PORTS_TRIED, 65536)):
        try:
            return claim_port(host, port)
        except OSError as error:
            if error.errno not in {errno.EADDRINUSE, errno.EACCES}:
                raise
    return claim_port(host)


def claimed_port(claim: socket.socket) -> int:
    """Return the number of a claimed port."""
    port: int = claim.getsockname()[1]
    return port


MOST_LOG_BYTES = 8 << 20  # of a log, and of the older one beside it

TAIL_BYTES = 64 << 10


def open_log(path: Path) -> BinaryIO:
    """Begin a new log; the log of the previous run stays as `<name>.1`.

    It is opened for appending, so that it can be truncated while a server writes to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(_older(path))
    return path.open("ab", buffering=0)


def truncate_log(path: Path, limit: int = MOST_LOG_BYTES) -> bool:
    """Copy a log larger than `limit` bytes to `<name>.1`, and empty it.

    Lines written during the copy are lost. Returns whether the log was that large.
    """
    if not path.exists() or path.stat().st_size <= limit:
        return False
    shutil.copyfile(path, _older(path))
    os.truncate(path, 0)
    return True


def last_lines(path: Path, count: int = 20) -> list[str]:
    """Return the last lines of a log; none where there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
