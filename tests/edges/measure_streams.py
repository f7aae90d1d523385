"""What a gateway's processes spend on a chunk of a stream, with edges and without.

    python -m tests.edges.measure_streams [--edges 0,1,2] [--streams 100] [--tokens 200]

Runs `serve` over an emulated node, holds so many streams at once, and reads the processor time of
each process over the run: what two cores can't show as throughput shows as seconds of each process.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from tests.emulator.process import emulator_process
from tests.emulator.raw_connection import chat, post, raw_connection
from tests.gateway_processes import serving

LIMIT = 600.0
SETTLE_SECONDS = 1.0
"""Until the brain knows that the first streams have ended: it shares out the next ones by that."""


async def one_stream(url: str, tokens: int, begun: asyncio.Semaphore) -> int:
    async with begun, raw_connection(url) as wire:
        await wire.send(post("/v1/chat/completions", chat(max_tokens=tokens, ignore_eos=True)))
        await wire.head()
        size = 0
        while True:
            data = await asyncio.wait_for(wire.reader.read(1 << 16), LIMIT)
            size += len(data)
            if not data or data.endswith(b"0\r\n\r\n"):
                return size


def used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def measure(folder: Path, node: str, edges: int, streams: int, tokens: int) -> None:
    settings = {"listen": {"port": 0, "edges": edges}, "logging": {"access": False}}
    nodes = [{"name": "one", "url": node}]
    async with serving(folder, nodes, settings=settings) as line:
        async with httpx.AsyncClient(base_url=line.admin_url, trust_env=False) as admin:
            status = (await admin.get("/admin/status", timeout=LIMIT)).json()
        processes = {"brain" if edges else "all": psutil.Process(line.first.pid)}
        processes |= {one["name"]: psutil.Process(one["pid"]) for one in status["edges"] or ()}
        begun = asyncio.Semaphore(streams)
        await asyncio.gather(*(one_stream(line.url, 8, begun) for _ in range(streams)))
        await asyncio.sleep(SETTLE_SECONDS)
        before = {name: used(one) for name, one in processes.items()}
        began = time.monotonic()
        await asyncio.gather(*(one_stream(line.url, tokens, begun) for _ in range(streams)))
        seconds, chunks = time.monotonic() - began, streams * tokens
        spent = {name: used(one) - before[name] for name, one in processes.items()}
        print(f"edges {edges}: {chunks} chunks in {seconds:.1f} s", end="")
        for name, cpu in spent.items():
            memory = processes[name].memory_info().rss >> 20
            print(f"; {name} {cpu:.2f} s, {1e6 * cpu / chunks:.1f} us/chunk, {memory} MiB", end="")
        print(f"; all {1e6 * sum(spent.values()) / chunks:.1f}", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--edges", default="0,1,2")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=int, default=20)
    asked = parser.parse_args()
    slots, rate = str(asked.streams), str(asked.rate)
    with emulator_process("--slots", slots, "--decode-tps", rate, "--prefill-tps", "1e6") as node:
        for edges in map(int, asked.edges.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                await measure(Path(folder), node.url, edges, asked.streams, asked.tokens)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
