"""Words that all packages share about requests: classes, callers, endpoints, header fields."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.config.cache_privacy import CacheSpec
from gateway.config.usage_limits import LimitSpec

Headers = list[tuple[bytes, bytes]]
"""Header fields in wire order, with names in lower case."""

Endpoint = Literal["chat", "embeddings", "rerank", "infill", "audio", "vision"]
"""What a node can do, by the names of `endpoints` in the inventory."""


class SegmentedBody(Protocol):
    """A large body, which is sent piece by piece."""

    def __len__(self) -> int:
        """Bytes of all pieces."""

    def pieces(self) -> Sequence[bytes | memoryview]:
        """The pieces; they never change."""


class Priority(enum.IntEnum):
    """The classes, highest first: a smaller number is served first."""

    URGENT = 0
    PREMIUM = 1
    NORMAL = 2
    BATCH = 3

    # Enum's own hash runs in Python, several times per request.
    __hash__ = int.__hash__

    @property
    def label(self) -> str:
        """The class's name on the wire: `urgent`, `premium`, `normal`, `batch`."""
        return _LABELS[self]

    @classmethod
    def parse(cls, word: str) -> Priority | None:
        """The class with this label, or None."""
        return _BY_LABEL.get(word.strip().lower())


_LABELS = {priority: priority.name.lower() for priority in Priority}

_BY_LABEL = {label: priority for priority, label in _LABELS.items()}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the holder of a key, or an anonymous address."""

    id: str
    name: str
    max_priority: Priority
    """The highest class that its requests may have."""
    models: frozenset[str] | None = None
    """Public names of the models that it may use; None: all."""
    anonymous: bool = False
    trust_user_headers: bool = False
    """Whether it may name its end users by a header."""
    default_priority: Priority = Priority.NORMAL
    """The class of a request that asks for none."""
    group: str | None = None
    """The group that its key belongs to: callers of a group share the group's limits."""
    limits: LimitSpec | None = None
    """Limits of its key, beside those of its group and of all callers."""
    user_limits: LimitSpec | None = None
    """Limits of each end user that it names; None: its group's."""
    cache: CacheSpec | None = None
    """What its key says of prompt caches; None: its group and the settings say all."""

    @property
    def late_priority(self) -> Priority:
        """The class of its work that could wait and whose deadline has come near.

        That of its requests that ask for none, but at least `normal`, if it may have that: what is
        late is treated as if its client waited for it now.
        """
        return max(self.max_priority, min(self.default_priority, Priority.NORMAL))

    def may_use(self, model: str) -> bool:
        """Whether this caller may use the model of this public name."""
        return self.models is None or model in self.models
