"""A closed connection leaves nothing that only the garbage collector would free.

The collector examines objects that lived for seconds once in millions of allocations, so garbage
adds up: with 3,000 queued requests it was 60 MB.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Iterator
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
    BoundedProtocol,
    FlowControl,
    ClientConnection,
    InFlightRequest,
    Request,
    RequestResponseCycle,
    HttpExchange,
)
SHORT = {**HELLO, "max_tokens": 2}
CLOSE = "Connection: close"
Left = Callable[[], Counter[str]]


@pytest.fixture
def left() -> Iterator[Left]:
    """Objects that the test has made; the garbage collector is off meanwhile."""

    def there() -> Counter[str]:
        kinds = Counter(map(type, gc.get_objects()))
        return Counter({k.__name__: n for k, n in kinds.items() if issubclass(k, KINDS)})

    gc.freeze()  # Those of other tests are not looked at: with them a look takes 50 ms.
    gc.disable()
    yield there
    gc.enable()
    gc.unfreeze()


@in_virtual_time
async def test_of_a_connection_that_was_served(tmp_path: Path, left: Left) -> None:
    node = EmulatedNode(slots=1, keepalive_requests=1)
    async with public(tmp_path, {"health": {"interval": 60}}, node) as gate:
        for data in (
            request(SHORT, CLOSE),
            request({**SHORT, "stream": True}, CLOSE),
            request(SHORT) + request(SHORT, CLOSE),
            request({**SHORT, "model": "nobody"}, CLOSE),
            request(b"", CLOSE, method="GET", path="/v1/models"),
            b"garbage\r\n\r\n",
        ):
            for _ in range(3):
                async with raw_connection(gate.url) as wire:
                    await wire.send(data)
                    await wire.rest()
            await until(fleeting(gate, left), 30.0, left)


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_of_clients_that_leave(tmp_path: Path, stream: bool, left: Left) -> None:
    node = EmulatedNode(slots=1, decode_tps=200, keepalive_requests=1)
    settings = {"health": {"interval": 60}, "heartbeat": "off"}
    async with public(tmp_path, settings, node, well=False) as gate:
        for _ in range(3):
            async with raw_connection(gate.url) as running, raw_connection(gate.url) as waiting:
                await running.send(request({**HELLO, "max_tokens": 2000, "stream": stream}))
                await until(lambda: node.busy == 1)
                await waiting.send(request({**SHORT, "stream": stream}))
                await until(lambda: len(gate.running.gateway.scheduler.queue_positions()) == 1)
        await until(fleeting(gate, left), 30.0, left)


def fleeting(gate: Public, left: Left) -> Callable[[], bool]:
    """Whether no objects are left once the records of the requests are published."""

    def gone() -> bool:
        gate.records().clear()
        return not (gate.running.gateway.registry or left())

    return gone


@pytest.mark.parametrize(
    ("settings", "fields", "codes"),
    [
        ({"queue": {"max": 2}}, (), {200, 429}),
        ({"queue": {"max_wait": 1}}, (), {200, 503}),
        ({}, ("X-Request-Timeout: 0.5",), {503, 504}),
    ],
    ids=["refused", "waited too long", "deadline"],
)
@in_virtual_time
async def test_of_requests_that_no_slot_comes_for(
    tmp_path: Path, settings: dict[str, Any], fields: tuple[str, ...], codes: set[int], left: Left
) -> None:
    node = EmulatedNode(slots=1, decode_tps=20, keepalive_requests=1)
    async with public(tmp_path, {"health": {"interval": 60}, **settings}, node) as gate:
        asked = [gate.chat(*fields, max_tokens=40) for _ in range(8)]
        assert {found.status for found in await asyncio.gather(*asked)} == codes
        del asked
        await until(fleeting(gate, left), 2.0, left)


@pytest.mark.parametrize(
    ("times", "fault"),
    [(1, {"kind": "reset"}), (2, {"kind": "status", "status": 500}), (9, {"kind": "reset"})],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [{}, {"after_events": 2}], ids=["at once", "within the stream"])
@in_virtual_time
async def test_of_requests_whose_nodes_fail(
    tmp_path: Path,
    times: int,
    fault: dict[str, Any],
    stream: bool,
    after: dict[str, Any],
    left: Left,
) -> None:
    node = EmulatedNode(slots=2, keepalive_requests=1)
    async with public(tmp_path, {"health": {"interval": 60}}, node, well=False) as gate:
        for _ in range(times):
            node.faults.next(**fault, **after)
        await gate.chat(max_tokens=20, stream=stream)
        await until(fleeting(gate, left), 2.0, left)
