"""The arithmetic of an answer, line by line, and what published sums of that kind leave out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gateway.tools.plan.answer import FleetOption, PlanQuestion
from gateway.tools.plan.pricing import HOURS_PER_MONTH, instances, per_million_tokens
from gateway.tools.plan.search import times_of
from gateway.tools.plan.trial import WARM_UP_SHARE, fleet_name
from gateway.tools.plan.workload import SECONDS_PER_HOUR

SAME_PRICE = 0.1
"""Two prices that differ by less are the same, as a share."""


def pure_instances(question: PlanQuestion, option: FleetOption) -> float:
    """The published sum: only written tokens, one request at a time, at full use."""
    workload = question.workload
    hours = workload.backlog_hours or 1.0
    rate = workload.requests_per_hour * workload.peak / hours
    return instances(rate, workload.completion, option.parts[0].node_type.decode_tps)


def whole_instances(offered: float) -> int:
    """Round a sum of instances up; one at least."""
    return max(1, math.ceil(offered - 1e-9))


def explain(question: PlanQuestion, option: FleetOption) -> Iterator[tuple[str, str]]:
    """What each figure of a fleet comes from: a word and a line each."""
    workload = question.workload
    node_type = option.parts[0].node_type
    times = times_of(node_type, workload)
    if workload.backlog_hours is None:
        yield (
            "arrivals",
            (
                f"{workload.requests_per_hour:,.10g} an hour x peak {workload.peak:g} / 3,600 = "
                f"{workload.arrivals:.4g} a second"
            ),
        )
    else:
        yield (
            "arrivals",
            (
                f"{workload.requests_per_hour:,.10g} at once / {workload.backlog_hours:g} h / 3,600"
                f" = {workload.arrivals:.4g} a second to be done"
            ),
        )
    pure = pure_instances(question, option)
    whole = whole_instances(pure)
    yield (
        "pure sum",
        (
            f"{workload.arrivals:.4g} a second x {workload.completion:g} tokens / "
            f"{node_type.decode_tps:g} tokens/s = {pure:.2f}: {whole} "
            "instances of one slot"
        ),
    )
    yield (
        "left out",
        (
            f"reading the prompts, and waiting: {whole} would be used to {pure / whole:.0%}, and "
            "at full use the queue grows without end"
        ),
    )
    if workload.repeat:
        yield (
            "cached",
            (
                f"{workload.repeat:.0%} of {workload.prompt:g} prompt tokens repeat: "
                f"{workload.uncached:g} are read"
            ),
        )
    if times.slots == 1:
        capacity = f"1 / {times.full:.2f} s"
    else:
        yield (
            "slots share",
            (
                f"{times.slots} x {times.reading:.2f} s of reading, one after the other, + "
                f"{times.writing:.2f} s of writing x (1 + {times.batch_cost:g} x {times.slots - 1})"
                f" = {times.full:.2f} s with all busy, {times.alone:.2f} s alone"
            ),
        )
        capacity = f"{times.slots} slots / {times.full:.2f} s"
    yield (
        "one server",
        (
            f"{capacity} = {times.capacity:.4g} requests a second, "
            f"{times.capacity * SECONDS_PER_HOUR:,.0f} an hour"
        ),
    )
    servers = "" if node_type.servers == 1 else f" x {node_type.servers} servers"
    if len(option.parts) == 1 and workload.backlog_hours is None:
        yield (
            "use",
            (
                f"{workload.arrivals:.4g} / ({option.parts[0].count}{servers} x "
                f"{times.capacity:.4g}) = {option.use:.0%} of the capacity"
            ),
        )
        yield from _waits(option)
    yield from _simulated(question, option)
    yield from _price(question, option)


def _waits(option: FleetOption) -> Iterator[tuple[str, str]]:
    found = option.found
    if found is None or math.isinf(found.estimate.wait):
        return
    guess = found.estimate
    yield (
        "estimate",
        (
            f"Erlang C {guess.erlang_c:.3g}; with speeds that are shared {guess.waiting_share:.3g} "
            f"of the requests wait; Allen-Cunneen with Cs² {guess.service_scv:.2f}: "
            f"{guess.wait:.3g} s in the mean"
        ),
    )


def _simulated(question: PlanQuestion, option: FleetOption) -> Iterator[tuple[str, str]]:
    trial = option.trial
    if trial is None:
        return
    if question.workload.backlog_hours is not None:
        yield (
            "simulator",
            (
                f"{trial.requests:,} requests through the real scheduler: all "
                f"{question.workload.requests_per_hour:,.10g} done in {trial.seconds / 3600:.2f} h"
            ),
        )
        return
    yield (
        "simulator",
        (
            f"{trial.requests:,} requests through the real scheduler ({WARM_UP_SHARE:.0%} to warm "
            f"up before): mean wait {trial.wait.mean:.3g} s ± {trial.wait_error:.2g}, completion "
            f"{trial.completion.mean:.3g} s ± {trial.completion_error:.2g} (95 %)"
        ),
    )


def _price(question: PlanQuestion, option: FleetOption) -> Iterator[tuple[str, str]]:
    price, workload = option.price, question.workload
    if price.per_hour is None:
        yield "price", "unknown: the node has no price (--price-per-hour)"
        return
    hours = " + ".join(
        f"{part.count} x {part.node_type.price.per_hour or 0.0:.4g}" for part in option.parts
    )
    extra = ""
    tokens = price.per_hour - price.electricity_per_hour
    for part in option.parts:
        tokens -= part.count * (part.node_type.price.per_hour or 0.0)
    if tokens > 1e-12:
        extra += f" + {tokens:.4g} for tokens"
    if price.electricity_per_hour:
        extra += f" + {price.electricity_per_hour:.4g} of electricity"
    yield (
        "price",
        (
            f"{hours}{extra} = {price.per_hour:.4g} an hour x {HOURS_PER_MONTH:g} = "
            f"{price.month or 0.0:,.2f} a month; all machines run, used or not"
        ),
    )
    if price.per_million is not None:
        yield (
            "per token",
            f"{price.per_million:.4g} a million tokens, prompts included"
            + ("" if workload.peak == 1 else ", of the mean hour")
            + _least_per_million(option),
        )


def _least_per_million(option: FleetOption) -> str:
    node_type = option.parts[0].node_type
    hour = node_type.price.per_hour
    if not hour:
        return ""
    least = per_million_tokens(hour / node_type.servers, node_type.decode_tps)
    return (
        f"; one slot that always writes {node_type.decode_tps:g} tokens/s at "
        f"{hour / node_type.servers:.4g} an hour makes {least:.3g} a million written"
    )


def contradiction(per_hour: float, tokens_per_second: float, claimed: float) -> str:
    """What is wrong with a price of a million tokens that is claimed of a machine; or nothing."""
    least = per_million_tokens(per_hour, tokens_per_second)
    if abs(claimed - least) <= SAME_PRICE * least:
        return ""
    return (
        f"{tokens_per_second:g} tokens/s at {per_hour:.2f} an hour are {least:.3g} a million "
        f"tokens, not {claimed:.2f}: a million take {1e6 / tokens_per_second / 3600:.1f} hours"
    )


def headline(option: FleetOption) -> str:
    """The answer in a line."""
    price = option.price
    cost = "price unknown" if price.month is None else f"{price.month:,.2f} a month"
    unsure = "" if option.trial is not None else " or more (estimated, not simulated)"
    return f"{fleet_name(option.parts)}{unsure}: {cost}"
