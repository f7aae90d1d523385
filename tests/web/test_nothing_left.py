"""A closed connection leaves nothing that only the garbage collector would free.

The collector examines objects that lived for seconds once in millions of allocations, so garbage
adds up: with 3,000 queued requests it was 60 MB.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.callers.fair_share import FairShare
from gateway.callers.keys import new_key
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


KEYS = [new_key(), new_key()]
KEYED: dict[str, Any] = {
    "keys": [
        {"id": KEYS[0].id, "sha256": KEYS[0].sha256, "max_class": "urgent"},
        {"id": KEYS[1].id, "sha256": KEYS[1].sha256, "trust_user_headers": True},
    ],
    "limits": {"buffered_bytes": 600_000, "body_bytes": 200_000, "connections": 40},
    "queue": {"max": 12, "max_wait": 5},
    "heartbeat": 1,
}
CLASSES = ["urgent", "high", "normal", "low", "batch", "no such class"]
WORK: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", HELLO),
    ("/v1/chat/completions", {**HELLO, "x": "x" * 30_000}),
    ("/v1/chat/completions", {**HELLO, "x": "x" * 150_000}),
    ("/v1/chat/completions", {**HELLO, "n": 2, "stop": ["a"]}),
    ("/v1/chat/completions", {"messages": [{}] * 5000}),
    ("/v1/chat/completions", {**HELLO, "model": "nobody"}),
    ("/v1/chat/completions", {**HELLO, "x": "x" * 300_000}),
    ("/v1/completions", {"prompt": ["a", "b", "c", "d"]}),
    ("/v1/completions", {"prompt": ["a", "b"], "x": "x" * 40_000}),
    ("/v1/completions", {"prompt": ["far too long " * 4000, "b"]}),
    ("/v1/messages", {**HELLO, "max_tokens": 3}),
    ("/tokenize", {"content": "a"}),
    ("/apply-template", {**HELLO, "x": "x" * 80_000}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "prompt": ""}),
]
FAULTS: list[dict[str, Any]] = [
    {"kind": "reset"},
    {"kind": "reset", "after_events": 3},
    {"kind": "status", "status": 500},
    {"kind": "hang", "seconds": 3.0},
    {"kind": "end", "after_events": 2},
    {"kind": "head_bomb"},
]


async def client(gate: Public, draw: random.Random) -> None:
    """Send a random request in a random way, and stay or disconnect."""
    path, body = draw.choice(WORK)
    body = {"max_tokens": draw.choice([1, 20]), **body, "stream": draw.random() < 0.5}
    fields = [f"X-Priority: {draw.choice(CLASSES)}"] if draw.random() < 0.3 else []
    if draw.random() < 0.9:
        fields.append(f"Authorization: Bearer {draw.choice(KEYS).text}")
    if draw.random() < 0.3:
        fields.append(f"X-User-Id: u{draw.randrange(5)}")
    if draw.random() < 0.2:
        fields.append("X-Request-Timeout: 2")
    if draw.random() < 0.05:
        fields.append("Content-Encoding: gzip")
    data = request(body, *fields, path=path)
    way = draw.random()
    if way < 0.2:
        data = data[: draw.randrange(len(data))]
    elif way < 0.3:
        data += data + data[:100]
    elif way < 0.35:
        data = b"garbage\r\n\r\n" + data
    async with raw_connection(gate.url) as wire:
        with suppress(ConnectionError, TimeoutError):
            for at in range(0, len(data), 50_000):
                await wire.send(data[at : at + 50_000])
                await asyncio.sleep(draw.choice([0, 0, 0.1]))
            if draw.random() < 0.3:
                wire.writer.transport.abort()
            elif draw.random() < 0.7:
                await wire.some(20.0)
            else:
                await asyncio.sleep(draw.random() * 3)


def held(gate: Public) -> dict[str, object]:
    """All counts of clients that are not zero."""
    gateway = gate.running.gateway
    edge, scheduler = gateway.handler, gateway.scheduler
    tickets = scheduler.waiters
    assert gateway.public_listener is not None
    protocol = gateway.public_listener.protocol
    limiter, pipeline_queue = protocol.connection_limiter, protocol.pipeline_queue
    rows = scheduler.dispatcher.placement_state.by_name.values()
    counts: dict[str, object] = {
        "bodies": edge.body_memory.total_bytes,
        "shares": edge.body_memory.allocation_count,
        "requests": len(gateway.registry),
        "editors": len(edge.latest_edits),
        "tickets": len(tickets),
        "lanes": len(tickets._by_user),
        "in line": scheduler.dispatcher.waiting,
        "slotless": sum(row.slotless_running + len(row.slotless_by_caller) for row in rows),
        "leased": sum(node.leased for node in gateway.fleet.nodes.values()),
        "connections": len(limiter),
        "pipeline": pipeline_queue.waiting_bytes,
    }
    for name, holdings in (
        ("holders of bodies", edge.body_memory.fair_share),
        ("holders of places", tickets.fair_share),
        ("holders of connections", limiter.fair_share),
    ):
        counts[name] = 0 if holdings == FairShare() else holdings
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("seed", range(4))
@in_virtual_time
async def test_nothing_is_held_when_all_clients_have_gone(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    node = EmulatedNode(slots=2, decode_tps=40, infill=True)
    async with public(tmp_path, KEYED, node, well=False) as gate:

        async def go(delay: float) -> None:
            await asyncio.sleep(delay)
            if draw.random() < 0.1:
                node.faults.next(**draw.choice(FAULTS))
            await client(gate, draw)

        found = await asyncio.gather(
            *(go(draw.random() * 20) for _ in range(200)), return_exceptions=True
        )
        assert [one for one in found if one is not None] == []
        node.faults.clear()
        await until(lambda: not held(gate), 60.0, lambda: held(gate))
