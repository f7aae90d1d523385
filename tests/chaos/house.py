"""The handle of a gateway in a process of its own (`inside.py`)."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any, Self

PATIENCE = 180.0
"""Seconds for an answer of the process."""


class GatewayProcess:
    """An asynchronous context manager."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._asking = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.inside"),
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
            await asyncio.wait_for(process.wait(), PATIENCE)
        except TimeoutError:
            process.kill()
            await process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def order(self, do: str, **options: Any) -> dict[str, Any]:
        """Give an order. AssertionError with the other side's traceback when it fails there."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        async with self._asking, asyncio.timeout(PATIENCE):
            process.stdin.write(json.dumps({"do": do, **options}).encode() + b"\n")
            answer = json.loads(await process.stdout.readline() or b'{"failed": "it is gone"}')
        assert "failed" not in answer, answer.get("traceback") or answer["failed"]
        return dict(answer)

    def descriptors(self) -> int:
        """How many it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def limit_descriptors(self, more: int | None) -> None:
        """Let it open only so many more; None: as many as the system allows."""
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
        soft = hard if more is None else self.descriptors() + more
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (soft, hard))
