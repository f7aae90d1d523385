"""Servers that sleep: llama.cpp unloads its model after `--sleep-idle-seconds` without work.

A sleeping server is alive and takes work: the next request loads the model again, and waits for
that without a head. `/props` tells whether it sleeps, and tells nothing beforehand: every build
that can sleep says `"is_sleeping": false`, with the option and without. `/slots`, `/tokenize` and
all that needs the model wake it, and begin its time anew while it is awake. `/health`, `/props`,
`/v1/models` and `/metrics` do neither (measured with build 11669 and the wheel's server).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

REST_DELAY = 3.0
"""Seconds after our last request for which a server may still be asked what restarts its time."""

RECENT_USE = 60.0
"""Seconds after our last request for which others' load on a server is of interest while the fleet
works."""

MOST_REST = 2000.0
"""Seconds: a server without `/metrics` that was left alone so long in all, and was never seen
asleep, is taken for one that does not sleep; above half an hour, a common setting."""

WAKE_BASE, WAKE_BYTES_PER_SECOND = 1.0, 1e9
"""Seconds to wake up, and bytes of the model that are loaded in a second, until it is measured."""

UNKNOWN_MODEL_BYTES = 8e9
"""Size of a model whose server does not tell it: 13 billion parameters in 5 bits."""

LEAST_WAKE, MOST_WAKE = 0.1, 3600.0
"""Bounds of the seconds that waking up is expected to take."""

WAKE_FACTOR, WAKE_SLACK = 4.0, 60.0
"""Waking up may take so many times longer than expected, and so many seconds more."""

_IS_SLEEPING = re.compile(rb'"is_sleeping"\s*:\s*(true|false)')


def read_is_sleeping(props: bytes) -> tuple[bool | None, bytes]:
    """Whether an answer to `/props` says that the server sleeps, and the answer without that.

    None: its build can't sleep.
    """
    at = props.rfind(b'"is_sleeping"')
    found = _IS_SLEEPING.match(props, at) if at >= 0 else None
    if found is None:
        return None, props
    return found[1] == b"true", props[:at] + props[found.end() :]


@dataclass(slots=True)
class Sleep:
    """One server's sleep, as far as `/props` and our requests show it. Times are monotonic."""

    possible: bool = False
    """Whether its build can sleep."""
    asleep: bool = False
    """By the last answer to `/props`."""
    seen: bool = False
    """Whether it has slept since its process began."""
    waking_since: float | None = None
    """Since when it loads its model again; None: it does not, or has shown that it is awake."""
    rested: float = 0.0
    """Seconds for which it was left alone, awake, in all."""
    measured: float | None = None
    """Seconds that waking up took, the last time counting as much as all before."""
    _rests_since: float | None = None
    """Up to when `rested` counts; None: it was asked since."""

    @property
    def sleeping(self) -> bool:
        """Whether it sleeps or wakes up: its model is not loaded."""
        return self.asleep or self.waking_since is not None

    def props_read(self, asleep: bool | None, now: float, *, asked: bool) -> None:  # noqa: FBT001
        """`/props` says that it sleeps, or None: that it never does.

        `asked`: a request of ours that will wake it is under way.
        """
        self.possible = asleep is not None
        if asleep:
            self.asleep = self.seen = True
            if not asked:
                self.waking_since = None
        elif self.asleep:
            self.asleep = False
            if self.waking_since is None:
                self.waking_since = now

    def begin_wake(self, now: float) -> bool:
        """A request is sent to it while it sleeps; whether that is the one that wakes it."""
        if self.waking_since is not None:
            return False
        self.waking_since = now
        return True

    def woke(self) -> None:
        """It has shown that its model is loaded."""
        self.asleep, self.waking_since = False, None

    def restarted(self) -> None:
        """Its process has ended, or is another one, perhaps with other options."""
        self.asleep = self.seen = False
        self.waking_since, self.rested = None, 0.0

    def learn_wake(self, seconds: float) -> None:
        """Waking up took so long."""
        seconds = min(max(LEAST_WAKE, seconds), MOST_WAKE)
        self.measured = seconds if self.measured is None else (self.measured + seconds) / 2

    def forget(self) -> None:
        """It has another model now."""
        self.measured = None

    def wake_seconds(self, size: int | None) -> float:
        """Seconds that waking up is expected to take, with a model of so many bytes."""
        if self.measured is not None:
            return self.measured
        return WAKE_BASE + min((size or UNKNOWN_MODEL_BYTES) / WAKE_BYTES_PER_SECOND, MOST_WAKE)

    def seconds_left(self, size: int | None, now: float) -> float:
        """Seconds until it is expected to be awake, if it gets a request now."""
        if not self.sleeping:
            return 0.0
        waited = 0.0 if self.waking_since is None else now - self.waking_since
        return max(LEAST_WAKE, self.wake_seconds(size) - waited)

    def wake_limit(self, size: int | None) -> float:
        """Seconds after which waking up is not believed any more."""
        return WAKE_FACTOR * self.wake_seconds(size) + WAKE_SLACK

    def is_overdue(self, size: int | None, now: float) -> bool:
        """Whether it wakes up for longer than is believable."""
        return self.waking_since is not None and now - self.waking_since > self.wake_limit(size)

    def may_rest(self, now: float, *, used: bool) -> bool:
        """Whether to ask an awake server nothing that keeps it awake; `used`: it works anyway."""
        if used:
            self._rests_since = None
            return False
        self.rested += now - (now if self._rests_since is None else self._rests_since)
        self._rests_since = now
        return self.seen or self.rested < MOST_REST
