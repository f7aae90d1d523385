"""What a node's probes have said so far, and what one more says: pure counting, no I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass

RETURNS_WITHIN = 30
"""Failed probes after which a node is no longer expected to come back at any moment."""


class Answer(enum.Enum):
    """How a probe ended."""

    UP = "up"
    LOADING = "loading"
    REFUSED = "refused"
    TIMED_OUT = "timed out"
    LOCKED = "locked"
    """It refuses our key: alive, and of no use."""
    NAMELESS = "names no model"
    """Neither does the inventory: alive, and of no use."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A probe's end; `detail` is for an operator. `seconds` is how long it took."""

    answer: Answer
    detail: str
    seconds: float = 0.0

    @property
    def up(self) -> bool:
        """Whether the node is there and can take work."""
        return self.answer is Answer.UP


@dataclass(slots=True)
class Probing:
    """The probes of one node. Times are monotonic seconds."""

    probed: bool = False
    up: bool = False
    """By the last verdict; between verdicts (`rise`, `fall`) it stays."""
    loading: bool = False
    mute: bool = False
    """It let a probe time out while something else showed that it lives."""
    detail: str = ""
    answered_in_a_row: int = 0
    failed_in_a_row: int = 0
    discovered: float | None = None
    """When the server was last asked what it is; None: it must be asked before it gets work."""
    last: float | None = None
    """When the last probe began."""
    next: float = 0.0
    """When the next one is due."""

    @property
    def down(self) -> bool:
        """Whether the verdict is that it is not there."""
        return self.probed and not self.up and not self.loading

    @property
    def unsettled(self) -> bool:
        """Whether a change is likely soon: look again sooner."""
        if not self.up:
            return self.loading or 0 < self.failed_in_a_row <= RETURNS_WITHIN
        return self.failed_in_a_row > 0 and not self.mute

    def note(self, outcome: Outcome, *, rise: int, fall: int, sign_of_life: str | None) -> None:
        """Count one more probe.

        A node that has not been up yet is down at its first failure: `fall` guards a node that
        works against a passing trouble. `sign_of_life` tells why it is alive all the same;
        it outweighs a time-out and nothing else. A refused connection needs no second look: the
        system itself says that nobody listens there.
        """
        first = not self.probed
        self.probed = True
        if outcome.answer is Answer.UP:
            self.failed_in_a_row = 0
            self.answered_in_a_row += 1
            self.mute = False
            if first or self.loading or self.up or self.answered_in_a_row >= rise:
                self.up, self.loading, self.detail = True, False, ""
            return
        self.answered_in_a_row = 0
        if outcome.answer is Answer.LOADING:
            self.failed_in_a_row = 0
            self._away(loading=True, detail=outcome.detail)
            return
        if outcome.answer is Answer.TIMED_OUT and self.up and sign_of_life:
            self.mute = True
            self.failed_in_a_row = 0
            self.detail = f"{outcome.detail}, but {sign_of_life}: no new work until it answers"
            return
        self.failed_in_a_row += 1
        if not self.up or self.failed_in_a_row >= fall or outcome.answer is Answer.REFUSED:
            self._away(loading=False, detail=outcome.detail)
        elif self.mute:
            self.detail = f"{outcome.detail} ({self.failed_in_a_row} of {fall} times)"

    def _away(self, *, loading: bool, detail: str) -> None:
        self.up = self.mute = False
        self.loading = loading
        self.discovered = None
        self.detail = detail
