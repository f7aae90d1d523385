"""One llama.cpp server as a child process: started, waited for, ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx

from gateway.local.errors import ServerStartError
from gateway.local.plan import ServerSpec
from gateway.local.server_command import Binary, server_command, server_environment
from gateway.local.server_log import bound_log, last_lines, open_log

POLL = 0.1  # seconds between two looks at a server that is starting
LOG_CHECK = 10.0  # seconds between two looks at the size of a log


class ServerProcess:
    """The process of one spec; it may be started again after its end.

    It dies with the thread that starts it.
    """

    def __init__(
        self,
        spec: ServerSpec,
        port: int,
        log: Path,
        *,
        binary: Binary | None,
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
        """The id of the process while it runs."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    async def start(self) -> None:
        """Start the process. Raises OSError when the log or the process can't be made."""
        self.started_at = self._clock()
        command = server_command(self.spec, self._port, parent=os.getpid(), binary=self._binary)
        with open_log(self.log) as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=server_environment(),
                # Ctrl-C is for the gateway: it drains before it ends its servers.
                start_new_session=True,
            )

    async def until_ready(
        self, client: httpx.AsyncClient, limit: float, on_loading: Callable[[], None]
    ) -> None:
        """Wait until `/health` says 200, calling `on_loading` once if it says 503 first.

        Raises ServerStartError when the process ends, or isn't ready after `limit` seconds.
        """
        loading = False
        while self._clock() - self.started_at < limit:
            if self.pid is None:
                raise self._start_error(f"ended ({self.ending()}) before it was ready")
            with suppress(httpx.HTTPError):
                status = (await client.get(f"{self.url}/health")).status_code
                if status == 200:
                    return
                if status == 503 and not loading:
                    loading = True
                    on_loading()
            await self._ended_within(POLL)
        raise self._start_error(f"was not ready after {limit:.0f} s")

    async def wait(self) -> None:
        """Wait until the process has ended, and keep its log bounded meanwhile."""
        while not await self._ended_within(LOG_CHECK):
            await asyncio.to_thread(bound_log, self.log)

    async def stop(self, limit: float) -> None:
        """End the process: SIGTERM, and SIGKILL after `limit` seconds or when cancelled."""
        if self._process is None or self.pid is None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await self._ended_within(limit)
        finally:
            if self.pid is not None:
                with suppress(ProcessLookupError):
                    self._process.kill()
        await self._process.wait()

    def ending(self) -> str:
        """How the process ended, for people."""
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

    def _start_error(self, what: str) -> ServerStartError:
        lines = "".join(f"\n  {line}" for line in last_lines(self.log))
        return ServerStartError(
            f"{self.spec.name}: the llama.cpp server {what}; the end of its log {self.log}:"
            f"{lines or ' nothing'}"
        )
