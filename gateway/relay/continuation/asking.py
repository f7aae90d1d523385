"""Small questions to the node that is to go on: what it is, how it renders and tokenizes."""

from __future__ import annotations

import msgspec

from gateway.errors import forget_trace
from gateway.fleet.lease import Lease
from gateway.relay.values import NoJson, Value, object_of
from gateway.transport.connection import Connection
from gateway.transport.errors import Errored, Garbage, Overdue, Stale
from gateway.transport.patience import Within

LIMIT = 10.0
"""Seconds for one question. None of them takes a slot, or the time of a token."""

ANSWER_BYTES = 64 * 1024 * 1024
"""A prompt's tokens with their pieces are some 40 bytes each."""


class Questions:
    """Asks the node of one lease. Its `post` is a `seam.Ask`."""

    def __init__(self, lease: Lease, connect: float) -> None:
        self._pool = lease.upstream.pool
        self._connect = connect

    async def post(self, path: str, value: Value) -> Value:
        """Post JSON, get JSON. Raises: UpstreamError."""
        return await self._asked(b"POST", path, msgspec.json.encode(value))

    async def get(self, path: str) -> Value:
        """Get JSON. Raises: UpstreamError."""
        return await self._asked(b"GET", path, b"")

    async def _asked(self, method: bytes, path: str, body: bytes) -> Value:
        origin = self._pool.origin
        head = b"%s %s%s HTTP/1.1\r\n%scontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        data = head % (method, origin.prefix, path.encode(), origin.fields, len(body))
        try:
            async with Within(LIMIT):
                status, answer = await self._exchange(data, body)
        except TimeoutError:
            raise Overdue("first_byte", f"{path} was not answered for {LIMIT:.0f} s") from None
        if status != 200:
            raise Errored(f"The node answered {path} with status {status}")
        try:
            return object_of(answer)
        except NoJson:
            raise Garbage(f"The node's answer to {path} is no JSON object") from None

    async def _exchange(self, data: bytes, body: bytes) -> tuple[int, bytes]:
        pool = self._pool
        while True:
            connection = pool.idle() or await pool.connect(self._connect)
            try:
                connection.send(data, body)
                await connection.head()
                answer = await _whole(connection)
            except Stale as error:
                forget_trace(error)
                connection.close()
            except BaseException:
                connection.close()
                raise
            else:
                pool.give(connection)
                return connection.status, answer


async def _whole(connection: Connection) -> bytes:
    parts = []
    size = 0
    while part := await connection.read():
        parts.append(part)
        size += len(part)
        if size > ANSWER_BYTES:
            raise Garbage(f"A node's answer is larger than {ANSWER_BYTES} bytes")
    return b"".join(parts)
