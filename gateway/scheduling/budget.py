"""The budget of spill-over: requests reserve before they go, and settle when they have ended.

A request reserves the most that it can cost, and pays what it did cost. It is admitted while what
was paid within the window plus what is reserved is below the budget. So the last one admitted may
exceed the budget, by its own cost and no more: all others were counted at their cost, or at more.
A request whose cost has no bound reserves infinity, and no other is admitted beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gateway.config.node import NodeSpec
from gateway.config.scheduling import SpillSettings
from gateway.usage.windows import SlidingSum

TEMPLATE_TOKENS = 512
"""Tokens that a chat template may add to a prompt by itself. A prompt has no more tokens than bytes
(byte-level vocabularies), and the JSON around each message has more bytes than its role has tokens.
"""


class SpillReservation:
    """The part of the budget that one request holds until it has ended."""

    __slots__ = ("_budget", "most_cost")

    def __init__(self, budget: SpillBudget, most_cost: float) -> None:
        self._budget: SpillBudget | None = budget
        self.most_cost = most_cost

    def settle(self, cost: float, *, happened: bool, now: float) -> None:
        """Pay `cost`; `happened`: it counts as a request that spilled over.

        Only the first call of this or `cancel` counts.
        """
        if self._budget is not None:
            budget, self._budget = self._budget, None
            budget.settled(self.most_cost, cost, happened=happened, now=now)

    def cancel(self) -> None:
        """The request was never sent."""
        if self._budget is not None:
            budget, self._budget = self._budget, None
            budget.settled(self.most_cost, 0.0, happened=False, now=-math.inf)


@dataclass(slots=True)
class SpillBudget:
    """The budget of one gateway. It outlives reloads: `configure` changes its limits alone.

    `share` holds whenever a request is admitted: of the requests within the window that ends then,
    this one included, no more than that share spilled over. `money_per_hour` holds over every
    window: what was paid in it is at most the budget and one request.
    """

    settings: SpillSettings
    arrivals: SlidingSum = field(init=False)
    spilled: SlidingSum = field(init=False)
    paid: SlidingSum = field(init=False)
    outstanding: int = 0
    """Reservations that are not settled."""
    _reserved: float = 0.0
    _unbounded: int = 0
    """How many of them have no bound."""

    def __post_init__(self) -> None:
        span = self.settings.window
        self.arrivals = SlidingSum(span, overestimate=False)
        self.spilled = SlidingSum(span, overestimate=True)
        self.paid = SlidingSum(span, overestimate=True)

    def configure(self, settings: SpillSettings) -> None:
        """Put other limits in force; what was paid and what is reserved stays counted."""
        self.settings = settings
        for total in (self.arrivals, self.spilled, self.paid):
            total.resize(settings.window)

    @property
    def money_limit(self) -> float:
        """What may be paid within one window; infinity: no limit."""
        settings = self.settings
        if settings.money_per_hour is None:
            return math.inf
        return settings.money_per_hour * settings.window / 3600

    @property
    def reserved(self) -> float:
        """The most that the requests with a reservation can cost together."""
        return math.inf if self._unbounded else self._reserved

    def arrived(self, now: float) -> None:
        """A request of a class that may spill over has arrived: `share` is counted of these."""
        self.arrivals.add(now, 1.0)

    def can_spill(self, now: float) -> bool:
        """Whether one more may spill over."""
        share = self.settings.share
        if share is not None:
            spilled = self.spilled.value(now) + self.outstanding + 1
            if spilled > share * self.arrivals.value(now) + 1e-9:
                return False
        money = self.money_limit
        return money == math.inf or self.paid.value(now) + self.reserved < money

    def reserve(self, now: float, most_cost: float) -> SpillReservation | None:
        """Admit one more that costs `most_cost` at most; None: the budget is used up."""
        if not self.can_spill(now):
            return None
        if math.isnan(most_cost) or most_cost < 0:
            most_cost = math.inf
        self.outstanding += 1
        if most_cost == math.inf:
            self._unbounded += 1
        else:
            self._reserved += most_cost
        return SpillReservation(self, most_cost)

    def settled(self, most_cost: float, cost: float, *, happened: bool, now: float) -> None:
        """A reservation of `most_cost` has ended; the reservation calls this once."""
        self.outstanding -= 1
        if most_cost == math.inf:
            self._unbounded -= 1
        else:
            self._reserved -= most_cost
        if self.outstanding == 0:
            self._reserved = 0.0  # Without what rounding left.
        if happened:
            self.spilled.add(now, 1.0)
        if cost > 0:
            self.paid.add(now, cost)


def cost_of(
    spec: NodeSpec,
    total: int,
    *,
    prompt: float,
    completion: float,
    slots: int,
    seconds: float,
) -> float:
    """The price of tokens, or of a share of the node's time, in the settings' currency.

    `slots` of the node's `total` were held for `seconds`.
    """
    rate = spec.cost_per_million_tokens
    if rate is not None:
        return (prompt * rate.prompt + completion * rate.completion) / 1_000_000
    return spec.cost_per_hour * min(1.0, slots / max(1, total)) * max(0.0, seconds) / 3600


def most_cost(
    spec: NodeSpec,
    total: int,
    *,
    prompt_bytes: int,
    max_tokens: int | None,
    context: int | None,
    slots: int,
    seconds: float,
) -> float:
    """The most that a request can cost on a node; infinity where nothing bounds it.

    `max_tokens` and `context` are of one slot; `seconds` is the longest that it may run.
    """
    if spec.cost_per_million_tokens is None:
        return cost_of(spec, total, prompt=0, completion=0, slots=slots, seconds=seconds)
    answers = max(1, slots)
    most_context = math.inf if context is None else float(context)
    completion = min(math.inf if max_tokens is None else float(max_tokens), most_context)
    prompt = min(float(prompt_bytes + TEMPLATE_TOKENS), most_context * answers)
    rate = spec.cost_per_million_tokens
    # 0 times infinity is 0 here: an answer that costs nothing may be of any length.
    completion_cost = completion * answers * rate.completion if rate.completion else 0.0
    prompt_cost = prompt * rate.prompt if rate.prompt else 0.0
    return (prompt_cost + completion_cost) / 1_000_000
