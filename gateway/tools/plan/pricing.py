"""What machines cost: sums by the hour, the month and the token, with electricity.

Sums that are often published come out of these functions, and so does what they leave out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

HOURS_PER_MONTH = 730.0
"""365 days of 24 hours, by 12."""

SECONDS_PER_HOUR = 3600.0

MILLION = 1_000_000

MOST_PRICE = 1e9


def instances(requests_per_hour: float, tokens: float, tokens_per_second: float) -> float:
    """Instances that write so many tokens in time, at full use and each one request at a time.

    The published sum: round it up. It leaves out the reading of prompts, slots that share a node,
    and that requests wait long before an instance is fully used.
    """
    return requests_per_hour * tokens / tokens_per_second / SECONDS_PER_HOUR


def per_month(per_hour: float) -> float:
    """What a machine costs that runs all month."""
    return per_hour * HOURS_PER_MONTH


def price_by_share(parts: Sequence[tuple[float, float]]) -> float:
    """An hour's price, weighted by the shares of requests: `(share, price per hour)` each.

    It would be the bill if each machine were paid only while requests of its own run. See
    `price_of_all` for machines that run all the time.
    """
    return sum(share * price for share, price in parts)


def price_of_all(parts: Sequence[tuple[float, float]]) -> float:
    """An hour's price of the same machines while all of them run."""
    return sum(price for _, price in parts)


def per_million_tokens(per_hour: float, tokens_per_second: float) -> float:
    """Price of a million tokens from a machine that writes all the time: its least."""
    return per_hour / (tokens_per_second * SECONDS_PER_HOUR) * MILLION


@dataclass(frozen=True, slots=True)
class NodePrice:
    """What one node costs, in the catalogue's currency; None: not known."""

    per_hour: float | None = None
    per_million_prompt: float = 0.0
    """Of an endpoint that is paid by tokens."""
    per_million_completion: float = 0.0
    watts: float = 0.0
    """While all its slots are busy."""
    idle_watts: float = 0.0

    def electricity(self, use: float, per_kwh: float) -> float:
        """Price of an hour's electricity, when so large a share of its capacity is used."""
        watts = self.idle_watts + (self.watts - self.idle_watts) * min(max(use, 0.0), 1.0)
        return watts / 1000.0 * per_kwh


@dataclass(frozen=True, slots=True)
class FleetPrice:
    """What a fleet costs. None: the price of a node is not known."""

    per_hour: float | None
    """All together, in a mean hour."""
    electricity_per_hour: float
    """Part of it."""
    per_million: float | None
    """Of the prompt and completion tokens that are served."""

    @property
    def month(self) -> float | None:
        """Of a month in which it runs all the time."""
        return None if self.per_hour is None else per_month(self.per_hour)

    def as_dict(self) -> dict[str, float | None]:
        """For scripts."""
        return {
            "per_hour": self.per_hour,
            "per_month": self.month,
            "per_million_tokens": self.per_million,
            "electricity_per_hour": self.electricity_per_hour,
        }


@dataclass(frozen=True, slots=True)
class PricedPart:
    """Equal nodes of a fleet, and what they serve in a mean hour."""

    price: NodePrice
    nodes: int
    use: float
    """Share of their capacity."""
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0


def fleet_price(parts: Sequence[PricedPart], per_kwh: float) -> FleetPrice:
    """What a fleet costs. The hours of a node are paid whether it works or not."""
    tokens = sum(part.prompt_tokens + part.completion_tokens for part in parts)
    electricity = math.fsum(
        part.nodes * part.price.electricity(part.use, per_kwh) for part in parts
    )
    if any(part.price.per_hour is None for part in parts):
        return FleetPrice(None, electricity, None)
    hour = electricity
    for part in parts:
        hour += part.nodes * (part.price.per_hour or 0.0)
        hour += part.prompt_tokens * part.price.per_million_prompt / MILLION
        hour += part.completion_tokens * part.price.per_million_completion / MILLION
    return FleetPrice(hour, electricity, hour / tokens * MILLION if tokens > 0 else None)
