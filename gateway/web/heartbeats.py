"""Signs of life for clients that wait: white space, comments, or the place in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from gateway.catalog import RequestQueue
from gateway.proxy.api.base import NumberedHeartbeats
from gateway.proxy.client_response import BodyStream
from gateway.proxy.in_flight import InFlightRequest
from gateway.proxy.inbound.routes import Route
from gateway.web.http_exchange import HttpExchange
from gateway.web.response_heads import progress_comment, stream_header_lines

HEARTBEAT_TOLERANCE = 0.01
"""A heartbeat may come early by this part of its interval."""

PADDING_HEADER_LINES = b"content-type: application/json; charset=utf-8\r\n"
"""Those of a plain response that begins with white space."""


class ServedRequest(Protocol):
    """A request whose client waits."""

    @property
    def exchange(self) -> HttpExchange:
        """Where its response goes."""

    @property
    def route(self) -> Route:
        """What its client asked for."""

    @property
    def is_answered(self) -> bool:
        """Whether a node has begun to answer."""

    @property
    def body_stream(self) -> BodyStream | None:
        """The body of the response, if it has begun and is a stream."""

    @property
    def numbered_heartbeats(self) -> NumberedHeartbeats | None:
        """Those of its stream, if its client needs them."""

    def early_header_lines(self) -> bytes:
        """The gateway's own header lines before the outcome is known."""

    def heartbeat(self) -> bytes:
        """What its client takes for a sign of life between events."""


class WaitingHandler(Protocol):
    """What heartbeats ask of the handler."""

    @property
    def queue(self) -> RequestQueue:
        """Where requests wait."""

    @property
    def clock(self) -> Callable[[], float]:
        """Gives monotonic seconds."""

    @property
    def progress_seconds(self) -> float:
        """Seconds between progress comments."""


class Heartbeat:
    """Sends a sign of life after `first` seconds, then again and again, until `stop`."""

    __slots__ = ("_handle", "_handler", "_in_flight", "_interval", "_last_sent_at", "_loop",
                 "_served")  # fmt: skip

    def __init__(
        self,
        served: ServedRequest,
        in_flight: InFlightRequest,
        handler: WaitingHandler,
        interval: float,
    ) -> None:
        self._served = served
        self._in_flight = in_flight
        self._handler = handler
        self._interval = interval
        self._last_sent_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(self._first(), self._run)
        served.exchange.set_heartbeat(self.send_now)

    def stop(self) -> None:
        """Send no more."""
        self._handle.cancel()
        self._served.exchange.set_heartbeat(None)  # It refers to this object.

    def send_now(self) -> None:
        """Send a sign of life, whenever the last one was."""
        raise NotImplementedError

    def _first(self) -> float:
        return self._interval

    def _run(self) -> None:
        self._handle = self._loop.call_later(self._beat(), self._run)

    def _beat(self) -> float:
        """Send something; seconds until the next."""
        raise NotImplementedError

    def _send(self, make: Callable[[], bytes], header_lines: bytes) -> None:
        """Send what `make` returns; the first time, with a head that has these lines.

        A client that lags is spared it, so that nothing is made, which might be numbered.
        """
        served, handler = self._served, self._handler
        exchange = served.exchange
        self._last_sent_at = handler.clock()
        if exchange.disconnected or exchange.write_paused:
            return
        if exchange.response_started:
            exchange.write(make())
        else:
            exchange.start_response(200, header_lines + served.early_header_lines(), make())
            self._in_flight.note_response_started()
            handler.queue.keep_in_queue(self._in_flight.request.id)


class PaddingHeartbeat(Heartbeat):
    """White space, which JSON may begin with."""

    __slots__ = ()

    def send_now(self) -> None:
        self._send(lambda: b" ", PADDING_HEADER_LINES)

    def _beat(self) -> float:
        self.send_now()
        return self._interval


class StreamHeartbeat(Heartbeat):
    """What the API's clients skip, if nothing was sent for the interval."""

    __slots__ = ()

    def send_now(self) -> None:
        stream = self._served.body_stream
        if stream is None or stream.is_open:
            api = self._served.route.api
            self._send(self._served.heartbeat, stream_header_lines(api))

    def _beat(self) -> float:
        interval, now = self._interval, self._handler.clock()
        stream = self._served.body_stream
        if stream is not None:
            left = max(self._last_sent_at, stream.last_content_at) + interval - now
            if left > interval * HEARTBEAT_TOLERANCE:
                return left
        self.send_now()
        return interval


class ProgressHeartbeat(StreamHeartbeat):
    """The place in the queue or the progress of the prefill, for a client that asks for them."""

    __slots__ = ()

    def _first(self) -> float:
        return self._handler.progress_seconds

    def _beat(self) -> float:
        in_flight, handler, served = self._in_flight, self._handler, self._served
        api = served.route.api
        if served.is_answered:
            return super()._beat()
        assert in_flight.prefill_progress is not None
        position = handler.queue.queue_position(in_flight.request.id)
        prefill = in_flight.prefill_progress.status(handler.clock()) if position is None else None
        comment = progress_comment(position, prefill)
        is_event = api.heartbeat_is_event or served.numbered_heartbeats is not None

        def make() -> bytes:
            return comment + (served.heartbeat() if is_event or not comment else b"")

        self._send(make, stream_header_lines(api))
        return handler.progress_seconds
