"""`python -m tests.workshop.simulate.timing`: compares the model's times with a real server's.

A small trace is played on a server with two slots and on its model, which gets speeds that were
measured just before and after. Times are CPU seconds of the server: its one thread computes all
the time while it has work, so other work on the machine stretches what the clock says, and not
these. No test compares them all the same, since a machine may be slower for a while.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time

import httpx
import psutil

from gateway.workshop.simulate.simulation import Job, SimulatedMachine, TracePrompt
from tests.servers import DemoServer, running_demo_servers
from tests.workshop.simulate.build import play
from tests.workshop.simulate.real import BATCH, ask, words

USUAL = 800  # about the tokens of a prompt of the trace
HEAD = 300  # tokens that all conversations begin with

Conversation = list[tuple[int, int]]  # tokens of each question and of its answer


class Scale:
    """The demo model of 512 wide in a server of two slots, timed in its own CPU seconds."""

    def __init__(self, client: httpx.AsyncClient, server: DemoServer, rng: random.Random) -> None:
        self.client, self.url, self.rng = client, server.url, rng
        self._process = psutil.Process(server.pid)

    def spent(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    async def cost(self, prompt: int, output: int, together: int = 1) -> float:
        """CPU seconds of `together` requests at once."""
        begun = self.spent()
        requests = (
            ask(self.client, self.url, words(self.rng, prompt), output) for _ in range(together)
        )
        await asyncio.gather(*requests)
        return self.spent() - begun

    async def measure(self) -> tuple[float, float, float]:
        """Seconds of a prompt token, of a token alone, and of a step of two.

        At about the lengths of the trace: attention makes later tokens dearer, which the model
        leaves out.
        """
        once = await self.cost(USUAL, 1)
        alone = (await self.cost(USUAL, 101) - once) / 100
        both = (await self.cost(USUAL, 101, together=2) - 2 * once) / 100
        return once / USUAL, alone, both

    async def play(self, conversations: list[Conversation]) -> tuple[float, float]:
        """Mean completion and total, in CPU seconds."""
        head = words(self.rng, HEAD)

        async def converse(turns: Conversation) -> list[float]:
            prompt = list(head)
            took = []
            for question, output in turns:
                prompt += words(self.rng, question)
                answer = await ask(self.client, self.url, prompt, output)
                took.append(answer.took)
                prompt += answer.ids
            return took

        begun, before = time.monotonic(), self.spent()
        reported = await asyncio.gather(*map(converse, conversations))
        span, whole = time.monotonic() - begun, self.spent() - before
        mean = statistics.mean(one for took in reported for one in took)
        return mean * whole / span, whole


def as_jobs(conversations: list[Conversation]) -> list[Job]:
    """The same conversations as requests of a trace."""
    jobs = []
    for number, turns in enumerate(conversations):
        tokens = HEAD
        for question, output in turns:
            tokens += question
            jobs.append(Job(0, 0.0, TracePrompt(number + 1, tokens, 1, HEAD), output))
            tokens += output
    return jobs


async def compare(seed: int) -> tuple[float, float]:
    """The model's mean completion and total work, as shares of the server's."""
    rng = random.Random(seed)
    conversations = [
        [(rng.randrange(150, 500), rng.randrange(60, 200)) for _ in range(2)] for _ in range(4)
    ]
    limits = httpx.Limits(max_keepalive_connections=0)  # it closes a connection after a stream
    with running_demo_servers(size="medium") as (server,):
        async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:
            scale = Scale(client, server, rng)
            await scale.cost(600, 20)
            before = await scale.measure()
            mean, whole = await scale.play(conversations)
            after = await scale.measure()
    read, alone, both = map(statistics.mean, zip(before, after, strict=True))
    node = SimulatedMachine("demo", 2, 1 / read, 1 / alone, max(0.0, both / alone - 1), BATCH)
    fleet = play(as_jobs(conversations), [node])
    took = statistics.mean(job.ended - job.arrived for job in fleet.jobs)
    return took / mean, fleet.servers[0].busy_seconds / whole


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    for seed in range(parser.parse_args().runs):
        mean, work = asyncio.run(compare(seed))
        print(f"of the server: mean completion {mean:.0%}, work {work:.0%}", flush=True)


if __name__ == "__main__":
    main()
