"""The expected finish: what a request costs if it goes to one node, in seconds.

    T = W + R + u/p + c·(b + s·k)  +  (u/p)·k + d·Σr  +  D

- W  until a slot is free there: 0 where one is
- R  until the prompts that are queued there have been read: a server reads one after the other
- u  prompt tokens that its cache does not hold; p  prompt tokens it reads a second
- c  tokens of the answer; b  seconds a token takes alone; s  seconds more for each neighbour:
     decoding waits for memory, so a batch shares the reading of the weights
- k  neighbours that run there. (u/p)·k is what the newcomer's reading holds them up: a server that
     reads a prompt writes nothing
- Σr seconds that the neighbours still have to run; d = s / (b + s·(k-1)) is the share by which one
     more sequence slows them down; nothing where nobody writes
- D  seconds for doubt: one that has failed lately; negative for one that needs a request on trial,
     and for the one that its conversation went to last

The first four terms are the newcomer's own time, the next two its price to those who run there, so
the least T is what all of them together lose least by.

Sources: llama.cpp's server as measured (a slot that wrote stood still for 14 s while its neighbour
read 3,000 tokens; 1,400 tokens took 10.3 s cold and 0.06 s from the cache). The marginal cost of a
placement, instead of its own time alone: Harchol-Balter, "Performance Modeling and Design of
Computer Systems", 2013, on least work left and size-based assignment. Uncached prefill against
load: Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving", 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.scheduling.ask import Ask
    from gateway.scheduling.board import Row

Numbers = TypeVar("Numbers", bound=Any)
"""A float, or an array of them: one for each row."""

LEAST_READ = 1.0
"""Tokens that are read whatever is cached: a server always reads the last one."""


def cost(
    uncached: float,
    completion: float,
    per_prompt: Numbers,
    per_token: Numbers,
    before: Numbers,
    drag: Numbers,
    left: Numbers,
) -> Numbers:
    """T by a row's coefficients, for floats as for numpy arrays.

    `per_prompt` = (1 + k)/p, `per_token` = b + s·k, `before` = W + R + D, `drag` = d, `left` = Σr.
    """
    total: Numbers = before + uncached * per_prompt + completion * per_token + drag * left
    return total


def seconds(row: Row, ask: Ask, now: float) -> float:
    """T of `ask` on `row`, where it has room now."""
    before = row.doubt
    if row.reading_until > now:
        before += row.reading_until - now
    index = row.index
    if ask.doubts:
        before += ask.doubts.get(index, 0.0)
    uncached = ask.prompt
    if ask.cached:
        uncached = max(LEAST_READ, uncached - ask.cached.get(index, 0.0))
    left = 0.0
    if row.drag:
        left = row.ends - now * len(row.running)
        if left < 0.0:  # noqa: PLR1730 - a call costs four times as much
            left = 0.0
    return cost(uncached, ask.completion, row.per_prompt, row.per_token, before, row.drag, left)


def each(rows: Sequence[Row], ask: Ask, now: float) -> list[float]:
    """`seconds` of each row, in one go where nothing is known of one row alone."""
    if ask.cached or ask.doubts:
        return [seconds(row, ask, now) for row in rows]
    prompt, completion = ask.prompt, ask.completion
    found = []
    for row in rows:
        before = row.doubt
        if row.reading_until > now:
            before += row.reading_until - now
        left, drag = 0.0, row.drag
        if drag:
            left = row.ends - now * len(row.running)
            if left < 0.0:  # noqa: PLR1730 - as above
                left = 0.0
        # `cost`, spelt out: calls would be most of it.
        found.append(before + prompt * row.per_prompt + completion * row.per_token + drag * left)
    return found


def seconds_after(row: Row, ask: Ask, wait: float) -> float:
    """T of `ask` on `row` if it gets the slots there that come free after `wait` seconds.

    The one that makes room has gone by then, and its neighbours are taken to go on.
    """
    index = row.index
    cached = max(ask.cached.get(index, 0.0), ask.coming.get(index, 0.0))
    uncached = max(LEAST_READ, ask.prompt - cached)
    neighbours = max(0, row.busy - ask.slots)
    doubt = ask.doubts.get(index, 0.0)
    return cost(
        uncached,
        ask.completion,
        (1 + neighbours) / row.prefill,
        row.token_base + row.token_step * neighbours,
        # That its conversation was there last is no reason to wait.
        wait + row.doubt + max(0.0, doubt),
        0.0,
        0.0,
    )
