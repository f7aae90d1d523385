"""What a placement was compared with, in numbers: to explain it after the state has changed.

The dispatcher makes a `Comparison` of each placement where somebody wants one
(`selection.compare`). It holds the terms of `cost.py` for a bounded number of rows, as they were
just before the placement, so that their costs are those by which the row was chosen
(`cost.cost_of_figures`).
"""

from __future__ import annotations

import msgspec

MOST_COMPARED_ROWS = 8
"""Rows that are kept of one placement: those of the least cost, the chosen one among them."""


# Structs of msgspec, since some are made for each request.
class RowFigures(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A row with room, just before the request was placed. Letters as in `cost.py`."""

    name: str
    measured: bool
    """Whether its speeds were measured; else they are guesses."""
    total: int
    """Its slots."""
    busy: int
    """k: neighbours."""
    prefill_tps: float
    """p."""
    token_base: float
    """b."""
    token_step: float
    """s."""
    decode_slowdown: float
    """d."""
    remaining: float
    """Σr."""
    prefill_wait: float
    """R."""
    penalty: float
    """The row's part of D."""
    own_penalty: float
    """The part of D that holds for this request alone."""
    cached: float
    """Prompt tokens that it was believed to have cached."""
    wake: float = 0.0
    """The seconds of `penalty` in which the node, which sleeps, wakes up."""
    pool: int = 0
    """Tokens that its slots share; 0: none."""
    pool_used: int = 0
    """Of these, tokens that were reserved, or that others used."""


class Comparison(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The rows that a placement was compared with."""

    chosen: RowFigures
    others: tuple[RowFigures, ...]
    """The best of those that had room and were not chosen, in no order."""
    with_room: int
    """Rows of its candidate set that had room for it."""
    candidates: int
    """Rows of its candidate set."""
    by_cost: bool
    """Whether the policy goes by the cost."""


class Deferral(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Why a request waits for a busy node though another has room. Costs are in seconds."""

    node: str
    wait_seconds: float
    """Until the busy node was expected to have room."""
    cost_there: float
    """Its expected cost there, that wait included."""
    cost_at_once: float
    """Its expected cost on the node that had room."""
    cached: float
    """Prompt tokens that the busy node was believed to have cached, or to have soon."""
