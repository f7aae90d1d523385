"""What one simulated request is, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Prompt(NamedTuple):
    """What a run of tokens consists of, as far as a prefix cache can tell.

    `stream` names the text; two prompts of one stream have all tokens of the shorter in common:
    a conversation is a stream, and each turn reads a little more of it. `shared` of the tokens
    at its beginning are those of `head`, which other streams may begin with too: a system
    prompt. Numbers are names: equal means the same text, 0 as `head` means none.
    """

    stream: int
    tokens: int
    head: int = 0
    shared: int = 0


def in_common(one: Prompt, other: Prompt) -> int:
    """Tokens that two prompts begin with alike."""
    if one.stream == other.stream:
        return min(one.tokens, other.tokens)
    if one.head and one.head == other.head:
        return min(one.shared, other.shared, one.tokens, other.tokens)
    return 0


@dataclass(slots=True, eq=False)
class Job:
    """One request of a trace, and while it is simulated also its state. Seconds and tokens."""

    id: int
    """Its place in the trace."""
    time: float
    """When it arrives, seconds from the trace's begin; a later turn waits for the earlier one."""
    prompt: Prompt
    output: int
    """Tokens of the answer, at least 1. No front knows it before it is there."""
    limit: int | None = None
    """`max_tokens` of the request, which fronts may know; None: it did not say."""
    klass: str = "normal"
    caller: str = ""
    pause: float = 0.0
    """A later turn: seconds between the end of the earlier one and this one's arrival."""
    follows: bool = False
    """A later turn: it arrives once the job before it in its session has ended."""

    # What became of it.
    arrived: float = field(default=0.0, init=False)
    sent: float = field(default=-1.0, init=False)
    """When the front sent it to a node; -1: not yet."""
    began: float = field(default=-1.0, init=False)
    """When a slot took it up."""
    first: float = field(default=-1.0, init=False)
    """When its first token was there."""
    ended: float = field(default=-1.0, init=False)
    node: int = field(default=-1, init=False)
    cached: int = field(default=0, init=False)
    """Prompt tokens that the slot held already."""

    # What is left of it, while a node works on it.
    slot: int = field(default=-1, init=False)
    to_read: int = field(default=0, init=False)
    to_write: int = field(default=0, init=False)

    front: Any = field(default=None, init=False)
    """Whatever the front keeps beside it."""

    @property
    def whole(self) -> Prompt:
        """What its slot holds in the end: all but the last token, which is not read any more."""
        return self.prompt._replace(tokens=self.prompt.tokens + self.output - 1)

    def renew(self) -> None:
        """Forget what became of it, for another run."""
        self.arrived = 0.0
        self.sent = self.began = self.first = self.ended = -1.0
        self.node = self.slot = -1
        self.cached = 0
        self.front = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times; a job's id is its place."""

    jobs: Sequence[Job]
    turns: Mapping[int, int] = field(default_factory=dict)
    """Which job follows which in a conversation."""
    skipped: int = 0
    """Broken lines that were left out."""
