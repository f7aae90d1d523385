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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.config.hybrid import SpillSettings
    from gateway.config.node import NodeSpec

GRANULES = 512
"""Parts that a window is kept in: what happened in one part leaves the window together."""

TEMPLATE_TOKENS = 512
"""Tokens that a chat template may add to a prompt by itself. A prompt has no more tokens than
bytes (byte-level vocabularies), and the JSON around each message outweighs its role's tokens."""


class SlidingSum:
    """What was added within the last `span` seconds, in bounded memory.

    Exact while no two additions fall into one part of the window. Where they do, they leave
    together: with the last of them (`late`: never too low) or the first (never too high).
    """

    def __init__(self, span: float, *, late: bool) -> None:
        self.span = span
        self._late = late
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
        if parts and now - self._newest < self.span / GRANULES:
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


class Reservation:
    """A share of the budget that one request holds until it is over."""

    __slots__ = ("_budget", "most")

    def __init__(self, budget: Budget, most: float) -> None:
        self._budget: Budget | None = budget
        self.most = most

    def settle(self, cost: float, *, happened: bool, now: float) -> None:
        """It came to `cost`; `happened`: it counts as one of the requests that spilled over.

        Only the first call counts, of this and `cancel`.
        """
        if self._budget is not None:
            budget, self._budget = self._budget, None
            budget.settled(self.most, cost, happened=happened, now=now)

    def cancel(self) -> None:
        """It never went out."""
        if self._budget is not None:
            budget, self._budget = self._budget, None
            budget.settled(self.most, 0.0, happened=False, now=-math.inf)


@dataclass(slots=True)
class Budget:
    """The budget of one gateway. It outlives reloads: `configure` changes its bounds alone.

    `share` holds whenever a request is let in: of the requests within the window that ends then,
    this one included, no more than that share spilled over. `money` holds over every window: what
    was paid in it is at most the budget and one request.
    """

    rules: SpillSettings
    asked: SlidingSum = field(init=False)
    spilled: SlidingSum = field(init=False)
    paid: SlidingSum = field(init=False)
    open: int = 0
    """Reservations that are out."""
    _reserved: float = 0.0
    _boundless: int = 0
    """How many of them have no bound."""

    def __post_init__(self) -> None:
        span = self.rules.window
        self.asked = SlidingSum(span, late=False)
        self.spilled = SlidingSum(span, late=True)
        self.paid = SlidingSum(span, late=True)

    def configure(self, rules: SpillSettings) -> None:
        """Other bounds; what was spent and what is reserved stays counted."""
        self.rules = rules
        for kept in (self.asked, self.spilled, self.paid):
            kept.resize(rules.window)

    @property
    def money(self) -> float:
        """What may be paid within one window; infinity: no bound."""
        rules = self.rules
        if rules.money_per_hour is None:
            return math.inf
        return rules.money_per_hour * rules.window / 3600

    @property
    def reserved(self) -> float:
        """The most that the requests which are out can cost."""
        return math.inf if self._boundless else self._reserved

    def arrived(self, now: float) -> None:
        """A request of a class that may spill over: each one earns a share."""
        self.asked.add(now, 1.0)

    def affordable(self, now: float) -> bool:
        """Whether one more may spill over."""
        share = self.rules.share
        if share is not None:
            spilled = self.spilled.value(now) + self.open + 1
            if spilled > share * self.asked.value(now) + 1e-9:
                return False
        money = self.money
        return money == math.inf or self.paid.value(now) + self.reserved < money

    def reserve(self, now: float, most: float) -> Reservation | None:
        """Let one more spill over that costs `most` at most; None: the budget is used up."""
        if not self.affordable(now):
            return None
        if math.isnan(most) or most < 0:
            most = math.inf
        self.open += 1
        if most == math.inf:
            self._boundless += 1
        else:
            self._reserved += most
        return Reservation(self, most)

    def settled(self, most: float, cost: float, *, happened: bool, now: float) -> None:
        """A reservation of `most` is over; called by it, once."""
        self.open -= 1
        if most == math.inf:
            self._boundless -= 1
        else:
            self._reserved -= most
        if self.open == 0:
            self._reserved = 0.0  # what rounding left
        if happened:
            self.spilled.add(now, 1.0)
        if cost > 0:
            self.paid.add(now, cost)


def price(
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


def most(
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
        return price(spec, total, prompt=0, completion=0, slots=slots, seconds=seconds)
    width = max(1, slots)
    room = math.inf if context is None else float(context)
    answer = min(math.inf if max_tokens is None else float(max_tokens), room)
    prompt = min(float(prompt_bytes + TEMPLATE_TOKENS), room * width)
    rate = spec.cost_per_million_tokens
    # Nothing times infinity is nothing here: an answer that costs nothing may be of any length.
    answers = answer * width * rate.completion if rate.completion else 0.0
    prompts = prompt * rate.prompt if rate.prompt else 0.0
    return (prompts + answers) / 1_000_000
