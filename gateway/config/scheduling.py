"""Settings of scheduling: the queue with its classes, and how CPU and GPU nodes share the work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from gateway.config.fields import (
    ConfigModel,
    Count,
    CountOrZero,
    Fraction,
    Money,
    PriorityName,
    Seconds,
    SecondsOrZero,
    TypeLabel,
    as_list,
    validation_error,
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
                "Share of the slots of nodes that serve the same models, rounded down, that this "
                "class leaves free for the other classes: whole nodes where it has as many "
                "slots. For `batch` only. Unset: none."
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


class SpillSettings(ConfigModel):
    """Requests that go to a GPU node only because they would wait too long for a CPU node.

    It needs a budget: `share`, `money_per_hour`, or both, and then both hold.
    """

    after: Annotated[
        SecondsOrZero,
        Field(
            description=(
                "Requests spill over when the predicted wait for a CPU node is longer than this."
            )
        ),
    ] = 10.0
    classes: Annotated[
        tuple[PriorityName, ...],
        BeforeValidator(as_list),
        Field(description="Classes that spill over. `batch` does only if it is named here."),
        TypeLabel("list"),
    ] = ("normal",)
    share: Annotated[
        Fraction | None,
        Field(description="At most this share of these classes' requests within `window`."),
    ] = None
    money_per_hour: Annotated[
        Money | None,
        Field(
            description=(
                "At most this much an hour, in the currency of the nodes' costs, counted over "
                "`window`: 2 with a window of 30m is 1 in any 30 minutes."
            )
        ),
    ] = None
    window: Annotated[
        Seconds, Field(description="Time over which the budget is counted.", validate_default=True)
    ] = 3600.0

    @field_validator("window")
    @classmethod
    def _has_a_budget(cls, window: float, info: ValidationInfo) -> float:
        named = {"share", "money_per_hour"} & info.data.keys()
        if len(named) == 2 and all(info.data[name] is None for name in named):
            raise validation_error(
                "the spill-over has no budget",
                "set `share` (1 for no bound) or `money_per_hour`",
                key="share",
            )
        return window


class HybridSettings(ConfigModel):
    """How nodes of `tier: gpu` and of `tier: cpu` share the work.

    Other classes use GPU nodes only to spill over, or for a model that no CPU node serves.
    """

    gpu_first: Annotated[
        tuple[PriorityName, ...],
        BeforeValidator(as_list),
        Field(description="Classes that go to a GPU node while one has room, else to a CPU node."),
        TypeLabel("list"),
    ] = ("urgent", "premium")
    wait: Annotated[
        SecondsOrZero,
        Field(
            description=(
                "Time that these classes wait for a full GPU node, where it is predicted to finish "
                "sooner than a CPU node."
            )
        ),
    ] = 2.0
    spill: Annotated[
        SpillSettings | None, Field(description="Spill-over to GPU nodes; unset: none.")
    ] = None

    @field_validator("spill")
    @classmethod
    def _spills_what_does_not_go_first(
        cls, spill: SpillSettings | None, info: ValidationInfo
    ) -> SpillSettings | None:
        both = set(spill.classes if spill else ()) & set(info.data.get("gpu_first", ()))
        if both:
            raise validation_error(
                f"{', '.join(sorted(both))} can't spill over, since it goes to the GPU first",
                "name it in `gpu_first` or in `spill.classes`",
            )
        return spill
