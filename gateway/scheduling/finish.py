"""The expected finish: what a request costs if it goes to one node, in seconds.

    T = W + R + u/p + c·(b + s·k) + (u/p)·k + s·Σr + D

- W  seconds until a slot is free there (0 where one is)
- R  seconds until the prompts that are queued there have been read: reading is serial on a node
- u  prompt tokens that its cache does not hold, p  prompt tokens/s it reads
- c  tokens of the answer, b  seconds a token takes alone, s  seconds more for each neighbour:
     decoding is bound by memory, so a batch shares the reading of the weights
- k  neighbours that run there; (u/p)·k is what the newcomer's reading holds them up, since a
     server that reads a prompt writes nothing
- Σr tokens that the neighbours still have to write; s·Σr is what one more sequence slows them down
- D  seconds for doubt: a degraded node, one in its slow start, one that failed lately

The first line of terms is the newcomer's own time, the rest is its price to others; minimising the
sum minimises what all of them take together. Sources: `LLAMA_SERVER.md` of the project's notes for
what a prefill does to neighbours (measured: 14 s of standstill while 3,000 tokens were read);
least expected work left in Harchol-Balter, "Performance Modeling and Design of Computer Systems",
2013, ch. 24; cost by uncached prefill and load in SGLang's router and in "Preble", 2024.

`cost` is the whole formula and works on floats and on numpy arrays alike.
"""

from __future__ import annotations

from typing import TypeVar

from gateway.scheduling.ask import Ask
from gateway.scheduling.board import Row

Number = TypeVar("Number")


def seconds(row: Row, ask: Ask, now: float) -> float:
    """The expected finish of `ask` on `row`, a slot of which is free, in seconds from `now`."""
    uncached = ask.prompt - ask.cached.get(row.index, 0.0)
    uncached = max(uncached, 1.0)
    total = row.doubt + uncached * row.per_prompt + ask.completion * row.per_token
    if row.reading_until > now:
        total += row.reading_until - now
    if row.drag:
        total += row.drag * max(0.0, row.ends - now * len(row.running))
    if ask.doubts:
        total += ask.doubts.get(row.index, 0.0)
    return total
