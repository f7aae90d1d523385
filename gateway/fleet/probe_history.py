"""A node's probe results so far, and the verdict that they add up to: counting, without I/O."""

from __future__ import annotations

import enum
import hashlib
import random
from dataclasses import dataclass

MOST_QUICK_REPROBES = 30
"""Failed probes in a row after which a node is no longer expected back at any moment."""

PROBE_JITTER = 0.1
"""Share by which an interval varies, so that nodes probed together by chance part again."""

QUICK_PROBE_DELAY = 1.0
"""Seconds between the probes of a node about to change: loading, failing, or just gone."""


class ProbeAnswer(enum.Enum):
    """How a probe ended."""

    UP = "up"
    LOADING = "loading"
    CONNECTION_REFUSED = "refused"
    TIMED_OUT = "timed out"
    KEY_REJECTED = "locked"
    """It is alive, but rejects the gateway's key."""
    NO_MODEL = "names no model"
    """It is alive, but neither it nor the inventory names a model."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A probe's end, with a detail for the operator; it took `seconds`."""

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
    """By the last verdict; it takes `rise` or `fall` probes to change."""
    loading: bool = False
    mute: bool = False
    """It let a probe time out while something else showed that it is alive."""
    unread: int = 0
    """Readings of its slots in a row that timed out without excuse, though `/health` answered."""
    unread_since: float = 0.0
    """When the first of them began."""
    frozen: bool = False
    """Whether these were `fall`, and none has been answered since."""
    detail: str = ""
    successes_in_a_row: int = 0
    failures_in_a_row: int = 0
    load_unread: bool = False
    """Whether its load is unknown, since it was left alone."""
    discovered_at: float | None = None
    """When the server's properties were last read; None: to be read before it gets work."""
    props_digest: bytes | None = None
    """Of the answer to `/props` that was read last; None: there was none."""
    last_probe_at: float | None = None
    """When the last probe began."""
    next_probe_at: float = 0.0
    """When the next one is due."""

    @property
    def down(self) -> bool:
        """Whether the verdict is that the node is not there."""
        return self.probed and not self.up and not self.loading

    @property
    def silent(self) -> bool:
        """Whether it lives and leaves probes unanswered, so that it gets no work."""
        return self.mute or self.frozen

    @property
    def unstable(self) -> bool:
        """Whether a change is likely soon, so that probes must be quick."""
        if not self.up:
            return self.loading or 0 < self.failures_in_a_row <= MOST_QUICK_REPROBES
        return self.failures_in_a_row > 0 and not self.mute

    def probe_began(self, now: float) -> None:
        """A probe begins."""
        self.last_probe_at = now

    def record(
        self, result: ProbeResult, *, rise: int, fall: int, sign_of_life: str | None
    ) -> None:
        """Count one more result.

        A node that has not been up yet is down at its first failure: `fall` protects a working
        node from a passing trouble. `sign_of_life` says why the node is alive all the same; it
        outweighs a time-out and nothing else. A refused connection counts at once: the node's
        system itself says that no process listens there.
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
            self._not_up(loading=True, detail=result.detail)
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
            self._not_up(loading=False, detail=result.detail)
        elif self.mute:
            self.detail = f"{result.detail} ({self.failures_in_a_row} of {fall} times)"

    def slots_unread(self, asked_at: float, fall: int) -> None:
        """A reading of its slots has timed out, and no work of ours explains it."""
        if not self.unread:
            self.unread_since = asked_at
        self.unread += 1
        self.frozen = self.unread >= fall

    def slots_read(self) -> None:
        """Its slots were read, or can't be asked for."""
        self.unread, self.frozen, self.load_unread = 0, False, False

    def leave_load_unread(self) -> None:
        """Its slots were not asked for, so that it may fall asleep."""
        self.load_unread = True

    def _not_up(self, *, loading: bool, detail: str) -> None:
        self.up = self.mute = False
        self.slots_read()
        self.loading = loading
        self.discovered_at = None
        self.detail = detail

    def discovered(self, now: float) -> None:
        """The server's properties have been read."""
        self.discovered_at = now

    def rediscover(self) -> None:
        """Read the server's properties with the next probe."""
        self.discovered_at = None

    def props_read(self, body: bytes) -> None:
        """The server's properties were read from this answer to `/props`."""
        self.props_digest = hashlib.sha256(body).digest()

    def props_differ(self, body: bytes) -> bool:
        """Whether this answer to `/props` is not, to the byte, the one that was read."""
        return hashlib.sha256(body).digest() != self.props_digest

    def discovery_due(self, now: float, interval: float) -> bool:
        """Whether the server's properties are unknown or older than `interval` seconds."""
        return self.discovered_at is None or now - self.discovered_at >= interval

    def schedule(self, at: float) -> None:
        """The next probe is due then."""
        self.next_probe_at = at

    def probe_by(self, at: float) -> bool:
        """The next probe is due then at the latest; whether that is earlier than before."""
        earlier = at < self.next_probe_at
        if earlier:
            self.next_probe_at = at
        return earlier


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
