"""Queueing formulas: how long requests wait for a slot, before anything is simulated.

Pure functions. Times are seconds, rates are requests per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable

MOST_SERVERS = 1_000_000
"""More servers than this are a mistake; the loops below take a second for them."""


def erlang_c(servers: int, offered: float) -> float:
    """Probability that a request has to wait in an M/M/c queue.

    `offered`: arrival rate times mean service time, in erlangs. 1 from `servers` erlangs on. By the
    recursion of Erlang B, which can't overflow: B(n) = a B(n-1) / (n + a B(n-1)), and
    C = B / (1 - (1 - B) a / c). Source: A. K. Erlang, "Solution of some problems in the theory of
    probabilities of significance in automatic telephone exchanges" (1917); the form here: Cooper,
    "Introduction to Queueing Theory" (1981), chapter 3. Raises ValueError.
    """
    _check_servers(servers)
    if not 0 <= offered < math.inf:
        raise ValueError("the offered load must be a finite number of erlangs, 0 or more")
    if offered >= servers:
        return 1.0
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    return blocked / (1.0 - (1.0 - blocked) * offered / servers)


def busy_probability(servers: int, arrivals: float, rate: Callable[[int], float]) -> float:
    """Probability that a request finds all servers busy, where speed depends on their number.

    Erlang C for a birth-death process: `rate(n)` is the number of requests that end per second
    while n are served, for n from 1 to `servers`; it stays `rate(servers)` while more wait. With
    `rate(n) = n / service` it is `erlang_c`. 1 where the arrivals are not fewer than
    `rate(servers)`. Source: the state probabilities of birth-death processes, p(n) proportional to
    the product of arrivals / rate(k); Kleinrock, "Queueing Systems", volume 1 (1975), section 3.1.
    """
    _check_servers(servers)
    most = rate(servers)
    if arrivals >= most:
        return 1.0
    if arrivals <= 0:
        return 0.0
    # Weights relative to that of the state before; scaled, so that none can overflow.
    total, weight = 1.0, 1.0
    for number in range(1, servers + 1):
        factor = arrivals / rate(number)
        weight *= factor
        if weight > 1e200:
            total, weight = total / weight, 1.0
        if number < servers:
            total += weight
    waiting = weight / (1.0 - arrivals / most)
    return waiting / (total + waiting)


def allen_cunneen(
    probability: float,
    arrivals: float,
    most_rate: float,
    *,
    arrival_scv: float = 1.0,
    service_scv: float = 1.0,
) -> float:
    """Mean wait for a server, in seconds, of a queue with any arrivals and any service times.

    `probability`: that a request waits, by `erlang_c` or `busy_probability`; `most_rate`: requests
    that all servers end per second. The squared coefficients of variation are variance / mean²: 1
    for Poisson arrivals and exponential times, 0 for regular ones. Infinite without spare
    capacity. Source: Allen, "Probability, Statistics, and Queueing Theory" (1978), section 5.5:
    Wq = C / (c µ - λ) x (Ca² + Cs²) / 2; exact for M/M/c, and for M/G/1 (Pollaczek-Khinchine).
    """
    if arrivals >= most_rate:
        return math.inf
    return probability / (most_rate - arrivals) * (arrival_scv + service_scv) / 2.0


def lognormal_scv(sigma: float, most_factor: float = math.inf) -> tuple[float, float]:
    """Mean and squared coefficient of variation of log-normal lengths that are cut off.

    Of a mean of 1 before the cut, at `most_factor`. E[min(X, k)^m] is that of the log-normal below
    k, and k^m above it.
    """
    location = -(sigma**2) / 2
    if most_factor == math.inf:
        return 1.0, math.exp(sigma**2) - 1.0
    if sigma == 0:
        return min(1.0, most_factor), 0.0
    cut = (math.log(most_factor) - location) / sigma
    above = 1.0 - _normal(cut)
    first, second = (
        math.exp(power * location + (power * sigma) ** 2 / 2) * _normal(cut - power * sigma)
        + most_factor**power * above
        for power in (1, 2)
    )
    return first, second / first**2 - 1.0


def _normal(value: float) -> float:
    """The normal distribution function."""
    return 0.5 * math.erfc(-value / math.sqrt(2))


def _check_servers(servers: int) -> None:
    if not 1 <= servers <= MOST_SERVERS:
        raise ValueError(f"servers must be from 1 to {MOST_SERVERS}")
