"""Rows for the ledger, as tests and measurements need them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, func, insert, select

from gateway.store.schema import usage

NOON = 1_800_014_400.0
"""A Friday in January 2027, 12:00 UTC."""

DAY = 86400.0


def a_row(number: int, **values: Any) -> dict[str, Any]:
    """A request of team-a that ended at `NOON`; `values` are other columns."""
    ended = float(values.get("ended_at", NOON))
    row: dict[str, Any] = {
        **dict.fromkeys(usage.c.keys()),
        "id": f"r{number}", "process": "p1", "sequence": number, "started_at": ended - 1.0,
        "ended_at": ended, "key": "team-a", "model": "mistral", "class_": "normal", "tier": "cpu",
        "node": "cpu-a", "path": "/v1/chat/completions", "stream": False, "prompt_tokens": 100,
        "cached_tokens": 0, "completion_tokens": 10, "slot_seconds": 1.0, "cost": 0.5,
        "attempts": 1, "status": 200, "outcome": "ok", "wait_seconds": 0.0, "resumptions": 0,
    }  # fmt: skip
    unknown = set(values) - set(row)
    assert not unknown, f"the ledger has no column {unknown}"
    return row | values


def add_rows(connection: Connection, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(insert(usage), rows)


def count_rows(connection: Connection) -> int:
    return connection.scalar(select(func.count()).select_from(usage)) or 0


def made_up_rows(count: int, days: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Rows of so many days before `NOON`, of 40 keys, 500 users, 4 models and 10 nodes."""
    for number in range(count):
        gpu = rng.random() < 0.1
        key = rng.randrange(40)
        ended_at = NOON - rng.random() * days * DAY
        yield a_row(
            number,
            started_at=ended_at - rng.lognormvariate(2.0, 0.7),
            ended_at=ended_at,
            key=f"key-{key}",
            group_name=f"group-{key % 5}",
            user=f"user-{rng.randrange(500)}" if key < 4 else None,
            model=f"model-{rng.randrange(4)}",
            tier="gpu" if gpu else "cpu",
            node=f"{'gpu' if gpu else 'cpu'}-{rng.randrange(5)}",
            prompt_tokens=rng.randrange(4000),
            completion_tokens=rng.randrange(500),
            # Floats sum these without an error in any order.
            cost=rng.randrange(1000) / 2**20,
            gpu_cost=rng.randrange(1000) / 2**20,
            status=rng.choices((200, 499, 502), (95, 4, 1))[0],
        )
