"""A response with a fault."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from tests.emulator.faults import GARBAGE, POINT_FAULTS, Fault, FaultPlan
from tests.emulator.response import JSON, REASONS, ClientGoneError, Response

if TYPE_CHECKING:
    from tests.emulator.connection import Connection

_STEP = 0.01  # seconds between pieces, unless the fault says otherwise


class FaultyResponse(Response):
    def __init__(self, link: Connection, fault: Fault, faults: FaultPlan, **how: bool) -> None:
        super().__init__(link, **how)
        self.fault = fault
        self.faults = faults
        self.released = faults.released
        self.sent = 0  # events
        self.triggered = False
        self.unmerged: list[bytes] = []  # chunks that are to be sent in one segment

    async def replace_response(self) -> bool:
        """Do what the fault does before a slot is taken; whether it replaces the response."""
        fault = self.fault
        if fault.kind == "status":
            status = fault.status or 500
            await super().plain(status, fault.error_body(), headers=_extra_headers(fault))
            return True
        if fault.kind == "garbage":
            self.connection.write(fault.data or GARBAGE)
            self._end_connection()
        if fault.kind in {"reset", "close"} and fault.after_events is None:
            self._end_connection(reset=fault.kind == "reset")
        if fault.kind == "interim":
            status = fault.status or 103
            extra = "".join(f"{name}: {value}\r\n" for name, value in fault.headers.items())
            head = f"HTTP/1.1 {status} {REASONS.get(status, 'Interim')}\r\n{extra}\r\n"
            self.connection.write(head.encode() * (fault.count or 1))
        return False

    async def plain(
        self, status: int, body: bytes, kind: str = JSON, headers: dict[str, str] | None = None
    ) -> None:
        fault = self.fault
        more = (headers or {}) | _extra_headers(fault)
        if fault.kind == "chunk_extensions":
            items = [("Content-Type", kind), ("Transfer-Encoding", "chunked"), *more.items()]
            self.connection.write(self._head(status, items))
            await self._chunk(body)
            self.connection.write(b"0\r\nX-Checked: yes\r\n\r\n")
            return
        # A plain response has no events, so these faults don't trigger between events.
        self.triggered = fault.kind in {"cut", "end", "insert", "error_event", "garbage_body"}
        if fault.kind == "garbage_body":
            body = (GARBAGE * (len(body) // len(GARBAGE) + 1))[: len(body)]
        declared = len(body) + (fault.delta if fault.kind == "wrong_length" else 0)
        if self._due(None):
            await self._trigger(body)
        await self._write_head(self._plain_head(status, kind, declared, more))
        if self._due(0):
            await self._trigger(body)
        half = len(body) // 2
        await self._write(body[:half])
        if fault.kind in {"cut", "end"}:
            self._end_connection(reset=fault.reset)
        if self._due(fault.after_events):
            await self._trigger(body)
        await self._write(body[half:])
        if fault.kind == "wrong_length":
            self._end_connection()

    async def open_stream(self) -> None:
        if self._due(None):
            await self._trigger(b"")
        head = self._stream_head()
        more = "".join(f"{name}: {value}\r\n" for name, value in _extra_headers(self.fault).items())
        if self.fault.kind == "wrong_length":
            length = f"Content-Length: {10_000 + self.fault.delta}".encode()
            head = head.replace(b"Transfer-Encoding: chunked", length)
        await self._write_head(head[:-2] + more.encode() + b"\r\n")

    async def events(self, events: Sequence[bytes]) -> None:
        for event in events:
            if self._due(self.sent):
                await self._trigger(event)
            for _ in range(self._repetitions(event)):
                await self._chunk(self._reformat(event))
            self.sent += 1
        await self.connection.drain()

    async def comment(self) -> None:
        await self._chunk(b":\n\n")

    async def end_stream(self, last: Sequence[bytes]) -> None:
        await self.events(last)
        if self._due(self.sent):
            await self._trigger(b"")
        await self._flush()
        if self.fault.kind == "wrong_length":
            self._end_connection()
        self._end_chunks()

    def _due(self, sent: int | None) -> bool:
        after = self.fault.after_events
        if self.fault.kind in {"cut", "end", "error_event", "insert", "garbage_body"}:
            after = after or 0
        return self.fault.kind in POINT_FAULTS and not self.triggered and after == sent

    async def _trigger(self, data: bytes) -> None:
        """Do what the fault does at its point; `data` are the bytes that would come next."""
        fault = self.fault
        self.triggered = True
        match fault.kind:
            case "hang":
                if self.connection.gone:
                    raise ClientGoneError
                was, self.interruptible = self.interruptible, True
                await self.faults.hang(self.released, fault.seconds)
                self.interruptible = was
            case "insert":
                await self._chunk(fault.insertion())
            case "error_event":
                await self._chunk(self.error_event)
                self._end_chunks()
                self.closing = True
                raise ClientGoneError
            case "end":
                self._end_chunks()
                raise ClientGoneError
            case "cut":
                chunk = b"%x\r\n%b\r\n" % (len(data), data)
                self.connection.write(chunk[: len(chunk) // 2])
                self._end_connection(reset=fault.reset)
            case "garbage_body":
                self.connection.write(GARBAGE)
                self._end_connection()
            case _:
                self._end_connection(reset=fault.kind == "reset")

    def _end_connection(self, *, reset: bool = False) -> NoReturn:
        if reset:
            self.connection.reset()
        else:
            self.connection.close()
        raise ClientGoneError

    def _repetitions(self, event: bytes) -> int:
        last = {"double_done": 2, "no_done": 0}.get(self.fault.kind, 1)
        return last if _is_last(event) else 1

    def _reformat(self, event: bytes) -> bytes:
        if self.fault.kind == "crlf":
            return event.replace(b"\n", b"\r\n")
        return event + b":\n\n" if self.fault.kind == "comments" else event

    async def _chunk(self, data: bytes) -> None:
        extension = b";node=emulated" if self.fault.kind == "chunk_extensions" else b""
        if self.fault.kind == "wrong_length":
            await self._write(data)
            return
        chunk = b"%x%b\r\n%b\r\n" % (len(data), extension, data)
        if self.fault.kind != "merge":
            await self._write(chunk)
            return
        self.unmerged.append(chunk)
        if len(self.unmerged) >= (self.fault.count or 4):
            await self._flush()

    async def _flush(self) -> None:
        if self.unmerged:
            self.connection.write(b"".join(self.unmerged))
            self.unmerged.clear()

    def _end_chunks(self) -> None:
        trailer = b"X-Checked: yes\r\n" if self.fault.kind == "chunk_extensions" else b""
        self.connection.write(b"0\r\n" + trailer + b"\r\n")

    async def _write_head(self, head: bytes) -> None:
        if self.fault.kind in {"slow_head", "trickle"}:
            await self._write_slowly(head, self.fault.size or 1)
        else:
            self.connection.write(head)

    async def _write(self, data: bytes) -> None:
        if self.fault.kind in {"trickle", "split"}:
            size = 7 if self.fault.kind == "split" else 1
            await self._write_slowly(data, self.fault.size or size)
        else:
            self.connection.write(data)

    async def _write_slowly(self, data: bytes, step: int) -> None:
        seconds = self.fault.seconds
        if seconds is None:
            seconds = 0.0005 if self.fault.kind == "split" else _STEP
        for i in range(0, len(data), step):
            if self.connection.gone:
                raise ClientGoneError
            self.connection.write(data[i : i + step])
            await asyncio.sleep(seconds)


def _is_last(event: bytes) -> bool:
    ends = (b"data: [DONE]", b"event: message_stop", b"event: response.completed")
    return event.startswith(ends) or b'"stop":true,"model"' in event


def _extra_headers(fault: Fault) -> dict[str, str]:
    if fault.kind == "head_bomb":
        value = "b" * (fault.size or 20)
        return {f"X-Bomb-{i}": value for i in range(fault.count or 10_000)}
    return fault.headers if fault.kind in {"status", "hang"} else {}
