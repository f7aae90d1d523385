"""Settings of a fleet with CPU and GPU nodes: which classes prefer the GPU or spill over to it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from gateway.config.fields import (
    ConfigModel,
    Fraction,
    Money,
    Seconds,
    SecondsOrZero,
    TypeLabel,
    as_list,
    validation_error,
)
from gateway.config.listeners import PriorityName


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
                "At most this much an hour, in the currency of the nodes' costs, reckoned over "
                "`window`: 2 with a window of 30m is 1 in any 30 minutes."
            )
        ),
    ] = None
    window: Annotated[
        Seconds, Field(description="Time over which the budget is reckoned.", validate_default=True)
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
