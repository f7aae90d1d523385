"""Starts a gateway in a process of its own (`gateway_worker.py`) and sends it commands."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any, Self

ANSWER_LIMIT = 180.0
"""Seconds within which the process must answer a command."""


class GatewayProcess:
    """The child process and its command pipe. An asynchronous context manager."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.gateway_worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 26,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        process = self._process
        assert process is not None
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), ANSWER_LIMIT)
        except TimeoutError:
            process.kill()
            await process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def command(self, do: str, **options: Any) -> dict[str, Any]:
        """Run a command in the process.

        Raises AssertionError with the process's traceback when the command fails there.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        async with self._lock, asyncio.timeout(ANSWER_LIMIT):
            process.stdin.write(json.dumps({"do": do, **options}).encode() + b"\n")
            answer = json.loads(
                await process.stdout.readline() or b'{"failed": "the process has ended"}'
            )
        assert "failed" not in answer, answer.get("traceback") or answer["failed"]
        return dict(answer)

    def descriptors(self) -> int:
        """Descriptors that the process has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def limit_descriptors(self, more: int | None) -> None:
        """Limit the process to `more` further descriptors; None: to the system's hard limit."""
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
        soft = hard if more is None else self.descriptors() + more
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (soft, hard))
