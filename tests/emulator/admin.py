"""The admin interface of a node, for other processes: `POST /__faults`.

It has a listener of its own (`AdminServer.listen`), since the node's may refuse connections.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.emulator.apis.answer import to_json
from tests.emulator.connection import Connection, ReceivedRequest
from tests.emulator.request_body import RefusedError, bad_request, read_json
from tests.emulator.response import Response

if TYPE_CHECKING:
    from tests.emulator.node import EmulatedNode


class AdminServer:
    """Executes commands for one node: `{"do": "next", "kind": "reset", "n": 2}`.

    `do`: `next`, `set` (both with the fields of a `Fault`), `clear`, `refuse`, `accept`, `kill`,
    `revive`, `loading` (`on`: true or false).
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

    def connection_opened(self, connection: Connection) -> None:
        self._connections.add(connection)

    def connection_closed(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def handle(self, connection: Connection, request: ReceivedRequest) -> None:
        response = Response(
            connection, closing=not request.keep_alive, head_only=False, closes_streams=True
        )
        connection.response = response
        task = asyncio.get_running_loop().create_task(self._serve(connection, request, response))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, connection: Connection, request: ReceivedRequest, response: Response
    ) -> None:
        try:
            await self._execute(read_json(request.body))
            await response.plain(200, b"{}")
        except RefusedError as refused:
            await response.plain(refused.status, to_json(refused.value))
        finally:
            connection.finished(response)

    async def _execute(self, command: dict[str, Any]) -> None:
        node, faults = self.node, self.node.faults
        options = dict(command)
        try:
            match options.pop("do", "next"):
                case "next":
                    faults.next(**options)
                case "set":
                    faults.set(**options)
                case "clear":
                    faults.clear()
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
                    raise bad_request(f"no command {other!r}")
        except (TypeError, ValueError) as error:
            raise bad_request(str(error)) from None
