"""`python -m tests.emulator --slots 2`: an emulated node as a process of its own.

Prints two lines, the URL of the node and where it takes commands (`process.py`), and serves until
SIGTERM, SIGINT or the end of its parent.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import sys
from math import inf

import uvloop

from tests.emulator.node import EmulatedNode
from tests.emulator.process import serve_commands

_PR_SET_PDEATHSIG = 1


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator", description=__doc__)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0)
    add("--slots", type=int, default=2)
    add("--model", default="demo")
    add("--prefill-tps", type=float, default=inf, help="prompt tokens/s")
    add("--decode-tps", type=float, default=inf, help="tokens/s of one slot")
    add("--answer-tokens", type=int, default=32, help="length of the model's own answers")
    add("--prefill-stalls", action="store_true", help="slots share one CPU")
    step = "seconds that each further busy slot adds to a token"
    add("--decode-step", type=float, default=0.0, help=step)
    add("--cache-ram", type=int, help="tokens of evicted prompts in host memory")
    add("--ping-interval", type=float, default=30.0, help="seconds")
    for kind in ("embeddings", "rerank", "infill"):
        add(f"--{kind}", action="store_true")
    return parser


async def _serve(options: dict[str, object]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with EmulatedNode(**options) as node:  # type: ignore[arg-type]
        print(node.url, await serve_commands(node), sep="\n", flush=True)
        await stop.wait()


def main() -> None:
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            return
    uvloop.run(_serve(vars(_options().parse_args())))


if __name__ == "__main__":
    main()
