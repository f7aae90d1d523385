"""How batches fill a fleet, and what clients notice: `measure_feeding` in real time.

The gateway and each emulated node are processes of their own, and their `/slots` are sampled over
HTTP. Chats come first alone, then beside a batch:

    python -m tests.stored.measure_feeding_processes --words 0

What other work the machine has, the times to first token include; run it on a quiet one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import fmean, quantiles

import httpx
import yaml

from gateway.schedule.core.requests import spread_reserve
from tests.gateways import NO_TLS
from tests.stored.batch_gateway import HEADERS, key
from tests.stored.kills import Caller, a_site
from tests.stored.measure_feeding import LINES, SAMPLE_SECONDS, Site, chats_of, lines, told

LIMIT = 60.0
CHATS = 60
FILL_SECONDS = 20.0
"""Between the batch's creation and the first chat beside it."""
NODE = (
    "--prefill-tps", "500", "--decode-tps", "10", "--decode-step", "0.005", "--answer-tokens",
    "5000", "--prefill-stalls", "--cache-ram", "4096",
)  # fmt: skip


@contextlib.asynccontextmanager
async def a_node(slots: int) -> AsyncIterator[str]:
    """The URL of an emulated node, a process of its own."""
    command = (sys.executable, "-m", "tests.emulator", "--slots", str(slots), *NODE)
    process: Process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LIMIT):
            url = (await process.stdout.readline()).decode().strip()
        yield url
    finally:
        process.terminate()
        await process.wait()


async def sampled(nodes: list[str], samples: list[list[int]]) -> None:
    """Busy slots of each node, for ever."""
    async with httpx.AsyncClient(trust_env=False, verify=NO_TLS, timeout=LIMIT) as http:
        while True:
            answers = await asyncio.gather(*(http.get(f"{url}/slots") for url in nodes))
            samples.append([sum(slot["is_processing"] for slot in one.json()) for one in answers])
            await asyncio.sleep(SAMPLE_SECONDS)


async def measure(site: Site, words: int) -> None:
    """Print what chats of so many words see, and how full the slots are."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = [await stack.enter_async_context(a_node(site.slots)) for _ in range(site.nodes)]
        settings = {"keys": [key()], "classes": {"batch": {"reserve_slots": site.reserve}}}
        store = f"sqlite:///{folder}/gateway.db"
        process, http = await stack.enter_async_context(
            a_site(folder, [], store, settings, HEADERS)
        )
        entries = [{"name": f"node-{number}", "url": url} for number, url in enumerate(nodes)]
        (folder / "nodes.yaml").write_text(yaml.safe_dump({"nodes": entries}))
        await process.start()
        caller = Caller(process, http)
        alone = await chats_of(http, words, range(CHATS))
        print(f"chats of {words} words alone: time to first token {told(alone)}", flush=True)
        batch = await caller.create(lines(LINES, words=site.line_words))
        await asyncio.sleep(FILL_SECONDS)
        samples: list[list[int]] = []
        task = asyncio.create_task(sampled(nodes, samples))
        beside = await chats_of(http, words, range(CHATS, 2 * CHATS))
        task.cancel()
        found = (await caller.ask("GET", f"/v1/batches/{batch}")).json()
        assert found["llama_gateway"]["waiting"], "too few lines: the batch has ended"
    ratio = quantiles(beside, n=20)[-1] / quantiles(alone, n=20)[-1]
    reserve = spread_reserve(site.reserve, [site.slots] * site.nodes)
    open_ = [index for index, kept in enumerate(reserve) if kept < site.slots]
    busy = fmean(
        sum(min(one[index], site.slots - reserve[index]) for index in open_) for one in samples
    )
    print(
        f"chats of {words} words beside a batch: time to first token {told(beside)}; p95 "
        f"{ratio:.2f} times as long\n{site.open_to_batch} of {site.nodes * site.slots} slots for "
        f"batch, {busy / site.open_to_batch:.1%} of them busy in {len(samples)} samples; "
        f"{fmean(map(sum, samples)):.2f} slots busy in all; "
        f"{found['request_counts']}; load of the machine {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, nargs="+", default=[0, 100, 300], help="of a chat")
    parser.add_argument("--line-words", type=int, default=0, help="of a line's prompt")
    given = parser.parse_args()
    site = Site(nodes=8, slots=2, reserve=0.375, line_words=given.line_words)
    for words in given.words:
        asyncio.run(measure(site, words))


if __name__ == "__main__":
    main()
