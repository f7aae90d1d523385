"""Clients that send faster than they are served: what has come waits, and they take turns.

A client may send thousands of requests in one packet (pipelining). One of them is served at a
time; the others stay the bytes that they came as, and of all connections that have such a backlog
one goes on in each turn of the event loop. So clients that send one request after another hardly
notice them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

CONNECTION_PIPELINE_BYTES = 64 * 1024
"""What may wait on one connection before it is no longer read from; one read can add 256 KB."""

LISTENER_PIPELINE_BYTES = 64 * 1024 * 1024
"""What may wait on all connections of a listener before those are cut whose client sends requests
and takes no replies: what waits there would stay until `limits.send_timeout`."""

PIPELINE_READ_BYTES = 16 * 1024
"""Most of it that is looked at in one turn."""


class PipelineQueue:
    """The connections of a listener that could go on, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self.held_bytes = 0
        """Bytes that wait on all connections."""

    def add(self, resume: Callable[[], None]) -> None:
        """Call `go_on` when it is its turn."""
        self._waiting.append(resume)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        try:
            self._waiting.popleft()()
        finally:
            self._scheduled = False
            self._schedule()


class PipelineFlowControl(FlowControl):
    """Who pauses reading, and who may resume it: nobody while too much waits to be read."""

    reads_held = False

    def resume_reading(self) -> None:
        """Read again, unless this is `full`."""
        if not self.reads_held:
            super().resume_reading()
