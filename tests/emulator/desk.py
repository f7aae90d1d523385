"""Where another process switches faults and reads counters: `POST /__faults`, `GET /__stats`.

No fault ever meets these two paths. They answer on the node's own port and, since that one may
refuse, on a second listener (`Desk.listen`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.emulator.connection import Connection, Request
from tests.emulator.dialects.answer import dump
from tests.emulator.prompts import RefusedError, bad_request, read_json
from tests.emulator.reply import Reply

if TYPE_CHECKING:
    from tests.emulator.node import EmulatedNode


class Desk:
    """Takes orders for one node: `{"do": "next", "kind": "reset", "n": 2, "after_events": 3}`.

    `do`: `next`, `set` (both with the fields of a `Fault`), `clear`, `release`, `refuse`,
    `accept`, `kill`, `revive`, `loading` (`on`: true or false).
    """

    def __init__(self, node: EmulatedNode) -> None:
        self.node = node
        self.keepalive_seconds = 60.0
        self.url = ""
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), host, port)
        self.url = "http://{}:{}".format(*self._server.sockets[0].getsockname()[:2])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def joined(self, connection: Connection) -> int:
        self._connections.add(connection)
        return len(self._connections)

    def left(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def handle(self, connection: Connection, request: Request) -> None:
        reply = Reply(
            connection, closing=not request.keep_alive, head_only=False, closes_streams=True
        )
        connection.reply = reply
        task = asyncio.get_running_loop().create_task(self._serve(connection, request, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: Connection, request: Request, reply: Reply) -> None:
        try:
            if request.path == "/__faults":
                await self._obey(read_json(request.body))
            await reply.plain(200, dump(self.stats()))
        except RefusedError as refused:
            await reply.plain(refused.status, dump(refused.value))
        finally:
            connection.finished(reply)

    async def _obey(self, order: dict[str, Any]) -> None:
        node, faults = self.node, self.node.faults
        options = dict(order)
        try:
            match options.pop("do", "next"):
                case "next":
                    faults.next(**options)
                case "set":
                    faults.set(**options)
                case "clear":
                    faults.clear()
                case "release":
                    faults.release()
                case "refuse":
                    await node.refuse()
                case "accept":
                    await node.accept()
                case "kill":
                    await node.kill()
                case "revive":
                    await node.revive(**options)
                case "loading":
                    node.loading = bool(options.get("on", True))
                case other:
                    raise bad_request(f"no order {other!r}")
        except (TypeError, ValueError) as error:
            raise bad_request(str(error)) from None

    def stats(self) -> dict[str, Any]:
        """The node's counters."""
        node = self.node
        return {
            "requests": node.requests,
            "control_requests": node.control_requests,
            "connections_opened": node.connections_opened,
            "connections": node.connections,
            "busy": node.busy,
            "peak_busy": node.peak_busy,
            "queued": node.queued,
            "faults_fired": node.faults.fired,
            "tokens": node.engine.tokens,
            "prompt_tokens": node.engine.prompt_tokens,
            "cached_tokens": node.engine.cached_tokens,
            "failures": [repr(failure) for failure in node.failures],
        }
