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
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.scheduling.fronts import SLOTS, Speed
from tests.emulator.language_model import WORDS

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


def session_rate(trace: Trace, fleet: Sequence[Speed]) -> float:
    """Sessions per second that fill the fleet."""
    read, write = (tokens / len(trace.sessions) for tokens in _blind(trace, len(fleet)))
    return sum(1 / (read / one.prefill + write * one.token(SLOTS) / SLOTS) for one in fleet)


def _blind(trace: Trace, nodes: int) -> tuple[float, float]:
    """All tokens read and written if nodes are chosen without regard to caches."""
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
    return read, write
