"""Whether a node's server runs: as its probes, its hooks and its sleep show. Counting, without I/O.

**Sleep.** llama.cpp unloads its model after `--sleep-idle-seconds` without work.

A sleeping server is alive and takes work: the next request loads the model again, and waits for
that without a head. `/props` tells whether it sleeps, and tells nothing beforehand: every build
that can sleep says `"is_sleeping": false`, with the option and without. `/slots`, `/tokenize` and
all that needs the model wake it, and begin its time anew while it is awake. `/health`, `/props`,
`/v1/models` and `/metrics` do neither (measured with build 11669 and the wheel's server).
"""

from __future__ import annotations

import enum
import hashlib
import math
import random
import re
from dataclasses import dataclass

# Seconds from a start until a node can work, for one that has not been started yet.
ASSUMED_STARTUP = 60.0


class LifecyclePhase(enum.Enum):
    """From standby to work and back."""

    UNKNOWN = "unknown"  # not probed yet: it may have run since before this gateway started
    OFF = "off"
    STARTING = "starting"  # its start hook runs, or has ended and the server is not up yet
    ON = "on"
    RETIRING = "retiring"  # it finishes its requests and gets no new ones
    STOPPING = "stopping"  # its stop hook runs, or has failed and is tried again


@dataclass(slots=True)
class Lifecycle:
    """One standby node. Times are monotonic seconds."""

    phase: LifecyclePhase = LifecyclePhase.UNKNOWN
    reason: str = ""
    since: float = -math.inf
    started_at: float = -math.inf
    stopped_at: float = -math.inf
    retry_at: float = -math.inf  # after a hook has failed: when it may run again
    failures: int = 0  # starts and stops that failed in a row
    startup_seconds: float | None = None
    at_max_running: bool = False
    """It may not be started: the most nodes allowed (`max_running`) run already."""
    down_since: float | None = None  # since when it has been down though it should run

    def enter(self, phase: LifecyclePhase, reason: str, now: float) -> None:
        """Begin another phase."""
        if phase is LifecyclePhase.OFF and self.phase is LifecyclePhase.STOPPING:
            self.stopped_at = now
        self.phase, self.reason, self.since = phase, reason, now
        self.down_since = None

    def record_failure(self, now: float, initial: float, longest: float) -> None:
        """A start or a stop has failed: wait before the next try, longer each time."""
        wait = min(longest, initial * 2.0 ** min(self.failures, 30))
        self.failures += 1
        self.retry_at = now + wait

    def start(self, reason: str, now: float) -> None:
        """Its start hook is run now."""
        self.started_at = now
        self.enter(LifecyclePhase.STARTING, reason, now)

    def runs(self, now: float) -> None:
        """Probes show that it runs."""
        if self.phase is LifecyclePhase.STARTING:
            self.startup_seconds = now - self.since
        self.clear_failures()
        self.enter(LifecyclePhase.ON, "it runs", now)

    def clear_failures(self) -> None:
        """Count failures from 0 again."""
        self.failures = 0

    def note_down(self, now: float, *, down: bool) -> None:
        """Keep `down_since`, by the probes of a node that should run."""
        if not down:
            self.down_since = None
        elif self.down_since is None:
            self.down_since = now

    def explain(self, reason: str) -> None:
        """Give another reason for the same phase."""
        self.reason = reason

    def limit(self, *, at_max_running: bool) -> None:
        """Whether it may not be started, since as many run as may."""
        self.at_max_running = at_max_running

    def ready_in(self, now: float, cooldown: float) -> float:
        """Seconds until it can be expected to work, if it is started as soon as it may be."""
        expected = ASSUMED_STARTUP if self.startup_seconds is None else self.startup_seconds
        if self.phase is LifecyclePhase.OFF:
            return expected + max(0.0, self.retry_at - now, self.stopped_at + cooldown - now)
        if self.phase is LifecyclePhase.STARTING:
            # A start that takes longer than the last one is likely to take some more.
            elapsed = now - self.since
            return max(expected - elapsed, 1.0 + 0.2 * elapsed)
        return 1.0


# Seconds after our last request for which a server may still be asked what restarts its time.
REST_DELAY = 3.0
# Seconds after our last request for which others' load on a server is of interest while the fleet
# works.
RECENT_USE = 60.0
# Seconds: a server without `/metrics` that was left alone so long in all, and was never seen
# asleep, is taken for one that does not sleep; above half an hour, a common setting.
MOST_REST = 2000.0
# Seconds to wake up, and bytes of the model that are loaded in a second, until it is measured.
WAKE_BASE, WAKE_BYTES_PER_SECOND = 1.0, 1e9
# Size of a model whose server does not tell it: 13 billion parameters in 5 bits.
UNKNOWN_MODEL_BYTES = 8e9
LEAST_WAKE, MOST_WAKE = 0.1, 3600.0  # bounds of the seconds that waking up is expected to take
# Waking up may take so long where neither it nor the model's size is known: what Ollama allows.
UNKNOWN_WAKE_LIMIT = 300.0
# Waking up may take so many times longer than expected, and so many seconds more.
WAKE_FACTOR, WAKE_SLACK = 4.0, 60.0
_IS_SLEEPING = re.compile(rb'"is_sleeping"\s*:\s*(true|false)')


def read_is_sleeping(props: bytes) -> tuple[bool | None, bytes]:
    """Whether an answer to `/props` says that the server sleeps, and the answer without that.

    None: its build can't sleep.
    """
    at = props.rfind(b'"is_sleeping"')
    if at < 0 or (found := _IS_SLEEPING.match(props, at)) is None:
        return None, props
    return found[1] == b"true", props[:at] + props[found.end() :]


@dataclass(slots=True)
class Sleep:
    """One server's sleep, as far as `/props` and our requests show it. Times are monotonic."""

    possible: bool = False  # whether its build can sleep
    asleep: bool = False  # by the last answer to `/props`
    seen: bool = False  # whether it has slept since its process began
    waking_since: float | None = None
    """Since when it loads its model again; None: it does not, or has shown that it is awake."""
    rested: float = 0.0  # seconds for which it was left alone, awake, in all
    measured: float | None = None
    """Seconds that waking up took, the last time counting as much as all before."""
    _rests_since: float | None = None  # up to when `rested` counts; None: it was asked since

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
        if self.measured is None and size is None:
            return UNKNOWN_WAKE_LIMIT
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


# Failed probes in a row after which a node is no longer expected back at any moment.
MOST_QUICK_REPROBES = 30
# Share by which an interval varies, so that nodes probed together by chance part again.
PROBE_JITTER = 0.1
# Seconds between the probes of a node about to change: loading, failing, or just gone.
QUICK_PROBE_DELAY = 1.0


class ProbeAnswer(enum.Enum):
    """How a probe ended."""

    UP = "up"
    LOADING = "loading"
    CONNECTION_REFUSED = "refused"
    TIMED_OUT = "timed out"
    KEY_REJECTED = "locked"  # it is alive, but rejects the gateway's key
    NO_MODEL = "names no model"  # it is alive, but neither it nor the inventory names a model
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A probe's end, with a detail for the operator."""

    answer: ProbeAnswer
    detail: str

    @property
    def up(self) -> bool:
        """Whether the node is there and can take work."""
        return self.answer is ProbeAnswer.UP


@dataclass(slots=True)
class ProbeHistory:
    """The probes of one node. Times are monotonic seconds."""

    probed: bool = False
    up: bool = False  # by the last verdict; it takes `rise` or `fall` probes to change
    loading: bool = False
    mute: bool = False  # it let a probe time out while something else showed that it is alive
    unread: int = 0
    """Readings of its slots in a row that timed out without excuse, though `/health` answered."""
    unread_since: float = 0.0  # when the first of them began
    frozen: bool = False  # whether these were `fall`, and none has been answered since
    detail: str = ""
    successes_in_a_row: int = 0
    failures_in_a_row: int = 0
    load_unread: bool = False  # whether its load is unknown, since it was left alone
    discovered_at: float | None = None
    """When the server's properties were last read; None: to be read before it gets work."""
    props_digest: bytes | None = None
    """Of the answer to `/props` that was read last; None: there was none."""
    last_probe_at: float | None = None
    next_probe_at: float = 0.0

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
        if result.answer is ProbeAnswer.TIMED_OUT and self.up and sign_of_life:
            self.mute = True
            self.failures_in_a_row = 0
            self.detail = f"{result.detail}, but {sign_of_life}: no new work until it answers"
            return
        is_loading = result.answer is ProbeAnswer.LOADING
        self.failures_in_a_row = 0 if is_loading else self.failures_in_a_row + 1
        if (
            not self.up
            or self.failures_in_a_row >= fall
            or result.answer in {ProbeAnswer.LOADING, ProbeAnswer.CONNECTION_REFUSED}
        ):
            self.up = self.mute = False
            self.slots_read()
            self.loading, self.detail, self.discovered_at = is_loading, result.detail, None
        elif self.mute:
            self.detail = f"{result.detail} ({self.failures_in_a_row} of {fall} times)"

    def slots_unread(self, asked_at: float, fall: int) -> None:
        """A reading of its slots has timed out, and no work of ours explains it."""
        if not self.unread:
            self.unread_since = asked_at
        self.unread += 1
        self.frozen = self.unread >= fall

    def slots_read(self, *, left_alone: bool = False) -> None:
        """Its slots were read, or can't be asked for; or were not, so that it may fall asleep."""
        self.unread, self.frozen, self.load_unread = 0, False, left_alone

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
