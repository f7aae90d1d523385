"""Cold starts: how soon one client behind a fresh gateway is served by the fastest nodes.

    python -m tests.bench.scheduling.cold_start                     20 starts, half a minute
    python -m tests.bench.scheduling.cold_start --no-calibration    exploring alone
    python -m tests.bench.scheduling.cold_start --wait 0            the client begins at once
    python -m tests.bench.scheduling.cold_start --one-host          calibrated one after the other

Eight emulated nodes of 5 to 60 tokens/s, in another order at each start, and one client that asks
one request at a time: chats that share a system prompt. Gateway, nodes and client run in one
process, in virtual time. The mean of some requests is divided by the fastest node's own: what the
same requests take where there is no other node.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from tests.bench.scheduling.fronts import Speed, nodes
from tests.bench.scheduling.play import UNKNOWN, ask, chat_body
from tests.bench.scheduling.trace import Shape, make
from tests.gateways import running_gateway
from tests.known import known
from tests.virtual import VirtualLoop, now

DECODES = (5.0, 8.0, 12.0, 18.0, 25.0, 35.0, 48.0, 60.0)
"""Tokens/s that the nodes write; they read fifteen times as fast."""
STARTS = 20
PARTS = ((5, 12), (5, 24), (13, 24))
"""Requests whose means are told: the first and the last, counted from 1."""


@dataclass(frozen=True, slots=True)
class Served:
    """Seconds that each request took, and the tokens/s of the node that served it."""

    took: list[float] = field(default_factory=list)
    by: list[float] = field(default_factory=list)

    def mean(self, first: int, last: int) -> float:
        """The mean of these requests, counted from 1."""
        return fmean(self.took[first - 1 : last])


@dataclass(frozen=True, slots=True)
class Start:
    """How a start is played."""

    decodes: tuple[float, ...] = DECODES
    calibrate: bool = True
    wait: float = 60.0  # seconds from the first probes to the first request
    one_host: bool = False
    system_tokens: int = 1500
    requests: int = 24

    def play(self, seed: int, folder: Path) -> Served:
        """Play it in virtual time, in the order of nodes and with the chats of this seed."""
        folder.mkdir(parents=True)
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(self._played(seed, folder))

    async def _played(self, seed: int, folder: Path) -> Served:
        order = random.Random(seed).sample(self.decodes, len(self.decodes))
        trace = make(str(seed), 1.0, Shape(self.requests, 1, 1, self.system_tokens))
        served = Served()
        async with AsyncExitStack() as stack:
            speeds = [Speed(15 * decode, decode, 0.1 / decode) for decode in order]
            fleet = await stack.enter_async_context(nodes(speeds, 1.0, now))
            specs = [
                {
                    "name": f"node-{place}",
                    "url": node.url,
                    "host": "one" if self.one_host else f"host-{place}",
                    "calibrate": self.calibrate,
                }
                for place, node in enumerate(fleet)
            ]
            gateway = running_gateway(folder, specs, rng=random.Random(seed))
            site = await stack.enter_async_context(gateway)
            listener = known(site.gateway.public_listener)
            of_gateway = site.gateway.fleet.nodes.values()
            await asyncio.sleep(self.wait)
            for session in trace.sessions:
                messages = [
                    {"role": "system", "content": trace.systems[0]},
                    {"role": "user", "content": session.turns[0].question},
                ]
                before = [node.requests for node in of_gateway]
                body = chat_body(messages, UNKNOWN)
                answer = await ask((listener.host, listener.port), body, 600.0, now)
                assert not answer.problem, answer.problem
                served.took.append(answer.done - answer.sent)
                counts = zip(order, of_gateway, before, strict=True)
                served.by.extend(decode for decode, node, n in counts if node.requests > n)
        return served


def ratios(start: Start, seed: int, folder: Path) -> tuple[list[float], Served]:
    """The means of `PARTS` by the fastest node's own, and how the requests were served."""
    served = start.play(seed, folder / f"{seed}")
    fastest = replace(start, decodes=(max(start.decodes),)).play(seed, folder / f"{seed}-alone")
    parts = [part for part in PARTS if part[1] <= start.requests]
    return [served.mean(*part) / fastest.mean(*part) for part in parts], served


def main() -> None:
    """Play the starts and print a line for each."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.scheduling.cold_start",
        description="How soon a fresh gateway finds its fastest node.",
    )
    add = parser.add_argument
    add("--calibration", action=argparse.BooleanOptionalAction, default=True)
    add("--wait", type=float, default=60.0, help="seconds until the first request (default 60)")
    add("--one-host", action="store_true", help="all nodes on one host")
    options = parser.parse_args()
    start = Start(calibrate=options.calibration, wait=options.wait, one_host=options.one_host)
    found = []
    with tempfile.TemporaryDirectory(prefix="llama-gateway-cold-") as folder:
        for seed in range(1, STARTS + 1):
            factors, served = ratios(start, seed, Path(folder))
            found.append(factors)
            print(f"start {seed}:", _words(factors), "by", *(f"{one:g}" for one in served.by))
    columns = list(zip(*found, strict=True))
    print("mean:", _words([fmean(column) for column in columns]))
    print("worst:", _words([max(column) for column in columns]))


def _words(factors: Sequence[float]) -> str:
    parts = zip(PARTS, factors, strict=False)
    return ", ".join(f"{factor:.2f} ({first}-{last})" for (first, last), factor in parts)


if __name__ == "__main__":
    main()
