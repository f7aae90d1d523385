"""Settings of the queue: its size, waits, classes and their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from gateway.config.fields import (
    ConfigModel,
    Count,
    CountOrZero,
    Fraction,
    Seconds,
    SecondsOrZero,
    TypeLabel,
)

DEFAULT_PATIENCE: Mapping[str, float] = {
    "urgent": 10.0,
    "premium": 30.0,
    "normal": 60.0,
    "batch": 600.0,
}
"""Seconds of waiting after which a request of a class is overdue; `classes` overrides them."""

DEFAULT_QUEUE_SHARE: Mapping[str, float] = {
    "urgent": 1.0,
    "premium": 1.0,
    "normal": 0.9,
    "batch": 0.5,
}
"""Share of the queue that a class may fill; `classes` overrides it."""

DEFAULT_SLOTLESS = 4
"""Requests without a slot that a node gets at once. llama.cpp's server has four HTTP threads more
than slots, and each such request keeps one busy."""


class ClassRule(ConfigModel):
    """Rules for one class of requests."""

    max_wait: Annotated[
        Seconds | None, Field(description="Longest wait in the queue, instead of `queue.max_wait`.")
    ] = None
    patience: Annotated[
        SecondsOrZero | None,
        Field(
            description=(
                "A request that has waited longer is overdue: of ten slots that come free, one "
                "goes to the oldest overdue request of any class. Unset: 10 s for `urgent`, 30 s "
                "for `premium`, 60 s for `normal`, 10 min for `batch`."
            )
        ),
    ] = None
    reserve_slots: Annotated[
        Fraction | None,
        Field(
            description=(
                "Share of each node's slots, rounded down, that this class leaves free for the "
                "other classes. For `batch` only. Unset: none."
            )
        ),
    ] = None
    queue_share: Annotated[
        Fraction | None,
        Field(
            description=(
                "The class is admitted while the queue is filled less than this, by count and by "
                "predicted wait. Unset: 1 for `urgent` and `premium`, 0.9 for `normal`, 0.5 for "
                "`batch`."
            )
        ),
    ] = None


class QueueSettings(ConfigModel):
    """Requests that wait for a slot."""

    max: Annotated[
        CountOrZero,
        Field(
            description=(
                "Requests that may wait; the next gets 429 `queue_full`. One key or address may "
                "hold seven eighths of the places; for another caller's request its newest ones "
                "give way."
            )
        ),
    ] = 256
    max_wait: Annotated[
        Seconds,
        Field(
            description=(
                "Longest wait; then 503 `queue_timeout`. A request whose predicted wait is longer "
                "gets it at once."
            )
        ),
    ] = 300.0
    reopen: Annotated[
        Fraction,
        Field(
            description=(
                "A class that was refused for its predicted wait is admitted again when that wait "
                "has fallen to this share of its limit."
            )
        ),
    ] = 0.8
    latest_wins: Annotated[
        bool,
        Field(
            description=(
                "An editor's completion (`/infill`, or one with a `suffix`) ends the earlier one "
                "of its session with 409 `superseded`."
            )
        ),
        TypeLabel("true or false"),
    ] = True
    slotless: Annotated[
        Count,
        Field(
            description=(
                "Requests without a slot (tokenizing, templates, counting) that one node gets at "
                "once, half as many from one caller; the others queue as for a slot."
            )
        ),
    ] = DEFAULT_SLOTLESS
