"""A link between brain and edge: messages over a Unix socket, in order, in bounded frames.

What is told within one turn of the event loop goes out together. Each frame has a number, and says
which frame of the other side was dealt with last: so each side knows how old the news is, at most,
on which a message rests, and neither needs the other's clock. Where there is nothing to tell, an
empty frame goes out as a sign of life; a side that has heard nothing for too long gives the other
up, and both see the link as lost.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

log = structlog.get_logger()
LENGTH = struct.Struct(">I")  # of what follows
NUMBERS = struct.Struct(">QQ")  # of the frame, and of the other side's that was dealt with last
MOST_FRAME_BYTES = 16 << 20  # bytes of a frame; a longer one ends the link
MOST_FRAME_MESSAGES = 32  # messages of a frame
MOST_WAITING_BYTES = 64 << 20  # bytes that wait to be written; one more frame ends the link
TURN_SECONDS = 0.005  # work on messages in one turn of the event loop, in seconds
BEAT_SECONDS = 0.25  # seconds between two signs of life
CLOSE_SECONDS = 2.0  # seconds for the other side to read what was told last
SILENCE_SECONDS = 20.0  # seconds without one after which the other side counts as lost


class EdgeLink(asyncio.Protocol):
    """One side of a link.

    `receive` is called with each message, an instance of `incoming`; what it raises ends the link.
    `on_lost` is called once, with the reason, when the link has ended for whatever reason but
    `close`; nothing is received after that.
    """

    def __init__(
        self,
        incoming: Any,
        receive: Callable[[Any], None],
        on_lost: Callable[[str], None],
        clock: Callable[[], float],
        *,
        silence: float = SILENCE_SECONDS,
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_beat` is called before each sign of life is sent, to tell what has changed."""
        self._decoder = msgspec.msgpack.Decoder(list[incoming])
        self._encoder = msgspec.msgpack.Encoder()
        self._receive, self._on_lost, self._on_beat = receive, on_lost, on_beat
        self._clock, self._silence = clock, silence
        self._transport: asyncio.Transport | None = None
        self.lost = False  # whether it has ended
        # Sent.
        self._outgoing: list[Any] = []
        self._flush_handle: asyncio.Handle | None = None
        self._beat_handle: asyncio.Handle | None = None
        self._beat_at = 0.0  # when the last sign of life was due
        self._number = 0  # of the last frame that was sent
        self._sent_at: deque[float] = deque()
        """When frames were sent that the other side has not dealt with; `_number` is the last's."""
        self._settled_at = 0.0  # when the last frame was sent that it has dealt with
        # Received.
        self._buffer = bytearray()
        self._frames: deque[bytes] = deque()
        self._messages: list[Any] = []
        """Those of the first frame that are left."""
        self._work_handle: asyncio.Handle | None = None
        self._received = 0  # the number of the last frame that has come
        self._dealt_with = 0  # and of the last one that was dealt with
        self._heard_at = clock()
        self._reason: str | None = None  # why the socket is closed; None: it is open
        self._closed = asyncio.Event()

    @classmethod
    async def over(cls, sock: socket.socket, link: EdgeLink) -> EdgeLink:
        """Have this link use a connected Unix socket, which it closes at its end."""
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_unix_connection(lambda: link, sock=sock)
        except BaseException:
            # Cancelled, it would learn of a transport that is closed already.
            link._stop()
            raise
        if link.lost:
            transport.abort()
        return link

    def tell(self, message: Any) -> None:
        """Send a message, with all others of this turn of the event loop."""
        if self.lost:
            return
        self._outgoing.append(message)
        if self._flush_handle is None and self._transport is not None:
            self._flush_handle = asyncio.get_running_loop().call_soon(self._flush)

    def postpone(self) -> None:
        """Send what was told behind the callbacks that the event loop has been given by now."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = asyncio.get_running_loop().call_soon(self._flush)

    @property
    def age(self) -> float:
        """Seconds since which, at most, what is being received rests on what was told here."""
        return self._clock() - self._settled_at

    def close(self) -> None:
        """End the link; nobody is told here. What waits to be written still goes out."""
        if not self.lost:
            self._flush()
        if self.lost:
            return
        transport = self._transport
        self._stop()
        if transport is None:
            self._closed.set()
        else:
            # Not at once: to close a socket with unread bytes would break it for the other side.
            transport.write_eof()
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, transport.abort)

    def fail(self, reason: str) -> None:
        """End the link at once, for this reason."""
        self._end(reason)

    async def wait_closed(self) -> None:
        """Return when the other side has read all that was told, or has had time to."""
        await self._closed.wait()

    # The transport's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A transport that is closed in this call, or by a write that fails, is not the socket's
        # owner for uvloop yet: that closes the descriptor once more, when it is another's.
        if self.lost:
            return
        self._transport = transport  # type: ignore[assignment]
        self._heard_at = self._settled_at = self._beat_at = self._clock()
        self._beat_handle = asyncio.get_running_loop().call_soon(self._beat)

    def data_received(self, data: bytes) -> None:
        if self.lost:
            return
        self._heard_at = self._clock()
        buffer = self._buffer
        buffer += data
        begin, size = 0, len(buffer)
        while size - begin >= LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, begin)
            if length > MOST_FRAME_BYTES:
                self._end(f"a frame of {length} bytes")
                return
            end = begin + LENGTH.size + length
            if end > size:
                break
            try:
                self._take_in(bytes(memoryview(buffer)[begin + LENGTH.size : end]))
            except (struct.error, ValueError) as error:
                self._end(f"what can't be read: {error}")
                return
            begin = end
        del buffer[:begin]
        if self._work_handle is None:
            self._work()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """The socket is closed: what has come before is dealt with, then the link has ended."""
        self._transport, self._reason = None, "it has ended" if error is None else f"{error}"
        self._closed.set()
        if self._work_handle is None:
            self._work()

    # Sending.

    def _beat(self) -> None:
        if self.lost:
            return
        now = self._clock()
        silent = now - self._heard_at
        # Where this side itself was held up, it reads first what has come meanwhile.
        was_held_up, self._beat_at = now - self._beat_at > 4 * BEAT_SECONDS, now
        # One that has never spoken may still be starting: who has started it sets a limit.
        if self._received and silent > self._silence and not was_held_up:
            self._end(f"nothing was heard for {silent:.0f} s")
            return
        self._beat_handle = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._beat)
        self._on_beat()
        self._flush()

    def _flush(self) -> None:
        """Send what there is, or a sign of life."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        messages, self._outgoing = self._outgoing, []
        transport = self._transport
        if transport is None:
            self._outgoing = messages
            return
        for begin in range(0, len(messages) or 1, MOST_FRAME_MESSAGES):
            if not self.lost:
                self._send(transport, messages[begin : begin + MOST_FRAME_MESSAGES])

    def _send(self, transport: asyncio.Transport, messages: list[Any]) -> None:
        payload = self._encoder.encode(messages)
        size = NUMBERS.size + len(payload)
        if size > MOST_FRAME_BYTES and len(messages) > 1:
            for message in messages:
                self._send(transport, [message])
            return
        if size > MOST_FRAME_BYTES:
            self._end(f"a message of {size} bytes ({type(messages[0]).__name__})")
            return
        if transport.get_write_buffer_size() + size > MOST_WAITING_BYTES:
            self._end("what was told is not read")
            return
        self._number += 1
        self._sent_at.append(self._clock())
        head = LENGTH.pack(size) + NUMBERS.pack(self._number, self._dealt_with)
        transport.write(head + payload)

    # Receiving.

    def _take_in(self, frame: bytes) -> None:
        number, _ = NUMBERS.unpack_from(frame)
        self._received += 1
        if number != self._received:
            raise ValueError(f"frame {number} in place of {self._received}")
        self._frames.append(frame)

    def _work(self) -> None:
        """Deal with what has come, for a short while; the rest in later turns."""
        self._work_handle = None
        ends, worked = self._clock() + TURN_SECONDS, False
        while not self.lost and (self._frames or self._messages):
            if worked and self._clock() >= ends:
                if self._transport is not None:
                    self._transport.pause_reading()
                self._work_handle = asyncio.get_running_loop().call_soon(self._work_on)
                return
            worked = True
            try:
                self._deal_with_one()
            except Exception:
                log.exception("a message can't be dealt with")
                self._end("a message could not be dealt with")
        if self._reason is not None:
            self._end(self._reason)

    def _work_on(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()
        self._work()

    def _deal_with_one(self) -> None:
        """Deal with one message, or with the head of a frame."""
        if self._messages:
            self._receive(self._messages.pop())
        else:
            frame = self._frames.popleft()
            self._settle(NUMBERS.unpack_from(frame)[1])
            self._messages = self._decoder.decode(memoryview(frame)[NUMBERS.size :])
            self._messages.reverse()
        if not self._messages:
            self._dealt_with += 1

    def _settle(self, number: int) -> None:
        """The other side has dealt with the frames up to this one."""
        first = self._number - len(self._sent_at) + 1
        for _ in range(number - first + 1):
            self._settled_at = self._sent_at.popleft()

    def _end(self, reason: str) -> None:
        if not self.lost:
            transport = self._transport
            self._stop()
            if transport is not None:
                transport.abort()
            self._on_lost(reason)

    def _stop(self) -> None:
        self.lost = True
        for handle in (self._flush_handle, self._beat_handle, self._work_handle):
            if handle is not None:
                handle.cancel()
        self._frames.clear()
        self._messages.clear()
        self._outgoing.clear()
