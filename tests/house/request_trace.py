"""Prints the modules that a streaming chat enters: `python -m tests.house.request_trace`.

It runs a gateway over an emulated node. The first request fills caches; the modules count that all
later ones enter, but for one: one of them may find an idle connection. Most may meet work of the
clock, where the machine is busy.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from tests.emulator import EmulatedNode
from tests.gateways import running_gateway

REQUESTS = 12
QUIET_SECONDS = 0.2
"""Before each request: what the one before has left to do is done by then."""


async def entered_modules() -> list[str]:
    """The modules that all requests but the first and one more enter, in their order."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        async with EmulatedNode() as node, running_gateway(Path(folder), [node.url]) as running:
            for number in range(REQUESTS):
                await asyncio.sleep(QUIET_SECONDS)
                entered: dict[str, None] = {}

                def trace(
                    frame: FrameType, event: str, _: Any, entered: dict[str, None] = entered
                ) -> None:
                    name = frame.f_globals.get("__name__", "")
                    code = frame.f_code
                    # Neither generated methods of dataclasses nor modules that are imported count.
                    own = code.co_filename[:1] != "<" and code.co_name != "<module>"
                    if event == "call" and own and name.partition(".")[0] == "gateway":
                        entered.setdefault(name)

                body = {
                    "messages": [{"role": "user", "content": f"hello {number}"}],
                    "max_tokens": 8,
                    "stream": True,
                }
                sys.setprofile(trace)
                try:
                    path = "/v1/chat/completions"
                    async with running.client.stream("POST", path, json=body) as reply:
                        await reply.aread()
                finally:
                    sys.setprofile(None)
                if reply.status_code != 200:
                    raise SystemExit(f"status {reply.status_code}")
                counts.update([*entered] if number else ())
    return [name for name, count in counts.items() if count >= REQUESTS - 2]


if __name__ == "__main__":
    print(*asyncio.run(entered_modules()), sep="\n")
