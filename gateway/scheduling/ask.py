"""One request that arrives or waits, as the numbers that placing goes by."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.request import Priority
from gateway.scheduling.board import MOST_SLOTS, Pool, Row, bounded

if TYPE_CHECKING:
    from gateway.scheduling.fairness import Account

MOST_TOKENS = 1e7
"""Tokens of a prompt or an answer; more than that is a mistake, and is bounded."""
USUAL_COMPLETION = 256.0
"""Tokens expected of an answer that nobody knows anything about."""

Shape = tuple[tuple["Tiers", ...], int, bool]
"""Groups, slots and whether it leaves the reserve alone: what the rows with room depend on."""

Tiers = tuple[Pool, ...]
"""Pools that serve the same model, the preferred first: the next is for when one has no room."""

NOTHING: Mapping[int, float] = {}
"""Of no row; never written to."""


@dataclass(slots=True, eq=False)
class Ask:
    """A request for slots on one node. Nonsense in its numbers is bounded.

    `groups` holds the pools for each name that the request stands for: a later name is only for
    when no node of an earlier one is alive.
    """

    id: str
    groups: tuple[Tiers, ...]
    priority: Priority
    caller: str
    """Who it is fair to."""
    entered: float
    """When it came to the gateway; monotonic seconds."""
    slots: int = 1
    prompt: float = 0.0
    """Expected prompt tokens."""
    completion: float = USUAL_COMPLETION
    """Expected tokens of the answer."""
    cached: Mapping[int, float] = field(default_factory=lambda: NOTHING)
    """Tokens of its prompt that a row is believed to have cached, by the row's index."""
    coming: Mapping[int, float] = field(default_factory=lambda: NOTHING)
    """Tokens of it that a row will have cached when what runs there has ended, by index."""
    closed: Collection[int] = ()
    """Indexes of rows that can't serve it: never used."""
    failed: Collection[int] = ()
    """Indexes of rows that have failed it: used only when no other is alive."""
    doubts: Mapping[int, float] = field(default_factory=lambda: NOTHING)
    """Seconds by which a row looks slower to this request, by index; negative: better."""
    key: object = None
    """What its prompt is looked up by again; for `Dispatcher.recall` alone."""
    affinity: int = 0
    """Hash of what it shares with its like, for `prefix_hash`."""
    deadline: float | None = None
    """When the answer is of no use any more."""
    owner: str = ""
    """Of one that takes no slot: its caller with all users that it names."""
    # Kept by the line and the dispatcher.
    work: tuple[float, float] = (0.0, 0.0)
    """Tokens that are likely to be read and to be written for it."""
    age: tuple[float, int] = (0.0, 0)
    """The key of the order of age."""
    account: Account | None = None
    """Its caller's, while it is in line."""
    shape: Shape = ((), 0, False)
    warmest: tuple[int, ...] = ()
    """Indexes of the rows that have most of it cached."""
    known: float = 0.0
    """When what is cached of it was last looked up."""
    held: Row | None = None
    """The busy node that it is held back for."""
    held_until: float = 0.0
    """When that was predicted to have a slot, with a margin; 0: never held back."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.prompt <= MOST_TOKENS:
            self.prompt = bounded(self.prompt, 0.0, MOST_TOKENS, 0.0)
        if not 1.0 <= self.completion <= MOST_TOKENS:
            self.completion = bounded(self.completion, 1.0, MOST_TOKENS, USUAL_COMPLETION)
        if not 0 <= self.slots <= MOST_SLOTS:
            self.slots = int(bounded(self.slots, 0, MOST_SLOTS, 1))

    @property
    def spares(self) -> bool:
        """Whether it leaves the reserve of each node free."""
        return self.priority is Priority.BATCH
