"""What may be spent on spill-over: kept on what was reserved, settled by what was used.

A request reserves the most that it can cost before it goes out, and pays what it did cost when it
is over. It is let in while what was paid within the window and what is reserved is below the
budget. So the last one let in may pass the budget, by its own cost and no more: all the others
were counted at what they cost, or at more. One whose cost has no bound reserves infinity, and
nothing else is let in beside it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from gateway.config.node import NodeSpec
from gateway.config.tiers import SpillSettings

WINDOW_PARTS = 512
"""Parts that a window is kept in: what happened in one part leaves the window together."""

TEMPLATE_TOKENS = 512
"""Tokens that a chat template may add to a prompt by itself. A prompt has no more tokens than
bytes (byte-level vocabularies), and the JSON around each message outweighs its role's tokens."""


class SlidingSum:
    """What was added within the last `span` seconds, in bounded memory.

    Exact while no two additions fall into one part of the window. Where they do, they leave
    together: with the last of them (`late`: never too low) or the first (never too high).
    """

    def __init__(self, span: float, *, overestimate: bool) -> None:
        self.span = span
        self._late = overestimate
        self._parts: deque[tuple[float, float]] = deque()
        """Of each part the time that it leaves by, its last or first addition's, and its sum."""
        self._newest = self._latest = -math.inf
        """When the newest part began, and when the last addition was."""
        self._sum = 0.0

    def add(self, now: float, amount: float) -> None:
        """Count `amount` from now on; a time that lies before the last one counts as that one."""
        now = max(now, self._latest)
        self._latest = now
        self.value(now)
        parts = self._parts
        if parts and now - self._newest < self.span / WINDOW_PARTS:
            when, before = parts[-1]
            parts[-1] = (now if self._late else when, before + amount)
        else:
            parts.append((now, amount))
            self._newest = now
        self._sum += amount

    def value(self, now: float) -> float:
        """The sum over the window that ends now."""
        parts = self._parts
        if parts and parts[0][0] <= now - self.span:
            while parts and parts[0][0] <= now - self.span:
                parts.popleft()
            # Anew, so that no rounding stays behind.
            self._sum = math.fsum(amount for _, amount in parts)
        return self._sum

    def resize(self, span: float) -> None:
        """Look back so far from now on; what has left a shorter window does not come back."""
        self.span = span


class SpillReservation:
    """A share of the budget that one request holds until it is over."""

    __slots__ = ("_budget", "most_cost")

    def __init__(self, budget: SpillBudget, most_cost: float) -> None:
        self._budget: SpillBudget | None = budget
        self.most_cost = most_cost

    def settle(self, cost: float, *, happened: bool, now: float) -> None:
        """It came to `cost`; `happened`: it counts as one of the requests that spilled over.

        Only the first call counts, of this and `cancel`.
        """
        if self._budget is not None:
            budget, self._budget = self._budget, None
            budget.settled(self.most_cost, cost, happened=happened, now=now)

    def cancel(self) -> None:
        """It never went out."""
        if self._budget is not None:
            budget, self._budget = self._budget, None
            budget.settled(self.most_cost, 0.0, happened=False, now=-math.inf)


@dataclass(slots=True)
class SpillBudget:
    """The budget of one gateway. It outlives reloads: `configure` changes its bounds alone.

    `share` holds whenever a request is let in: of the requests within the window that ends then,
    this one included, no more than that share spilled over. `money` holds over every window: what
    was paid in it is at most the budget and one request.
    """

    settings: SpillSettings
    arrivals: SlidingSum = field(init=False)
    spilled: SlidingSum = field(init=False)
    paid: SlidingSum = field(init=False)
    outstanding: int = 0
    """Reservations that are out."""
    _reserved: float = 0.0
    _boundless: int = 0
    """How many of them have no bound."""

    def __post_init__(self) -> None:
        span = self.settings.window
        self.arrivals = SlidingSum(span, overestimate=False)
        self.spilled = SlidingSum(span, overestimate=True)
        self.paid = SlidingSum(span, overestimate=True)

    def configure(self, settings: SpillSettings) -> None:
        """Other bounds; what was spent and what is reserved stays counted."""
        self.settings = settings
        for kept in (self.arrivals, self.spilled, self.paid):
            kept.resize(settings.window)

    @property
    def money_limit(self) -> float:
        """What may be paid within one window; infinity: no bound."""
        rules = self.settings
        if rules.money_per_hour is None:
            return math.inf
        return rules.money_per_hour * rules.window / 3600

    @property
    def reserved(self) -> float:
        """The most that the requests which are out can cost."""
        return math.inf if self._boundless else self._reserved

    def arrived(self, now: float) -> None:
        """A request of a class that may spill over: each one earns a share."""
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
        """Let one more spill over that costs `most` at most; None: the budget is used up."""
        if not self.can_spill(now):
            return None
        if math.isnan(most_cost) or most_cost < 0:
            most_cost = math.inf
        self.outstanding += 1
        if most_cost == math.inf:
            self._boundless += 1
        else:
            self._reserved += most_cost
        return SpillReservation(self, most_cost)

    def settled(self, most_cost: float, cost: float, *, happened: bool, now: float) -> None:
        """A reservation of `most` is over; called by it, once."""
        self.outstanding -= 1
        if most_cost == math.inf:
            self._boundless -= 1
        else:
            self._reserved -= most_cost
        if self.outstanding == 0:
            self._reserved = 0.0  # what rounding left
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
    """What tokens, or a share of a node's time, cost there, in the settings' currency.

    `slots` of its `total` were held for so many `seconds`.
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
    """The most that a request can cost there; infinity where nothing bounds it.

    `max_tokens` and `context` are of one slot; `seconds` is the longest that it may run.
    """
    if spec.cost_per_million_tokens is None:
        return cost_of(spec, total, prompt=0, completion=0, slots=slots, seconds=seconds)
    width = max(1, slots)
    room = math.inf if context is None else float(context)
    answer = min(math.inf if max_tokens is None else float(max_tokens), room)
    prompt = min(float(prompt_bytes + TEMPLATE_TOKENS), room * width)
    rate = spec.cost_per_million_tokens
    # Nothing times infinity is nothing here: an answer that costs nothing may be of any length.
    answers = answer * width * rate.completion if rate.completion else 0.0
    prompts = prompt * rate.prompt if rate.prompt else 0.0
    return (prompts + answers) / 1_000_000
