"""A process that writes logs until it is killed: `python -m tests.stored.log_writer FOLDER`.

It prints a log's name and the number of its newest event that followers could see, again and again.
With names of logs behind the folder it goes on with these.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from gateway.stored.response_log import ResponseLog
from tests.stored.responses_over_nodes import open_logs

LOGS = 20


def delta(log: str, number: int) -> dict[str, str]:
    return {"type": "response.output_text.delta", "delta": f"{log[-4:]}-{number} " * (number % 7)}


async def main(folder: Path, names: list[str]) -> None:
    async with open_logs(folder) as logs:
        if names:
            open_ones = [await logs.open(name, to_write=True) for name in names]
        else:
            open_ones = [await logs.create() for _ in range(LOGS)]

        async def write(log: ResponseLog) -> None:
            while True:
                await log.append([delta(log.name, log.next_number + at) for at in range(3)])
                await asyncio.sleep(0.002)

        async def tell() -> None:
            while True:
                for log in open_ones:
                    print(log.name, log.extent.events, flush=True)
                await asyncio.sleep(0.01)

        await asyncio.gather(tell(), *map(write, open_ones))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
