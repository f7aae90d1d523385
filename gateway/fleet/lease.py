"""A lease: slots of one node that one request holds, from dispatch until they are free again."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from gateway.fleet.timings import Seen

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from gateway.fleet.node import Node
    from gateway.request import Priority
    from gateway.transport.upstream import Upstream


class Phase(enum.Enum):
    """How far the node has got with the request."""

    WAITING_HEAD = "waiting"
    """Sent; the node has not begun to answer: it is queued there, or a plain request runs."""
    PREFILL = "prefill"
    """The head is here, the first content is not: the node reads the prompt."""
    DECODE = "decode"
    """Content has come."""
    RECLAIM = "reclaim"
    """We have left, the node may still be at work."""
    OVER = "over"
    """Given back."""


class Charge(Protocol):
    """Who is to be told, once, what a lease came to cost."""

    def settle(self, cost: float, *, happened: bool, now: float) -> None:
        """It cost so much; `happened`: the node worked for it."""


@dataclass(slots=True, eq=False)
class Lease:
    """Slots held on a node. Made by `Node.take`, ended by `give_back`; a context manager.

    Leaving the `with` block gives the slots back, unless `abandon` was called: then the
    reclaimer does, when the node shows them free. Times are monotonic seconds.
    """

    node: Node
    upstream: Upstream
    """The ways to the node when the lease was taken; they stay open until it has ended."""
    slots: int
    request_id: str
    priority: Priority
    taken: float
    stream: bool
    """Whether the node streams its answer: if so it stops soon after we leave."""
    expected_prefill: float | None
    """Predicted seconds from dispatch to the first content; None: no idea."""
    expected_total: float | None
    """Predicted seconds from dispatch to the end; None: no idea."""
    trial: bool = False
    """Its outcome closes or reopens the node's circuit."""
    phase: Phase = Phase.WAITING_HEAD
    prefill_began: float = 0.0
    last_moved: float | None = None
    """When the last byte of content came from the node."""
    abandoned: float = 0.0
    """When it was abandoned, if it was."""
    left_in: Phase | None = None
    """How far the node had got then."""
    reads: bool = False
    """Whether it counts as one whose prompt is being read."""
    ended: float | None = None
    """When it was given back."""
    readers: float = 1.0
    """Mean number of prompts read on the node while its own was."""
    slot_seconds: float = 0.0
    """The node's sum when it was taken, then when its prompt was read, in the end the difference
    (`Occupancy`)."""
    reader_seconds: float = 0.0
    """Likewise."""
    read_at: float | None = None
    """When its first content came."""
    charge: Charge | None = None
    """The share of a budget that it holds."""
    fallback: str | None = None
    """Why it is not of the tier that the request's class belongs to."""
    placement: Any = None
    """What the scheduler keeps of it."""
    on_read: Callable[[Lease], None] | None = None
    """Called when its prompt has been read: the first content came."""
    on_end: Callable[[Lease], None] | None = None
    """Called when the slots are free, before anybody else is told."""

    @property
    def held(self) -> bool:
        """Whether the slots still count against the node."""
        return self.phase is not Phase.OVER

    def head_came(self, now: float) -> None:
        """The head of a streamed answer is here: a slot has begun to read the prompt."""
        if self.phase is Phase.WAITING_HEAD:
            self.phase = Phase.PREFILL
            self.prefill_began = now

    def moved(self, now: float) -> None:
        """Content came from the node."""
        self.last_moved = now
        if self.phase is Phase.WAITING_HEAD or self.phase is Phase.PREFILL:
            self.phase = Phase.DECODE
            if self.reads:
                self._has_read(now)
            if self.on_read is not None:
                self.on_read(self)

    def seen(self) -> Seen | None:
        """What the gateway saw of its node meanwhile; None until it is given back."""
        if self.ended is None or not self.slots:
            return None
        began = self.taken if self.read_at is None else self.read_at
        wrote = self.ended - began
        busy = self.slot_seconds / wrote if wrote > 0 else float(self.slots)
        if self.read_at is None:
            return Seen(wrote, None, busy, min(wrote, self.reader_seconds))
        stalled = min(wrote, self.reader_seconds)
        return Seen(self.ended - self.taken, began - self.taken, busy, stalled, self.readers)

    def give_back(self) -> None:
        """The slots are free. Calling it again does nothing."""
        if self.phase is not Phase.OVER:
            self.phase = Phase.OVER
            if self.on_end is not None:
                self.on_end(self)
            self.node.returned(self)

    def abandon(self) -> None:
        """We have left, the node may still be at work: hold the slots until it shows them free."""
        if self.phase is Phase.OVER or self.phase is Phase.RECLAIM:
            return
        self.left_in = self.phase
        self.phase = Phase.RECLAIM
        self.abandoned = self.node.clock()
        self.node.on_abandon(self.node)

    def _has_read(self, now: float) -> None:
        """Its own prompt is read: what it sees of its node counts anew from here."""
        occupancy = self.node.occupancy
        occupancy.has_read(now)
        self.reads = False
        self.read_at = now
        if now > self.taken:
            self.readers = (occupancy.reader_seconds - self.reader_seconds) / (now - self.taken)
        self.slot_seconds = occupancy.slot_seconds
        self.reader_seconds = occupancy.reader_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.phase is not Phase.RECLAIM:
            self.give_back()
