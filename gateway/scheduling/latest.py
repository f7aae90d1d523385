"""Latest wins: an editor's new completion makes the one before it worthless."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Latest(Generic[T]):
    """The newest of each session, as long as it waits or runs."""

    _newest: dict[str, T] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._newest)

    def enter(self, session: str, one: T) -> T | None:
        """`one` is the newest now; what it replaces, if that is not over yet."""
        earlier = self._newest.get(session)
        self._newest[session] = one
        return earlier

    def leave(self, session: str, one: T) -> None:
        """`one` is over; nothing happens if it was replaced."""
        if self._newest.get(session) is one:
            del self._newest[session]
