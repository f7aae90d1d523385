"""A cloud that starts and stops machines by HTTP calls: `POST /start/NAME`, `/stop/NAME`.

The machines are emulated nodes in this process, so that all of it can run in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from socket import socket
from typing import Any, Self

from gateway.local.server import claim_port, claimed_port
from tests.emulator import EmulatedNode
from tests.schedule.standby_site import MODEL

HOST = "127.0.0.1"
BOOT = 0.7
"""Seconds from a call until the server listens."""


@dataclass(slots=True)
class Machine:
    """A machine that is off until it is started. It records its calls in `orders`."""

    name: str
    options: dict[str, Any]
    claim: socket
    """Reserves its port while it is off."""
    orders: list[str] = field(default_factory=list)
    answers: dict[str, tuple[float, int, str]] = field(default_factory=dict)
    """For `start` or `stop`: an answer (seconds, status, body) that replaces the action."""
    _node: EmulatedNode | None = None
    _booting: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{claimed_port(self.claim)}"

    async def obey(self, order: str) -> tuple[int, str]:
        """Status and body of the answer."""
        self.orders.append(order)
        if order in self.answers:
            seconds, status, body = self.answers[order]
            await asyncio.sleep(seconds)
            return status, body
        if order == "start":
            self._booting = asyncio.create_task(self._boot())
        else:
            await self.end()
        return 200, "as you like"

    async def _boot(self) -> None:
        await asyncio.sleep(BOOT)
        port = claimed_port(self.claim)
        self._node = await EmulatedNode(port=port, model=MODEL, **self.options).__aenter__()

    async def end(self) -> None:
        """Stop it, even while it starts."""
        if self._booting is not None:
            self._booting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._booting
        if self._node is not None:
            await self._node.__aexit__()
            self._node = None


class Cloud:
    """An asynchronous context manager. Machines are added before or after entering it."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self._claim = claim_port(HOST)
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[None]] = set()

    def machine(self, name: str, **options: Any) -> Machine:
        """Add a machine; `options` are those of the emulated node."""
        made = self.machines[name] = Machine(name, options, claim_port(HOST))
        return made

    def node(self, name: str, **keys: Any) -> dict[str, Any]:
        """A machine's entry in the inventory, with these further keys."""
        hook = f"http://{HOST}:{claimed_port(self._claim)}"
        return {
            "name": name,
            "url": self.machines[name].url,
            "standby": True,
            "model": MODEL,
            "slots": 2,
            "start": {"url": f"{hook}/start/{name}"},
            "stop": {"url": f"{hook}/stop/{name}"},
            **keys,
        }

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._called, HOST, claimed_port(self._claim), reuse_port=True
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for machine in self.machines.values():
            await machine.end()
            machine.claim.close()
        self._claim.close()

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        try:
            # Python 3.11 prints an error for a task that is cancelled in here.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                head = await reader.readuntil(b"\r\n\r\n")
                _, order, name = head.split()[1].decode().split("/")
                status, body = await self.machines[name].obey(order)
                writer.write(
                    f"HTTP/1.1 {status} Whatever\r\nContent-Length: {len(body)}\r\n"
                    f"Connection: close\r\n\r\n{body}".encode()
                )
                await writer.drain()
        finally:
            writer.close()
            self._calls.discard(call)
