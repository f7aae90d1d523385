"""A node's reply on its way to the client, and how it comes to its end."""

from __future__ import annotations

from dataclasses import dataclass

from gateway import errors
from gateway.errors import GatewayError
from gateway.relay.attempt import Attempt, Write
from gateway.relay.dialects import Dialect
from gateway.relay.live import Ended, Live
from gateway.relay.settle import Settler
from gateway.transport.errors import Overdue, UpstreamError


@dataclass(slots=True)
class Reply:
    """All of it in `content`, or its first bytes there and the others in `rest`."""

    status: int
    fields: bytes
    """The lines of its head that are passed on."""
    content: bytes
    rest: Rest | None = None


@dataclass(slots=True, eq=False)
class Rest:
    """What follows the first bytes. `close` must be called, whether it was read or not."""

    attempt: Attempt
    live: Live
    dialect: Dialect
    settler: Settler
    over: bool = False

    async def next(self, write: Write | None = None) -> bytes | None:
        """The next bytes for the client, empty at the end.

        What comes of a stream while this waits goes straight to `write`; None: it said that the
        client lags.

        A stream that fails ends with its dialect's error event, never in silence. An answer
        that is no stream can't: Raises: UpstreamError.
        """
        if self.over:
            return b""
        try:
            chunk = await self.attempt.read(write)
        except UpstreamError as failure:
            return self._end(failure)
        return self._end(None) if chunk == b"" else chunk

    def close(self) -> None:
        """The client has it all, or has left."""
        if not self.over:
            self.over = True
            self.settler.broken(self.live, self.attempt, "client_closed")

    def _end(self, failure: UpstreamError | None) -> bytes:
        self.over = True
        attempt = self.attempt
        if not attempt.streams:
            if failure is None:
                self.settler.finished(self.live, attempt, attempt.content)
                return b""
            self.settler.broken(self.live, attempt, failure.outcome)
            raise failure
        tail = b"".join(attempt.tail)
        whole = self.dialect.ends_once or self.live.request.slots < 2
        if self.dialect.finished(tail) and not attempt.cut and (whole or failure is None):
            # What may have broken was behind all that counts.
            self.settler.finished(self.live, attempt, tail)
            return b""
        if self.dialect.failed(tail):
            self._note(502, "node_failed")
            self.settler.broken(self.live, attempt, "error_event")
            return b""
        self.settler.broken(self.live, attempt, "truncated" if failure is None else failure.outcome)
        error = as_error(failure)
        self._note(error.status, error.code)
        return self.dialect.error_event(error, self.live.request.tag)

    def _note(self, status: int, code: str) -> None:
        self.live.record.code = status
        self.live.record.reason = code


def as_error(failure: UpstreamError | None) -> GatewayError:
    """What the client is told; None: the stream just ended."""
    if failure is None:
        return errors.node_failed("The node's stream ended too early.")
    if isinstance(failure, Ended):
        return failure.error
    if isinstance(failure, Overdue):
        return errors.node_timeout(f"{failure}.")
    return errors.node_failed(f"{failure}".rstrip(".") + ".")
