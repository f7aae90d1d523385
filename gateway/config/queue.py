"""Settings of the queue: who may wait, how long, in which order, and for whom it is fair."""

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
"""Seconds that a class waits before it counts as overdue, unless the settings say."""

DEFAULT_QUEUE_SHARE: Mapping[str, float] = {
    "urgent": 1.0,
    "premium": 1.0,
    "normal": 0.9,
    "batch": 0.5,
}
"""How far a class may fill the queue, unless the settings say."""

DEFAULT_SLOTLESS = 4
"""Requests without a slot that a node gets at once, unless the settings say. llama.cpp's server
has four HTTP threads more than slots, and each such request keeps one busy."""


class ClassRule(ConfigModel):
    """What holds for one class of requests."""

    max_wait: Annotated[
        Seconds | None, Field(description="Longest wait in the queue, instead of `queue.max_wait`.")
    ] = None
    patience: Annotated[
        SecondsOrZero | None,
        Field(
            description=(
                "Who has waited longer is overdue: of ten slots that come free, one goes to the "
                "oldest overdue request of any class. Left away: 10 s for `urgent`, 30 s for "
                "`premium`, 60 s for `normal`, 10 min for `batch`."
            )
        ),
    ] = None
    reserve_slots: Annotated[
        Fraction | None,
        Field(
            description=(
                "Share of each node's slots, rounded down, that this class leaves free for what "
                "comes. For `batch` only. Left away: none."
            )
        ),
    ] = None
    queue_share: Annotated[
        Fraction | None,
        Field(
            description=(
                "The class is let in while the queue is filled less than this, by count and by "
                "predicted wait. Left away: 1 for `urgent` and `premium`, 0.9 for `normal`, 0.5 "
                "for `batch`."
            )
        ),
    ] = None


class QueueSettings(ConfigModel):
    """Requests that wait for a slot."""

    max: Annotated[
        CountOrZero,
        Field(
            description=(
                "Requests that may wait; the next is answered with 429 `queue_full`. One key or "
                "address alone has seven eighths of them; for another's its newest go."
            )
        ),
    ] = 256
    max_wait: Annotated[
        Seconds,
        Field(
            description=(
                "Longest wait; then 503 `queue_timeout`. At once, where the predicted wait is "
                "longer."
            )
        ),
    ] = 300.0
    reopen: Annotated[
        Fraction,
        Field(
            description=(
                "A class that was refused for the predicted wait is let in again when that has "
                "fallen to this share of its limit."
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
                "Requests that take no slot (tokenizing, templates, counting) that one node gets "
                "at once, of one caller half as many; the others wait as for a slot."
            )
        ),
    ] = DEFAULT_SLOTLESS
