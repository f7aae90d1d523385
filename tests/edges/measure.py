"""How long a decision takes from an edge to its brain and back, beside an echo in the same run.

`python -m tests.edges.measure [--rate 1000] [--seconds 10] [--nodes 100] [--tls]`

Two processes, each with the event loop of the gateway's own, joined by Unix sockets. The edge asks
for leases at a steady rate, uses each for a while and reports its end; as often it has the brain
echo as many bytes. With `--tls` a third process is the member that carries the edge's link to the
brain over TLS; the echo stays on its Unix socket.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from gateway.app.event_loop import run_event_loop
from gateway.cluster.tunnel import Tunnels, Welcome, member_certificate
from gateway.config.settings import Address, Settings
from gateway.edges.edge import EdgeServices
from gateway.events import FEW_DEFERRED, EventBus, RequestRecord, call_later
from gateway.lease import NOTHING_TRIED, AttemptReport, PromptKey, Usage, UsageReport
from tests.cluster.certificates import Authority
from tests.edges.played import CALLER, a_bare_brain, a_played_node
from tests.lease_requests import a_lease_request
from tests.schedule.build import a_scheduler

HOLD_SECONDS = 0.5  # seconds for which each lease is held
SLOTS = 100  # of each node: so many that no request waits
WARMING = 100  # requests before the first that counts
ECHO_BYTES = 700  # about those of a question


def a_member(
    name: str, port: int, authority: Authority, take: Callable[[socket.socket], None]
) -> Tunnels:
    """The tunnels of a member; `take` gets what others open."""
    settings = authority.settings(name, listen=f"127.0.0.1:{port}")
    return Tunnels(
        settings,
        name,
        member_certificate(settings.tls, name),
        admit=lambda _: Welcome(name),
        on_tunnel=lambda _, sock: take(sock),
    )


async def be_member(authority: Authority, port: int, handing: socket.socket) -> int:
    """Open the tunnel of the edge's link to the brain, hand it to the edge, and carry it."""
    tunnels = a_member("follower", port, authority, socket.socket.close)
    sock = await tunnels.open("leader", Address("127.0.0.1", port), "link", name="edge")
    socket.send_fds(handing, [b"x"], [sock.fileno()])
    sock.close()
    while tunnels._open:  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.1)
    print(f"member: {1e6 * time.process_time():.0f} us of CPU in all")
    return 0


async def tunnelled(authority: Authority, listening: socket.socket) -> socket.socket:
    """The first link that comes through a tunnel to this socket."""
    found: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
    tunnels = a_member("leader", listening.getsockname()[1], authority, found.set_result)
    tunnels.serve(listening)
    return await found


async def echoes(echo: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=echo)
    while data := await reader.read(1 << 16):
        writer.write(data)


async def be_brain(
    count: int, linked: Callable[[], Awaitable[socket.socket]], echo: socket.socket
) -> int:
    nodes = [a_played_node(f"n{number}", SLOTS) for number in range(count)]
    scheduler = a_scheduler(*nodes, clock=time.monotonic)
    bus = EventBus(call_later, FEW_DEFERRED)
    brain = a_bare_brain(scheduler, Settings(), bus, clock=time.monotonic)
    used_by: list[float] = []
    bus.subscribe(RequestRecord, lambda _: used_by.append(time.process_time()))
    ended = asyncio.Event()
    echoing = asyncio.create_task(echoes(echo))
    await brain.connect(await linked(), "edge", ended.set)
    await ended.wait()
    echoing.cancel()
    used = (used_by[-1] - used_by[WARMING - 1]) / (len(used_by) - WARMING)
    print(f"brain: {1e6 * used:.0f} us of CPU for each decision, with an echo")
    assert not scheduler.records
    return 0


async def steadily(rate: float, count: int, act: Callable[[int], object]) -> None:
    loop = asyncio.get_running_loop()
    begin = loop.time()
    for number in range(count):
        await asyncio.sleep(max(0.0, begin + number / rate - loop.time()))
        act(number)


async def be_edge(rate: float, count: int, link: Callable[[], int], echo: socket.socket) -> int:
    services = EdgeServices("edge")
    services.relink(socket.socket(fileno=link()), loopback=True)
    await services.wait_ready(30.0)
    reader, writer = await asyncio.open_unix_connection(sock=echo)
    times: list[float] = []
    echoed: list[float] = []
    rng = random.Random(1)
    tasks: list[asyncio.Task[None]] = []

    async def request(number: int) -> None:
        id_ = f"req_{number}"
        key = PromptKey(tuple(rng.getrandbits(62) for _ in range(16)), 1000.0)
        asked = a_lease_request(
            id_, caller=CALLER.id, stream=True, prompt_tokens=1000, max_tokens=100, prompt_key=key
        )
        record = RequestRecord(id_, "/v1/chat/completions", "demo", request_id=id_)
        reservation = services.meter.admit(services.meter.book.accounts(CALLER), asked, record)
        began = time.perf_counter()
        lease = await services.scheduler.wait_for_lease(asked, NOTHING_TRIED, 0.0)
        times.append(time.perf_counter() - began)
        services.scheduler.reading_began(lease.id)
        await asyncio.sleep(HOLD_SECONDS / 2)
        services.scheduler.content_began(lease.id)
        await asyncio.sleep(HOLD_SECONDS / 2)
        services.scheduler.ended(AttemptReport(lease.id, "ok", 200, True, True, True))
        usage = Usage(1000, 0, 100)
        report = UsageReport(lease.id, usage, usage, 100)

        def settle() -> None:
            services.scheduler.settle(report, asked)

        services.bus.defer(settle)
        services.meter.ended(reservation, record.finish(began, time.perf_counter()))

    async def echo_once() -> None:
        began = time.perf_counter()
        writer.write(b"x" * ECHO_BYTES)
        await reader.readexactly(ECHO_BYTES)
        echoed.append(time.perf_counter() - began)

    async def echo_steadily(count: int) -> None:
        for _ in range(count):
            await asyncio.gather(echo_once(), asyncio.sleep(1 / rate))

    # The first ones have modules imported, and tables made.
    await asyncio.gather(*(request(-number) for number in range(1, WARMING + 1)))
    times.clear()
    before = time.process_time()
    begin = steadily(rate, count, lambda number: tasks.append(asyncio.create_task(request(number))))
    await asyncio.gather(begin, echo_steadily(count))
    await asyncio.gather(*tasks)
    await asyncio.sleep(0.2)
    used = time.process_time() - before
    await services.aclose()
    for name, found in (("decision", times), ("echo", echoed)):
        found.sort()
        p50, p99 = found[len(found) // 2], found[len(found) * 99 // 100]
        line = f"{name}: p50 {1e3 * p50:.2f} ms, p99 {1e3 * p99:.2f} ms ({len(found)})"
        print(line, flush=True)
    print(f"edge: {1e6 * used / len(times):.0f} us of CPU for each")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--tls", action="store_true")
    asked = parser.parse_args()
    (link, edge_link), (echo, edge_echo) = socket.socketpair(), socket.socketpair()
    listening = socket.create_server(("127.0.0.1", 0))
    children = []

    def start(work: Callable[[], Coroutine[Any, Any, int]]) -> None:
        if (pid := os.fork()) == 0:
            link.close()
            echo.close()
            run_event_loop(work())
            os._exit(0)
        children.append(pid)

    with tempfile.TemporaryDirectory() as folder:
        authority, take = Authority(Path(folder)), edge_link.detach
        if asked.tls:
            port = listening.getsockname()[1]
            handing, handed = socket.socketpair()
            start(lambda: be_member(authority, port, handing))
            take = lambda: socket.recv_fds(handed, 1, 1)[1][0]  # noqa: E731
        start(lambda: be_edge(asked.rate, round(asked.rate * asked.seconds), take, edge_echo))
        edge_link.close()
        edge_echo.close()

        async def linked() -> socket.socket:
            return await tunnelled(authority, listening) if asked.tls else link

        run_event_loop(be_brain(asked.nodes, linked, echo))
        sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))


if __name__ == "__main__":
    main()
