"""What limits a load: the client, slots, prefill, decode or the network; with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gateway.tools.bench.figures import LoadFigures
from gateway.tools.bench.load import Loop
from gateway.tools.bench.target import Baseline, ServerDescription

MOST_CPU_SHARE = 0.85
"""Of one CPU; above, this program is what is measured."""

MOST_LAG_SHARE = 0.1
"""Lag of the client (95th percentile) as a share of the time between tokens, or of TTFT."""

LEAST_LAG = 0.005
"""Seconds below which the client's lag is never what limits."""


class Limit(StrEnum):
    """What limits."""

    CLIENT = "client"
    SLOTS = "slots"
    PREFILL = "prefill"
    DECODE = "decode"
    NETWORK = "network"
    ERRORS = "errors"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits, and why, in one sentence."""

    limit: Limit
    reason: str


def judge(figures: LoadFigures, server: ServerDescription, baseline: Baseline) -> Verdict:
    """What limits a load: the client if it is too slow, else the longest part of a request."""
    if exhausted := figures.errors.get("exhausted"):
        return Verdict(
            Limit.CLIENT,
            f"{exhausted} connections could not be opened for lack of descriptors or ports on this "
            "machine: raise `ulimit -n`, or measure with a smaller load",
        )
    if not figures.succeeded:
        return Verdict(Limit.ERRORS, _errors(figures))
    if (found := _client(figures)) is not None:
        return Verdict(Limit.CLIENT, found)
    parts = figures.parts
    times = {
        Limit.NETWORK: parts.network,
        Limit.SLOTS: parts.waiting,
        Limit.PREFILL: parts.prefill,
        Limit.DECODE: parts.decode,
    }
    known = {limit: seconds for limit, seconds in times.items() if seconds is not None}
    whole = sum(known.values())
    if figures.ttft is None or whole <= 0:
        return Verdict(Limit.UNKNOWN, "the response has no tokens, so its time has no known parts")
    limit = max(known, key=lambda one: known[one])
    at_a_time, few_slots = _under_way(figures), server.slots
    if limit is Limit.SLOTS and few_slots is not None and at_a_time <= few_slots:
        # All had a slot, so what they waited for was other requests' prefill.
        limit = Limit.PREFILL
        return Verdict(
            limit,
            f"first tokens come {known[Limit.SLOTS]:.3g} s later than alone, though "
            f"{few_slots} slots are enough for {at_a_time:.3g} requests at a time: the prompts of "
            "other requests are read meanwhile",
        )
    share = f"{known[limit] / whole:.0%} of a request's {whole:.3g} s"
    return Verdict(limit, _reason(limit, share, figures, server, baseline))


def _reason(
    limit: Limit,
    share: str,
    figures: LoadFigures,
    server: ServerDescription,
    baseline: Baseline,
) -> str:
    match limit:
        case Limit.NETWORK:
            return f"connecting and a round trip are {share}"
        case Limit.SLOTS:
            slot = "a slot" if server.slots is None else f"one of the {server.slots} slots"
            return (
                f"waiting for {slot} is {share}, with {_under_way(figures):.3g} requests at a time "
                f"(by {figures.parts.waiting_source})"
            )
        case Limit.PREFILL:
            length = figures.prompt_tokens
            prompt = "the prompt" if length is None else f"prompts of {length:.0f} tokens"
            return f"reading {prompt} is {share} (by {figures.parts.waiting_source})"
        case _:
            speed = figures.tokens_per_second
            each = "" if speed is None else f": a stream gets {speed.p50:.3g} tokens/s"
            alone = baseline.inter_token
            if each and alone:
                each += f", one that is alone {1 / alone:.3g}"
            return f"writing is {share}{each}"


def _client(figures: LoadFigures) -> str | None:
    """Why the client is what limits; None: it is not."""
    client = figures.client
    if client is None:
        return None
    if client.cpu_share > MOST_CPU_SHARE:
        return (
            f"the load generator used {client.cpu_share:.0%} of a CPU, and can't use more: "
            "run several, or a smaller load"
        )
    if client.held_back:
        return (
            f"{client.held_back} requests started late, since as many as --in-flight were under "
            "way (their latencies count from when they should have started)"
        )
    for name, measured in (("time between tokens", figures.inter_token), ("TTFT", figures.ttft)):
        lag = client.lag.p95
        if measured is not None and lag > max(LEAST_LAG, MOST_LAG_SHARE * measured.p50):
            return (
                f"the load generator's own lag ({lag * 1000:.3g} ms at the 95th percentile) is "
                f"more than {MOST_LAG_SHARE:.0%} of the median {name} "
                f"({measured.p50 * 1000:.3g} ms): other work holds up this machine, or the "
                "load is too large for one process"
            )
    return None


def _under_way(figures: LoadFigures) -> float:
    """Requests that were under way at a time, on average: by Little's law in the open loop."""
    if figures.load.loop is Loop.CLOSED:
        return min(figures.load.level, figures.requests)
    completion = 0.0 if figures.completion is None else figures.completion.mean
    return figures.requests_per_second * completion


def _errors(figures: LoadFigures) -> str:
    if not figures.requests:
        return "no request ended"
    reason = next(iter(figures.errors))
    words = figures.details.get(reason)
    return f"every request failed, most of them with {reason}" + (f" ({words})" if words else "")
