"""What a node's probes have said so far, and what one more says: pure counting, no I/O."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

MOST_QUICK_REPROBES = 30
"""Failed probes after which a node is no longer expected to come back at any moment."""


class ProbeAnswer(enum.Enum):
    """How a probe ended."""

    UP = "up"
    LOADING = "loading"
    CONNECTION_REFUSED = "refused"
    TIMED_OUT = "timed out"
    KEY_REJECTED = "locked"
    """It refuses our key: alive, and of no use."""
    NO_MODEL = "names no model"
    """Neither does the inventory: alive, and of no use."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A probe's end; `detail` is for an operator. `seconds` is how long it took."""

    answer: ProbeAnswer
    detail: str
    seconds: float = 0.0

    @property
    def up(self) -> bool:
        """Whether the node is there and can take work."""
        return self.answer is ProbeAnswer.UP


@dataclass(slots=True)
class ProbeHistory:
    """The probes of one node. Times are monotonic seconds."""

    probed: bool = False
    up: bool = False
    """By the last verdict; between verdicts (`rise`, `fall`) it stays."""
    loading: bool = False
    mute: bool = False
    """It let a probe time out while something else showed that it lives."""
    detail: str = ""
    successes_in_a_row: int = 0
    failures_in_a_row: int = 0
    discovered_at: float | None = None
    """When the server was last asked what it is; None: it must be asked before it gets work."""
    last_probe_at: float | None = None
    """When the last probe began."""
    next_probe_at: float = 0.0
    """When the next one is due."""

    @property
    def down(self) -> bool:
        """Whether the verdict is that it is not there."""
        return self.probed and not self.up and not self.loading

    @property
    def unstable(self) -> bool:
        """Whether a change is likely soon: look again sooner."""
        if not self.up:
            return self.loading or 0 < self.failures_in_a_row <= MOST_QUICK_REPROBES
        return self.failures_in_a_row > 0 and not self.mute

    def record(
        self, result: ProbeResult, *, rise: int, fall: int, sign_of_life: str | None
    ) -> None:
        """Count one more probe.

        A node that has not been up yet is down at its first failure: `fall` guards a node that
        works against a passing trouble. `sign_of_life` tells why it is alive all the same;
        it outweighs a time-out and nothing else. A refused connection needs no second look: the
        system itself says that nobody listens there.
        """
        first = not self.probed
        self.probed = True
        if result.answer is ProbeAnswer.UP:
            self.failures_in_a_row = 0
            self.successes_in_a_row += 1
            self.mute = False
            if first or self.loading or self.up or self.successes_in_a_row >= rise:
                self.up, self.loading, self.detail = True, False, ""
            return
        self.successes_in_a_row = 0
        if result.answer is ProbeAnswer.LOADING:
            self.failures_in_a_row = 0
            self._away(loading=True, detail=result.detail)
            return
        if result.answer is ProbeAnswer.TIMED_OUT and self.up and sign_of_life:
            self.mute = True
            self.failures_in_a_row = 0
            self.detail = f"{result.detail}, but {sign_of_life}: no new work until it answers"
            return
        self.failures_in_a_row += 1
        if (
            not self.up
            or self.failures_in_a_row >= fall
            or result.answer is ProbeAnswer.CONNECTION_REFUSED
        ):
            self._away(loading=False, detail=result.detail)
        elif self.mute:
            self.detail = f"{result.detail} ({self.failures_in_a_row} of {fall} times)"

    def _away(self, *, loading: bool, detail: str) -> None:
        self.up = self.mute = False
        self.loading = loading
        self.discovered_at = None
        self.detail = detail


PROBE_JITTER = 0.1
"""Share by which a period varies: nodes that meet by chance part again."""

QUICK_PROBE_DELAY = 1.0
"""Seconds between the probes of a node about to change: loading, failing, or just gone."""


def probe_delay(interval: float, rng: random.Random, *, first: bool, unstable: bool) -> float:
    """Seconds from the end of a probe to the next.

    All nodes are probed at once when the gateway starts; after this `first` probe each gets a
    random phase of its own. A node that is down is probed at least as often as any other: a probe
    costs little, and a node that is back is wanted within seconds.
    """
    if unstable:
        interval = min(interval, QUICK_PROBE_DELAY)
    elif first:
        return rng.uniform(0.0, interval)
    return interval * rng.uniform(1 - PROBE_JITTER, 1 + PROBE_JITTER)
