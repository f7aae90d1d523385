"""What an attempt came to: who is told, what it cost and taught. Also of one cut short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.events import AttemptEnded, Bus, RequestFinished
from gateway.fleet.fleet import Fleet
from gateway.fleet.lease import Lease
from gateway.fleet.node import Node
from gateway.relay import sse
from gateway.relay.attempt import Attempt
from gateway.relay.continuation.seam import Seam
from gateway.relay.live import Doubt, Live
from gateway.relay.quarantine import Quarantine
from gateway.relay.usage import Usage, read_usage
from gateway.scheduling.budget import price
from gateway.scheduling.expectations import Told
from gateway.scheduling.scheduler import Scheduler
from gateway.transport.errors import Reset

BLAMELESS = frozenset({"client_closed", "cancelled"})
"""Outcomes that say nothing about the node: the client left, or we ended it."""

_SAY_NOTHING = frozenset({"moved", "total_timeout", "request_error"})
"""Likewise: it was taken away from the node, was so long an answer that its time was over, or is
nothing that any node would answer."""

EDGE_BYTES = 8 * 1024
"""`usage` stands within so many bytes of an answer's beginning (embeddings) or end (the rest)."""


LESSON_EVERY = 0.01
"""Seconds: answers that follow each other faster on one node teach nothing new of its speed, nor,
where nothing was written, of how many bytes of text a token is."""


@dataclass(frozen=True, slots=True)
class Settler:
    """Ends attempts, each exactly once, and writes them into the records of their requests."""

    fleet: Fleet
    scheduler: Scheduler
    bus: Bus
    clock: Callable[[], float]
    quarantine: Quarantine = field(default_factory=Quarantine)
    _taught: dict[str, float] = field(default_factory=dict)
    """When each node's speed was last learnt from."""

    def finished(self, live: Live, attempt: Attempt, sample: bytes) -> None:
        """A whole answer; `sample` holds its end, or all of it."""
        now = self._ended(live, attempt)
        lease = attempt.lease
        self.fleet.succeeded(lease.node, now, lease.taken)
        if live.doubts:
            self.answered(live, lease.node, wholly=True)
        self.quarantine.lived(live.request)
        if not attempt.streams:
            attempt.content = b""  # it is on its way, and need not wait for the accounts
            if len(sample) > 2 * EDGE_BYTES:
                sample = sample[:EDGE_BYTES] + sample[-EDGE_BYTES:]
        self.bus.soon(self._account, live, attempt, "ok", now, sample)

    def broken(self, live: Live, attempt: Attempt, outcome: str) -> None:
        """A reply that had begun came to a bad end, or its client left.

        What went out of a stream counts; of an answer that is put together nothing has.
        """
        now = self._ended(live, attempt)
        if outcome not in BLAMELESS and outcome not in _SAY_NOTHING:
            self.doubt(live, attempt.lease, now, begun=True)
        if outcome == Reset.outcome:
            self.quarantine.died(live.request, attempt.lease.node.name, attempt.lease.taken, now)
        self.bus.soon(self._account, live, attempt, outcome, now)

    def doubt(self, live: Live, lease: Lease, now: float, *, begun: bool) -> None:
        """The request failed under this lease; who is to blame is to be seen.

        What a client asks for can make a node too slow, end it, or have it say what can't be
        passed on, and would do so on every node. So the node is blamed when another one has
        answered the same request, or when others' requests fail there as well
        (`Circuit.failed`). `begun`: the answer had begun.
        """
        caller = live.request.caller.id
        self.fleet.failed(lease.node, now, lease.taken, caller=caller, certain=False)
        live.doubts += (Doubt(lease, begun),)

    def answered(self, live: Live, node: Node, *, wholly: bool) -> None:
        """This node answers what others have failed: `wholly`, or as far as its first content."""
        now, caller = self.clock(), live.request.caller.id
        left = []
        for doubt in live.doubts:
            if doubt.begun and not wholly:
                left.append(doubt)
                continue
            lease, counted = doubt.lease, doubt.counted
            if lease.node is not node:
                self.fleet.failed(lease.node, now, lease.taken, caller=caller, counted=counted)
        live.doubts = tuple(left)

    def tell(self, live: Live, attempt: Attempt, outcome: str) -> None:
        """An attempt is over that came to nothing."""
        live.attempt = None
        self.scheduler.expectations.dropped(
            attempt.lease, live.request, cost_nothing=outcome not in BLAMELESS
        )
        now = self.clock()
        if attempt.lease.charge is not None:
            _charge_dropped(live, attempt, outcome, now)
        self.bus.soon(self._tell, live, attempt, outcome, now)

    def _ended(self, live: Live, attempt: Attempt) -> float:
        attempt.end()
        live.attempt = None
        if live.request.prompt is not None:
            self.scheduler.expectations.ending(live.request)
        now = self.clock()
        # Counting tokens, say, tells nothing of how fast slots come free.
        if attempt.lease.slots:
            self.scheduler.rate.completed(now)
        return now

    def _account(
        self, live: Live, attempt: Attempt, outcome: str, now: float, sample: bytes = b""
    ) -> None:
        """Read what the node says of its answer, else go by what went out.

        One event holds about one token; the prompt's tokens are the estimate.
        """
        lease, request = attempt.lease, live.request
        usage = read_usage(sample) if sample else None
        told: Told | None = None
        teaches = False
        if usage is None:
            usage = Usage(request.prompt_tokens, completion=attempt.events)
        else:
            if usage.timings is None and not usage.prompt and attempt.streams:
                _read_opening(attempt.content, usage)
            told = _told(usage, attempt.seam)
            name = lease.node.name
            teaches = outcome == "ok" and now - self._taught.get(name, -1.0) >= LESSON_EVERY
            if teaches:
                self._taught[name] = now
                self._learn(lease, usage)
        cost = _cost(lease, usage, now)
        self.scheduler.expectations.learn(
            lease,
            request,
            told,
            attempt.events,
            whole=outcome == "ok",
            sizes=request.writes or teaches,
        )
        if outcome == "ok" and lease.slots and lease.node.limit is not None:
            self.fleet.answered(lease, usage.prompt - usage.cached, usage.completion)
        if outcome == "ok" or request.stream:
            _write(live.record, usage, attempt.seam)
        live.record.cost += cost
        if lease.charge is not None:
            lease.charge.settle(cost, happened=True, now=now)
        self._tell(live, attempt, outcome, now)

    def _learn(self, lease: Lease, usage: Usage) -> None:
        """What the answer says of its node's speed."""
        if usage.timings is not None:
            self.fleet.learn(lease.node, usage.timings, lease)
        elif lease.slots:
            self.fleet.observe(lease, usage.prompt, usage.cached, usage.completion)
        self.scheduler.mirror.changed(lease.node)

    def _tell(self, live: Live, attempt: Attempt, outcome: str, now: float) -> None:
        self.bus.publish(
            AttemptEnded(
                live.request.tag,
                attempt.lease.node.name,
                outcome,
                now - attempt.began,
                attempt.status or None,
            )
        )


def _read_opening(content: bytes, usage: Usage) -> None:
    """Anthropic's dialect tells the prompt's tokens at the start."""
    for event in sse.split(content):
        first = read_usage(event)
        if first is not None and first.prompt:
            usage.prompt, usage.cached = first.prompt, first.cached
            break


def _charge_dropped(live: Live, attempt: Attempt, outcome: str, now: float) -> None:
    """What an attempt that came to nothing has spent of its budget.

    Once a prompt was sent, only an answer that refuses it says that it was not read.
    """
    lease = attempt.lease
    assert lease.charge is not None
    worked = attempt.sent > 0 and attempt.status < 300
    cost = _cost(lease, Usage(live.request.prompt_tokens), now) if worked else 0.0
    lease.charge.settle(cost, happened=worked and outcome in BLAMELESS, now=now)


def _cost(lease: Lease, usage: Usage, now: float) -> float:
    spec = lease.node.spec
    if not spec.cost_per_hour and spec.cost_per_million_tokens is None:
        return 0.0
    return price(
        spec,
        lease.node.slots_total,
        prompt=usage.prompt,
        completion=usage.completion,
        slots=lease.slots,
        seconds=now - lease.taken,
    )


def _told(usage: Usage, seam: Seam | None) -> Told:
    """What the client's own question and the whole answer came to."""
    if seam is None:
        return usage
    prompt = seam.prompt_tokens
    return Told(prompt, min(usage.cached, prompt), seam.kept_tokens + usage.completion)


def _write(record: RequestFinished, usage: Usage, seam: Seam | None) -> None:
    """A continuation knows the tokens of all that went before it: they count once."""
    if seam is not None:
        record.prompt_tokens = record.cached_tokens = record.completion_tokens = 0
        usage = Usage(seam.prompt_tokens, min(usage.cached, seam.prompt_tokens), usage.completion)
        usage.completion += seam.kept_tokens
    record.prompt_tokens += usage.prompt
    record.cached_tokens += usage.cached
    record.completion_tokens += usage.completion
