"""Time to first token beside batch work: `python -m tests.stored.measure_yielding`.

Two emulated nodes of 4 slots share their computation between prefill and decode, as llama.cpp's
server does. Short chats come one each 1.5 s, first to idle nodes, then while batch rows hold all
slots: rows that yield, and the same sent by a client, which do not. In virtual time.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from statistics import median, quantiles

from tests.forward.proxy_over_nodes import ProxyOverNodes, proxy_over
from tests.stored.batch_gateway import CALM
from tests.stored.measure_feeding import INTERVAL, a_node
from tests.stored.test_yielding import CHAT, ROW, in_decode, message, start_row, ttft
from tests.stored.test_yielding import yields_of as cuts_of
from tests.virtual import in_virtual_time, now

NODES, SLOTS = 2, 4
CHATS = 20


async def chat(proxy: ProxyOverNodes, number: int) -> float:
    await asyncio.sleep(number * INTERVAL)
    return await ttft(proxy)


async def measure(name: str, *, batch: bool, yields: bool) -> None:
    """Print one line."""
    folder = Path(tempfile.mkdtemp())
    async with proxy_over(folder, *(a_node(SLOTS) for _ in range(NODES)), **CALM) as proxy:
        cuts, count = cuts_of(proxy), NODES * SLOTS if batch else 0
        headers = {"x-priority": "batch"}
        rows: list[asyncio.Task[object]] = [
            start_row(proxy, number, **message(number))
            if yields
            else asyncio.create_task(proxy.ask(CHAT, headers, **ROW, **message(number)))
            for number in range(count)
        ]
        await in_decode(proxy, count)
        began = now()
        found = await asyncio.gather(*(chat(proxy, number) for number in range(CHATS)))
        await asyncio.gather(*rows)
        took = f"; {len(cuts)} cuts, batch done after {now() - began:.1f} s" if batch else ""
        print(
            f"{name}: time to first token {median(found):.2f} s, "
            f"p95 {quantiles(found, n=20)[-1]:.2f} s, longest {max(found):.2f} s{took}"
        )


@in_virtual_time
async def main() -> None:
    """Measure all three."""
    await measure("idle nodes", batch=False, yields=False)
    await measure("beside rows that yield", batch=True, yields=True)
    await measure("beside requests that do not", batch=True, yields=False)


if __name__ == "__main__":
    main()
