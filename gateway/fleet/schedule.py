"""When a node is probed next: pure arithmetic, so that a thousand nodes can be tested at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

JITTER = 0.1
"""Share by which a period varies: nodes that meet by chance part again."""
SOON = 1.0
"""Seconds between the probes of a node about to change: loading, failing, or just gone."""


def next_gap(interval: float, rng: random.Random, *, first: bool, unsettled: bool) -> float:
    """Seconds from the end of a probe to the next.

    All nodes are probed at once when the gateway starts; after this `first` probe each gets a
    random phase of its own. A node that is down is probed at least as often as any other: a probe
    costs little, and a node that is back is wanted within seconds.
    """
    if unsettled:
        interval = min(interval, SOON)
    elif first:
        return rng.uniform(0.0, interval)
    return interval * rng.uniform(1 - JITTER, 1 + JITTER)
