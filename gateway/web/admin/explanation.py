"""Sentences that explain decisions to people, from the figures of `why.py` as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.scheduling.candidates import FAILURE_PENALTY, SAME_HOST_PENALTY, TRIAL_BONUS

Json = dict[str, Any]

LEAST_DIFFERENCE = 0.05
"""Share of the better cost by which two nodes differ at least for one reason to be named."""

LEAST_CACHE_MISS, LEAST_CACHE_MISS_SHARE = 64, 0.2
"""Tokens, and share of the prompt, by which the cache must have been mistaken to be named."""

_OUTCOMES = {
    "ok": "answered",
    "client_closed": "was left by its client",
    "cancelled": "was cancelled",
    "yielded": "gave up its slot to a higher class",
    "moved": "was moved away by a drain",
    "pool_full": "was ended by the node, whose slots had no room left for their tokens together",
    "unknown": "went on under an earlier process of this gateway, which told no more of it",
}

_FALLBACKS = {
    "gpu_full": "the GPU nodes were full",
    "gpu_down": "no GPU node was up",
    "gpu_limited": "the GPU endpoint wants no work for a while (429, or 402: out of credit)",
    "gpu_failed": "a GPU node had failed it",
    "cpu_wait": "the CPU nodes had no room soon enough, and the budget allowed it",
    "cpu_down": "no CPU node was up",
}


def of_doubts(penalty: float, own_penalty: float, wake: float) -> list[str]:
    """Why a node looked slower, or faster, than by its speed; penalties in seconds.

    `wake`: seconds that a node that sleeps takes to wake up.
    """
    found = [f"sleeps, and takes about {_seconds(wake)} to wake up"] if wake else []
    if penalty >= FAILURE_PENALTY:
        failures = round(penalty / FAILURE_PENALTY)
        found.append(
            "failed its last request" if failures == 1 else f"failed its last {failures} requests"
        )
    elif penalty == -TRIAL_BONUS:
        found.append("was ejected, and needs one request on trial")
    if own_penalty >= SAME_HOST_PENALTY / 2:
        found.append("shares a host with a node that failed this request, or is on trial")
    elif own_penalty < 0:
        found.append("is explored, or served the session's last request")
    return found


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 or not value else f"{value:.2f} s"


def of_request(request: Json) -> str:
    """The whole story in one or two sentences."""
    decisions, waiting, outcome = request["decisions"], request["waiting"], request["outcome"]
    grants = [one for one in decisions if one["kind"] == "granted"]
    if waiting is not None:
        return of_waiting(waiting)
    parts = []
    if grants:
        parts.append(grants[-1]["summary"])
        if len(grants) > 1:
            parts.insert(0, f"{len(grants)} attempts; about the last:")
    elif decisions:
        parts.append(decisions[-1]["summary"])
    elif request["parts"]:
        parts.append(
            "It has several prompts, which ran as requests of their own: ask for one of the parts."
        )
    elif outcome is not None and outcome["reason"]:
        parts.append(
            f"It was refused before it came to the scheduler: {outcome['status']} "
            f"{outcome['reason']}."
        )
    elif request["state"] == "running":
        parts.append("It runs, and the decision about it is no longer remembered.")
    else:
        parts.append("The decision about it is no longer remembered.")
    return " ".join(parts)


def of_waiting(waiting: Json) -> str:
    """Why a request waits."""
    place = f"place {waiting['position']} of the queue" if waiting["position"] else "the queue"
    start = waiting["expected_start"]
    when = (
        "it is not known when it starts" if start is None else f"starts in about {_seconds(start)}"
    )
    nodes = waiting["nodes"]
    if waiting["deferred_to"] is not None:
        why = (
            f"It waits for {waiting['deferred_to']}, which has its prompt cached and is expected "
            "to finish it sooner than a node that is free"
        )
    elif not nodes:
        why = "No node that could serve it is up"
    elif any(not one["free_in"] for one in nodes if one["free_in"] is not None):
        why = "A slot is free, but others go before it, or the slot is kept for other classes"
    elif any(one["pool"] and one["slots_busy"] < one["slots_total"] for one in nodes):
        needed = waiting["tokens_needed"]
        why = "A slot is free, but in the pool of tokens that the node's slots share there is no "
        why += "room for it: it is to run alone" if needed is None else f"room for {needed}"
    else:
        why = f"None of the {waiting['nodes_alive']} nodes that could serve it has a free slot"
        if waiting["nodes_alive"] == 1:
            why = f"The only node that could serve it, {nodes[0]['name']}, has no free slot"
    return f"{why}. {place[:1].upper()}{place[1:]}; {when}."


def of_decision(decision: Json) -> str:
    """One decision in one or two sentences."""
    return _BY_KIND[decision["kind"]](decision)


def _of_queueing(queueing: Json) -> str:
    text = "No node had room for it: it was queued"
    if queueing["ahead"] is not None:
        text += f" behind {queueing['ahead']} of its class or above"
    predicted = queueing["predicted_wait"]
    text += "" if predicted is None else f", with {_seconds(predicted)} to wait as predicted"
    return f"{text}; it waited {_seconds(queueing['waited'])}."


def _of_refusal(refusal: Json) -> str:
    text = f"It was refused with {refusal['status']} {refusal['code']}"
    # Messages are not kept over a restart.
    return f"{text}: {refusal['message']}" if refusal["message"] else f"{text}."


def _of_grant(grant: Json) -> str:
    chosen, nodes = grant["node"], grant["nodes"]
    text = _why_chosen(chosen, nodes, grant)
    if grant["failed_nodes"]:
        text = f"After {', '.join(grant['failed_nodes'])} had failed it, {text}"
    if grant["resumes"]:
        text += " It goes on there with the response that another node had begun."
    if grant["deferral"] is not None and grant["deferral"]["node"] == chosen:
        deferral = grant["deferral"]
        text += (
            " It waited for this node though another was free: "
            f"{_seconds(deferral['expected_seconds'])} with the wait, against "
            f"{_seconds(deferral['expected_seconds_at_once'])}, since "
            f"{deferral['cached_tokens']} tokens of its prompt are cached here."
        )
    if grant["fallback"]:
        text += f" It left its class's tier, since {_FALLBACKS[grant['fallback']]}."
    if any(one["chosen"] and not one["measured"] for one in nodes):
        text += " The node's speed was not measured yet: the figures are guesses."
    return f"{text} {_came_of(grant)}"


def _why_chosen(chosen: str, nodes: list[Json], grant: Json) -> str:
    if len(nodes) < 2:
        others = sum(
            count for reason, count in grant["not_listed"].items() if reason != "not_candidates"
        )
        if others:
            return f"{chosen} was the only one with room of the {others + 1} nodes open to it."
        return f"{chosen} is the only node open to it, by its model, tier and pool."
    if not grant["by_cost"]:
        return f"{chosen} was next by the setting 'policy', which compares no costs."
    mine = next(one for one in nodes if one["chosen"])
    other = min(
        (one for one in nodes if not one["chosen"]), key=lambda one: one["expected_seconds"]
    )
    cost, next_cost = mine["expected_seconds"], other["expected_seconds"]
    if next_cost == cost:
        return (
            f"{chosen} was taken at random among nodes that cost the same, {_seconds(cost)} with "
            "what the request costs its neighbours."
        )
    text = (
        f"{chosen} was expected to cost least: {_seconds(cost)}, against {_seconds(next_cost)} on "
        f"{other['name']}"
    )
    reason = _main_reason(mine, other)
    return f"{text}, mostly because {reason}." if reason else f"{text}."


def _main_reason(mine: Json, other: Json) -> str | None:
    """The term that makes the most of the difference, in words; None: none stands out."""
    gains = {name: other["terms"][name] - mine["terms"][name] for name in mine["terms"]}
    term = max(gains, key=lambda name: gains[name])
    if gains[term] <= LEAST_DIFFERENCE * mine["expected_seconds"]:
        return None
    return _REASONS[term](mine, other)


def _of_reading(mine: Json, other: Json) -> str:
    if mine["cached_tokens"] > other["cached_tokens"]:
        return f"it had {mine['cached_tokens']} tokens of the prompt cached"
    return (
        f"it reads prompts faster ({mine['prefill_tps']:.0f} tokens/s against "
        f"{other['prefill_tps']:.0f})"
    )


def _of_doubt(mine: Json, other: Json) -> str:
    if other["doubts"]:
        return f"{other['name']} {other['doubts'][0]}"
    return f"it {mine['doubts'][0]}" if mine["doubts"] else "the other was in doubt"


_REASONS: dict[str, Callable[[Json, Json], str]] = {
    "queue": lambda _, other: (
        f"{other['name']} had other prompts to read for {_seconds(other['terms']['queue'])}"
    ),
    "reading": _of_reading,
    "writing": lambda mine, other: (
        f"it writes faster ({mine['decode_tps']:.1f} tokens/s alone against "
        f"{other['decode_tps']:.1f})"
    ),
    "neighbours": lambda mine, other: (
        f"it ran {mine['slots_busy']} others and {other['name']} {other['slots_busy']}, which slow "
        "each other"
    ),
    "doubt": _of_doubt,
}


def _came_of(grant: Json) -> str:
    actual, predicted = grant["actual"], grant["predicted"]
    outcome = actual["outcome"]
    if outcome is None:
        return f"It runs there for {_seconds(actual['seconds'])} now."
    word = _OUTCOMES.get(outcome, f"failed ({outcome})")
    text = f"It {word} after {_seconds(actual['seconds'])}"
    if outcome == "ok":
        text += f" ({_seconds(predicted['seconds'])} predicted)"
    expected, cached = predicted["cached_tokens"], actual["cached_tokens"]
    if cached is not None and actual["reported"]:
        missed = max(LEAST_CACHE_MISS, LEAST_CACHE_MISS_SHARE * (actual["prompt_tokens"] or 0))
        if abs(expected - cached) >= missed:
            text += (
                f"; {expected} tokens of the prompt were expected to be cached, and {cached} were"
            )
    return f"{text}."


_BY_KIND: dict[str, Callable[[Json], str]] = {
    "queued": _of_queueing,
    "refused": _of_refusal,
    "granted": _of_grant,
}
