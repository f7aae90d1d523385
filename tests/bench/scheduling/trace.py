"""Seeded conversations: tenants with a system prompt each, sessions of several turns.

Sessions begin at random (a Poisson process). The next turn of a session comes a think time after
the answer to the one before, and carries all that was said. Lengths are log-normal, as those of
public traces are. Every word is one token.

**Capacity** is a rate of sessions: that at which the work of a balancer that knows of no caches
equals what all nodes can do with every slot busy. Such a balancer sends a turn to any node alike;
so with N nodes a tenant's system prompt is read once on nearly each of them, and a session's
history is found from the last turn that was on the same node, which was turn j of k with
probability (1/N)(1 - 1/N)^(k-1-j). A request with u tokens to be read and c to be written costs
a node u/prefill + c * token(slots)/slots seconds.

**Lower bounds.** Whatever the scheduler, a request takes at least what it takes alone on the
fastest node with all in the cache that any earlier request could have left there: all but its
question, and for the first request of a tenant all. The mean of these bounds every mean
completion. The second bound tells what queues must form: one machine that does the work of all
nodes (for reading and writing each node counts with the better of its two speeds) and may
interrupt anything, works off the same arrivals with the shortest remaining work first, which
minimises the mean (Schrage 1968). No fleet does better, since the machine could do whatever the
fleet does. Arrivals are those of the run that is judged: later turns come after earlier answers.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.bench.scheduling.fronts import FLEET, SLOTS, Speed
from tests.emulator.language_model import WORDS

if TYPE_CHECKING:
    from tests.bench.scheduling.play import Record

THINK = (4.0, 0.6, 1.0, 20.0)
QUESTION = (100.0, 0.8, 10.0, 800.0)
ANSWER = (40.0, 0.7, 8.0, 300.0)  # median, sigma, least and most; seconds, tokens, tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """How much there is to say."""

    sessions: int = 24
    turns: int = 4
    tenants: int = 6
    system_tokens: int = 1500


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: seconds to think before it, the question, and the length of its answer."""

    think: float
    question: str
    question_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation, begun `at` seconds after the trace."""

    at: float
    tenant: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    shape: Shape
    systems: tuple[str, ...]
    sessions: tuple[Session, ...]

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


def make(seed: str, rate: float, shape: Shape | None = None) -> Trace:
    """A trace whose sessions begin `rate` times a second.

    Every rate has the same conversations, so that loads can be compared.
    """
    shape = shape or Shape()
    rng = random.Random(f"conversations {seed}")
    systems = tuple(_words(rng, shape.system_tokens) for _ in range(shape.tenants))
    tenants = [i % shape.tenants for i in range(shape.sessions)]
    rng.shuffle(tenants)
    talks = [tuple(_turn(rng, first=not i) for i in range(shape.turns)) for _ in tenants]
    arrivals = random.Random(f"arrivals {seed}")
    at = 0.0
    sessions = []
    for tenant, turns in zip(tenants, talks, strict=True):
        sessions.append(Session(at, tenant, turns))
        at += arrivals.expovariate(rate)
    return Trace(shape, systems, tuple(sessions))


def _turn(rng: random.Random, *, first: bool) -> Turn:
    think = 0.0 if first else _length(rng, *THINK)
    tokens, answer = round(_length(rng, *QUESTION)), round(_length(rng, *ANSWER))
    question = f"{_words(rng, tokens)} Answer in {answer} words."
    return Turn(think, question, tokens, answer)


def _length(rng: random.Random, median: float, sigma: float, least: float, most: float) -> float:
    return min(max(rng.lognormvariate(math.log(median), sigma), least), most)


def _words(rng: random.Random, count: int) -> str:
    return "".join(f" {rng.choice(WORDS)}" for _ in range(count))


MARKUP = 8  # about the tokens of the chat template around one message


@dataclass(frozen=True, slots=True)
class Least:
    """The least work of one request: prompt tokens to read and output tokens to decode."""

    read: float
    write: float

    def work(self, speed: Speed) -> float:
        """Seconds of computation on a node whose slots are all busy."""
        return self.read / speed.prefill + self.write * _share(speed)


def session_rate(trace: Trace, fleet: Sequence[Speed]) -> float:
    """Sessions per second that fill the fleet."""
    blind = _blind(trace, len(fleet))
    per_session = [blind.work(speed) / len(trace.sessions) for speed in fleet]
    return sum(1 / work for work in per_session)


def bounds(trace: Trace, records: Sequence[Record]) -> dict[str, float]:
    """Lower bounds of the mean seconds in this run of `FLEET`, for any scheduler."""
    if len(records) < trace.requests or any(record.problem for record in records):
        return {}
    first: dict[int, int] = {}  # the session of each tenant whose first request reads its prompt
    for which, session in enumerate(trace.sessions):
        first.setdefault(session.tenant, which)
    # Which request of a tenant reads the system prompt is the scheduler's choice: in the queue
    # it is left out for all.
    small = [[Least(t.question_tokens, t.answer_tokens) for t in s.turns] for s in trace.sessions]
    alone = [job for session in small for job in session]
    alone += [Least(trace.shape.system_tokens, 0) for _ in first]
    queued = mean_queued([(r.sent, small[r.session][r.turn]) for r in records], FLEET)
    return {"alone": sum(map(_alone, alone)) / trace.requests, "queued": queued}


def _alone(job: Least) -> float:
    """Seconds that it takes alone on the fastest node."""
    # The prompt's last batch gives the first token.
    written = max(job.write - 1, 0)
    return min(job.read / speed.prefill + written * speed.token() for speed in FLEET)


def mean_queued(jobs: Sequence[tuple[float, Least]], fleet: Sequence[Speed]) -> float:
    """Mean seconds from arrival to end on one machine as fast as all nodes together."""
    unit = fleet[0]
    speed = sum(max(node.prefill / unit.prefill, _share(unit) / _share(node)) for node in fleet)
    arrivals = sorted((at, job.work(unit) / speed) for at, job in jobs)
    now = total = 0.0
    left: list[tuple[float, float]] = []  # remaining seconds, arrival
    waiting = list(reversed(arrivals))
    while left or waiting:
        if not left:
            now = max(now, waiting[-1][0])
        while waiting and waiting[-1][0] <= now:
            at, work = waiting.pop()
            heapq.heappush(left, (work, at))
        work, at = heapq.heappop(left)
        until = waiting[-1][0] if waiting else float("inf")
        if now + work <= until:
            now += work
            total += now - at
        else:
            heapq.heappush(left, (work - (until - now), at))
            now = until
    return total / len(jobs)


def _share(speed: Speed) -> float:
    """Seconds of computation that an output token costs while all slots decode."""
    return speed.token(SLOTS) / SLOTS


def _blind(trace: Trace, nodes: int) -> Least:
    """All tokens read and decoded if nodes are chosen without regard to caches."""
    miss = 1 - 1 / nodes
    read = write = 0.0
    for tenant in range(trace.shape.tenants):
        turns = sum(len(s.turns) for s in trace.sessions if s.tenant == tenant)
        read += trace.shape.system_tokens * nodes * (1 - miss**turns)
    for session in trace.sessions:
        for k, turn in enumerate(session.turns):
            said = session.turns[:k]
            turn_tokens = [t.question_tokens + t.answer_tokens + 2 * MARKUP for t in said]
            # Turn i must be read again unless it or a later one was on the same node.
            read += sum(tokens * miss ** (k - i) for i, tokens in enumerate(turn_tokens))
            read += turn.question_tokens
            write += turn.answer_tokens
    return Least(read, write)
