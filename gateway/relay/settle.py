"""What an attempt came to: who is told, what it cost and taught. Also of one cut short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.events import AttemptEnded, Bus
from gateway.fleet.fleet import Fleet
from gateway.fleet.lease import Lease
from gateway.relay import sse
from gateway.relay.attempt import Attempt
from gateway.relay.live import Live
from gateway.relay.usage import Usage, read_usage
from gateway.scheduling.scheduler import Scheduler

BLAMELESS = frozenset({"client_closed", "cancelled"})
"""Outcomes that say nothing about the node: the client left, or we ended it."""

EDGE_BYTES = 8 * 1024
"""`usage` stands within so many bytes of an answer's beginning (embeddings) or end (the rest)."""


@dataclass(slots=True)
class Settler:
    """Ends the attempts of one request, each exactly once, and writes them into its record."""

    fleet: Fleet
    scheduler: Scheduler
    bus: Bus
    live: Live
    clock: Callable[[], float]

    def finished(self, attempt: Attempt, sample: bytes) -> None:
        """A whole answer; `sample` holds its end, or all of it."""
        attempt.end()
        lease = attempt.lease
        self.fleet.succeeded(lease.node, self.clock(), lease.taken)
        self._completed(lease)
        usage = _usage(attempt, sample)
        if usage is None:
            usage = self._counted(attempt)
        elif usage.timings is not None:
            self.fleet.learn(lease.node, usage.timings)
        self._write(lease, usage)
        self.tell(attempt, "ok")

    def broken(self, attempt: Attempt, outcome: str) -> None:
        """A reply that had begun came to a bad end, or its client left: what went out counts."""
        attempt.end()
        lease = attempt.lease
        if outcome not in BLAMELESS:
            self.fleet.failed(lease.node, self.clock(), lease.taken)
        self._completed(lease)
        self._write(lease, self._counted(attempt))
        self.tell(attempt, outcome)

    def tell(self, attempt: Attempt, outcome: str) -> None:
        """One attempt is over."""
        self.live.attempt = None
        self.bus.publish(
            AttemptEnded(
                self.live.request.tag,
                attempt.lease.node.name,
                outcome,
                self.clock() - attempt.began,
                attempt.status or None,
            )
        )

    def _completed(self, lease: Lease) -> None:
        # Counting tokens, say, tells nothing of how fast slots come free.
        if lease.slots:
            self.scheduler.completed()

    def _counted(self, attempt: Attempt) -> Usage:
        """One event holds about one token; the prompt's tokens are the estimate."""
        return Usage(prompt=self.live.request.prompt_tokens, completion=attempt.events)

    def _write(self, lease: Lease, usage: Usage) -> None:
        record, spec = self.live.record, lease.node.spec
        record.prompt_tokens += usage.prompt
        record.cached_tokens += usage.cached
        record.completion_tokens += usage.completion
        if spec.cost_per_million_tokens is not None:
            rate = spec.cost_per_million_tokens
            record.cost += (
                usage.prompt * rate.prompt + usage.completion * rate.completion
            ) / 1_000_000
        elif spec.cost_per_hour:
            share = lease.slots / lease.node.slots_total
            record.cost += spec.cost_per_hour * share * (self.clock() - lease.taken) / 3600


def _usage(attempt: Attempt, sample: bytes) -> Usage | None:
    if not attempt.streams:
        if len(sample) > 2 * EDGE_BYTES:
            sample = sample[:EDGE_BYTES] + sample[-EDGE_BYTES:]
        return read_usage(sample)
    found = read_usage(sample)
    if found is not None and not found.prompt:
        # Anthropic's dialect tells the prompt's tokens at the start.
        for event in sse.split(attempt.content):
            opening = read_usage(event)
            if opening is not None and opening.prompt:
                found.prompt, found.cached = opening.prompt, opening.cached
                break
    return found
