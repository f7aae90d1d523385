"""The schedule of faults that follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

CUTS = ("reset", "close", "cut", "end", "error_event", "garbage_body")
BEFORE_THE_HEAD = ("reset", "close", "garbage", "slow_head", "interim")
FORMS = (
    *("split", "merge", "crlf", "comments", "chunk_extensions", "double_done", "no_done"),
    *("head_bomb", "wrong_length"),
)
EXTRAS = ("comment", "line_comment", "empty", "no_data", "fields")
SINGLE_REQUEST_FAULTS: list[dict[str, Any]] = [
    *({"kind": kind} for kind in (*BEFORE_THE_HEAD, *FORMS)),
    *({"kind": "hang", "seconds": seconds} for seconds in (0.2, 3.0)),
    *({"kind": "status", "status": status} for status in (500, 502, 503, 429, 404, 401)),
    *({"kind": kind, "after_events": after} for kind, after in product(CUTS, (0, 1, 2, 7, 25))),
    *({"kind": "cut", "after_events": after, "reset": True} for after in (0, 5)),
    *(
        {"kind": "hang", "after_events": after, "seconds": seconds}
        for after, seconds in product((0, 1, 6), (0.2, 3.0))
    ),
    {"kind": "trickle", "size": 40, "seconds": 0.005},
    *(
        {"kind": "insert", "what": what, "after_events": after}
        for what, after in product(EXTRAS, (0, 4))
    ),
    {"kind": "insert", "what": "not_json", "after_events": 0},
    {"kind": "insert", "what": "huge", "after_events": 0, "size": 2 << 20},
]  # faults of an emulated node for one or a few of its next requests

STANDING_FAULTS: list[dict[str, Any]] = [
    *({"kind": "status", "status": status} for status in (500, 503, 429)),
    {"kind": "hang", "seconds": 1.5, "path": "control"},
    {"kind": "reset"},
    {"kind": "close", "after_events": 3},
    {"kind": "stale"},
]  # faults of an emulated node for all its requests during a time

LINK_FAULTS = ("reset", "silence", "half", "half, then reset", "garbage", "trickle")
EMULATOR_FAULTS = ("once", "standing", "kill", "process", "stop", "loading", "refuse")
SERVER_FAULTS = ("link", "process", "stop")
GATEWAY_FAULTS = ("remove", "change", "bad inventory", "settings", "reload", "drain", "full disk")


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """One fault: it begins `at` seconds into the run and lasts for `lasts` seconds."""

    at: float
    kind: str
    node: str = ""
    lasts: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)


def schedule(
    rng: random.Random,
    seconds: float,
    emulated: Sequence[str],
    real: Sequence[str],
    *,
    process_faults: bool,
) -> list[ScheduledFault]:
    """The faults of a run of `seconds`, by time; `emulated` and `real` are names of nodes."""
    faults = []
    at = rng.uniform(0.2, 0.6)
    mean_gap = rng.choice((0.03, 0.08, 0.2))  # seconds between faults
    while at < seconds - 0.3:
        chance = rng.random()
        lasts = rng.uniform(0.05, min(2.5, seconds / 3))
        node, detail = "", dict[str, Any]()
        if process_faults and chance < 0.015:
            kind, lasts = "descriptors", min(lasts, 1.0)
            detail = {"more": rng.choice((0, 3))}
        elif process_faults and chance < 0.03:
            kind = "clock"
            by = rng.choice((-86_400.0, -60.0, -1.0, 1.0, 3600.0, 365 * 86_400.0))
            detail = {"seconds": by}
        elif chance < 0.15:
            kind, node = rng.choice(GATEWAY_FAULTS), rng.choice(emulated)
        elif real and chance < 0.35:
            kind, node = rng.choices(SERVER_FAULTS, (6, 1, 2))[0], rng.choice(real)
            detail = {"link": rng.choice(LINK_FAULTS)} if kind == "link" else {}
        else:
            kind, node = (
                rng.choices(EMULATOR_FAULTS, (60, 8, 8, 1, 5, 3, 3))[0],
                rng.choice(emulated),
            )
            if kind == "once":
                detail = {**rng.choice(SINGLE_REQUEST_FAULTS), "n": rng.choice((1, 1, 1, 3))}
            elif kind == "standing":
                detail = rng.choice(STANDING_FAULTS)
        faults.append(ScheduledFault(at, kind, node, lasts, detail))
        at += rng.expovariate(1 / mean_gap)
    return faults
