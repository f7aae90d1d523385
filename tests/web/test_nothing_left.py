"""A closed connection leaves nothing that only the garbage collector would free.

The collector examines objects that lived for seconds once in millions of allocations, so garbage
adds up: with 3,000 queued requests it was 60 MB.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.forward.in_flight import InFlightRequest
from gateway.http.exchange import ClientConnection, HttpExchange
from gateway.http.protocol import BoundedProtocol
from gateway.request.preparation import Request
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import raw_connection
from tests.gateways import until
from tests.virtual import in_virtual_time
from tests.web.raw_client import HELLO, Public, public, request

KINDS = (
    BoundedProtocol, FlowControl, ClientConnection, InFlightRequest, Request, RequestResponseCycle,
    HttpExchange,
)  # fmt: skip
SHORT = {**HELLO, "max_tokens": 2}
CLOSE = "Connection: close"
CALM = {"health": {"interval": 60}, "heartbeat": "off"}


@contextmanager
def nothing_left() -> Iterator[Callable[[Public], Awaitable[None]]]:
    """Gives a wait for the end of all objects that are made within; nothing else collects them."""

    def left() -> Counter[str]:
        kinds = Counter(map(type, gc.get_objects()))
        return Counter({k.__name__: n for k, n in kinds.items() if issubclass(k, KINDS)})

    async def wait(gate: Public) -> None:
        def gone() -> bool:
            gate.records().clear()
            return not (gate.running.gateway.registry or left())

        await until(gone, 30.0, left)

    gc.freeze()  # Those of other tests are not looked at: with them a look takes 50 ms.
    gc.disable()
    try:
        yield wait
    finally:
        gc.enable()
        gc.unfreeze()


@in_virtual_time
async def test_of_a_connection_that_was_served(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, keepalive_requests=1)
    with nothing_left() as wait:
        async with public(tmp_path, CALM, node) as gate:
            for data in (
                request(SHORT, CLOSE),
                request({**SHORT, "stream": True}, CLOSE),
                request(SHORT) + request(SHORT, CLOSE),
                request({**SHORT, "model": "nobody"}, CLOSE),
                request(b"", CLOSE, method="GET", path="/v1/models"),
                b"garbage\r\n\r\n",
            ):
                async with raw_connection(gate.url) as wire:
                    await wire.send(data)
                    await wire.rest()
                await wait(gate)


@in_virtual_time
async def test_of_clients_that_leave(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=200, keepalive_requests=1)
    with nothing_left() as wait:
        async with public(tmp_path, CALM, node, well=False) as gate:
            queue = gate.running.gateway.scheduler.queue_positions
            for stream in (False, True):
                async with raw_connection(gate.url) as running, raw_connection(gate.url) as waiting:
                    await running.send(request({**HELLO, "max_tokens": 2000, "stream": stream}))
                    await until(lambda: node.busy == 1)
                    await waiting.send(request({**SHORT, "stream": stream}))
                    await until(lambda: len(queue()) == 1)
                await wait(gate)


RESET, FAILS = {"kind": "reset"}, {"kind": "status", "status": 500}
AFTER: list[dict[str, Any]] = [{}, {"after_events": 2}]


@pytest.mark.parametrize(("times", "fault"), [(1, RESET), (2, FAILS), (9, RESET)])
@in_virtual_time
async def test_of_requests_whose_nodes_fail(
    tmp_path: Path, times: int, fault: dict[str, Any]
) -> None:
    node = EmulatedNode(slots=2, keepalive_requests=1)
    with nothing_left() as wait:
        async with public(tmp_path, CALM, node, well=False) as gate:
            for stream, after in itertools.product((False, True), AFTER):
                for _ in range(times):
                    node.faults.next(**fault, **after)
                await gate.chat(max_tokens=20, stream=stream)
                node.faults.clear()
                await wait(gate)
