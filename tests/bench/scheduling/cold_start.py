"""Cold starts: how soon one client behind a fresh gateway is served by the fastest nodes.

    python -m tests.bench.scheduling.cold_start                     20 starts, seconds
    python -m tests.bench.scheduling.cold_start --no-calibration    exploring alone
    python -m tests.bench.scheduling.cold_start --at-once           the client doesn't wait

Eight emulated nodes of 5 to 60 tokens/s, in another order at each start, and one client that asks
one request at a time: chats that share a system prompt. Gateway, nodes and client run in one
process, in virtual time. By default the client begins a minute after the gateway is ready, with
`--at-once` with the first probe. The mean of requests 5 to 12 is divided by the fastest node's own:
what the same requests take where there is no other node. Exit status: 0; 1 a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from gateway.config.inventory import NodeSpec
from tests.bench.scheduling.fleet import Speed, nodes
from tests.bench.scheduling.play import Player, as_emulated
from tests.bench.scheduling.trace import Shape, make
from tests.gateways import running_gateway
from tests.virtual import VirtualLoop, now

DECODES = (5.0, 8.0, 12.0, 18.0, 25.0, 35.0, 48.0, 60.0)
"""Tokens/s that the nodes write; they read fifteen times as fast."""
REQUESTS = 24
SYSTEM_TOKENS = 1500
SETTLED = 60.0
"""Seconds that the client waits, by default, before it asks."""


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Seconds that each request took, and the node that served it, by its tokens/s."""

    took: tuple[float, ...]
    served_by: tuple[float, ...]

    def mean(self, first: int, last: int) -> float:
        """The mean of requests `first` to `last`, counted from 1."""
        return fmean(self.took[first - 1 : last])


def play(
    seed: int,
    folder: Path,
    decodes: Sequence[float] = DECODES,
    *,
    calibrate: bool = True,
    wait: float = SETTLED,
    system_tokens: int = SYSTEM_TOKENS,
    requests: int = REQUESTS,
) -> ColdStart:
    """One start over nodes of these speeds in random order."""
    order = list(decodes)
    random.Random(seed).shuffle(order)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(
            _played(seed, folder, order, calibrate, wait, system_tokens, requests)
        )


def compare(seed: int, folder: Path, **keys: float) -> tuple[ColdStart, ColdStart]:
    """One start, and the fastest node alone with the same requests."""
    found = play(seed, folder / "all", **keys)  # type: ignore[arg-type]
    return found, play(seed, folder / "alone", (max(DECODES),), **keys)  # type: ignore[arg-type]


async def _played(
    seed: int,
    folder: Path,
    order: Sequence[float],
    calibrate: bool,
    wait: float,
    system_tokens: int,
    requests: int,
) -> ColdStart:
    folder.mkdir(parents=True)
    trace = make(str(seed), 1.0, Shape(requests, 1, 1, system_tokens))
    served_by = []
    async with AsyncExitStack() as stack:
        speeds = [Speed(15 * decode, decode, 0.1 / decode) for decode in order]
        fleet = await stack.enter_async_context(nodes(speeds, 1.0, now))
        setting = {"calibrate": calibrate} if "calibrate" in NodeSpec.model_fields else {}
        specs = [
            {"name": f"node-{place}", "url": node.url, "host": f"host-{place}", **setting}
            for place, node in enumerate(fleet)
        ]
        site = await stack.enter_async_context(
            running_gateway(folder, specs, rng=random.Random(seed))
        )
        assert site.gateway.public_listener is not None
        address = site.gateway.public_listener.host, site.gateway.public_listener.port
        await asyncio.sleep(wait)
        player = Player(address, 1.0, known=False, check=as_emulated, clock=now)
        took = []
        for session in trace.sessions:
            before = [node.requests for node in fleet]
            one = type(trace)(trace.shape, trace.systems, (_at_once(session),))
            (record,) = await player.play(one)
            if record.problem:
                raise AssertionError(record.problem)
            took.append(record.took)
            served_by += [
                decode
                for decode, node, count in zip(order, fleet, before, strict=True)
                if node.requests > count
            ][:1]
    return ColdStart(tuple(took), tuple(served_by))


def _at_once(session):  # type: ignore[no-untyped-def]
    return type(session)(0.0, session.tenant, session.turns)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--starts", type=int, default=20)
    add("--calibration", action=argparse.BooleanOptionalAction, default=True)
    add("--at-once", action="store_true", help="the client begins with the first probe")
    add("--system", type=int, default=SYSTEM_TOKENS, help="tokens of the shared prompt")
    add("--requests", type=int, default=REQUESTS)
    options = parser.parse_args(words)
    ratios = []
    with tempfile.TemporaryDirectory(prefix="llama-gateway-cold-") as folder:
        for seed in range(1, options.starts + 1):
            found, alone = compare(
                seed,
                Path(folder) / str(seed),
                calibrate=options.calibration,
                wait=0.0 if options.at_once else SETTLED,
                system_tokens=options.system,
                requests=options.requests,
            )
            ratios.append([found.mean(*part) / alone.mean(*part) for part in ((5, 12), (5, 24), (13, 24))])
            print(f"start {seed}: requests 5 to 12 at {ratios[-1][0]:.2f} x the fastest node's own, "
              f"5 to 24 {ratios[-1][1]:.2f}, 13 to 24 {ratios[-1][2]:.2f}; served by " + " ".join(f"{one:g}" for one in found.served_by))
    print("mean:", *(f"{fmean(one):.2f}" for one in zip(*ratios)), "worst:", *(f"{max(one):.2f}" for one in zip(*ratios)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
