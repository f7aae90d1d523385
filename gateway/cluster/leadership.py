"""Who leads a cluster: a row that members claim and renew, by their own clocks.

The row holds the leader's name, its epoch and a counter that each renewal changes. There is no time
of day in it: a leader leads for a term from before it sent the update that succeeded, and a member
claims the row only after it has seen it unchanged for a whole term, the leader's if that is longer.
So nobody else can have the row while a leader's term runs, whatever the clocks of the database and
of other machines say, as long as boot-time clocks run at about the same speed.

A database that fails over to an old state brings back an old row. So a member counts only a time
through which it has looked at the row at short intervals, `gap`, and a new leader grants nothing
until a renewal that it sent a gap after its claim has succeeded. If an old row replaced the new
leader's within a gap, that renewal fails; if later, the others have seen the change.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import structlog

from gateway.store.failures import StoreError

TERM_SECONDS = 2.0  # for which a leader leads after it has sent a claim or renewal that succeeded
log = structlog.get_logger()


def boot_clock() -> float:
    """Seconds since this machine was booted, those in which it was suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaderRow(NamedTuple):
    """What all members see of the leadership."""

    holder: str  # the leader's name, which no other process ever has; empty: nobody has led yet
    epoch: int  # each claim raises it
    counter: int  # of renewals in this epoch; the holder never writes a number twice


FIRST_ROW = LeaderRow("", 0, 0)


def holder_name(process: str, term: float) -> str:
    """The name in the row of a process that leads by this term, in seconds."""
    return f"{process}/{term:g}"


def parse_holder(holder: str) -> tuple[str, float]:
    """The process that a name in the row means, and its term; 0: the name does not tell."""
    process, _, term = holder.rpartition("/")
    try:
        return process, float(term)
    except ValueError:
        return holder, 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """Write `wanted` if the row still has the holder and epoch of `old`; a claim: all of it."""

    old: LeaderRow
    wanted: LeaderRow
    is_claim: bool


class Leadership(Protocol):
    """Where the row is: the store, or what else can change it on a condition (a Kubernetes Lease).

    Every call ends within a fraction of a term. One that raised may have been done, even later.
    """

    async def look(self) -> LeaderRow:
        """The row. Raises: StoreError."""

    async def change(self, change: Change) -> bool:
        """Do it; False: its condition does not hold. Raises: StoreError."""


class Member:
    """One process that would lead: follower, challenger or leader. Times are of its boot clock.

    `name`: of this process alone; one that starts again has another. Its owner does one step after
    the other, and tells how it ended: `saw`, `done` or `refused`; nothing, if that is unknown.
    """

    def __init__(self, name: str, term: float = TERM_SECONDS) -> None:
        self.name = name
        self.term = term
        self.gap = term * 3 / 8
        self.row: LeaderRow | None = None  # as it was last seen; None: unknown
        self.won_at = -math.inf  # when it knew that it had its epoch
        self.lead_until = -math.inf
        self.highest = 0  # the highest epoch that it knows of
        self.stands = True  # whether it claims the row; else it only looks
        self._confirmed = False
        self._since = 0.0  # since when the row is unchanged
        self._looked_at = -math.inf  # when it last asked for the row that it got
        self._counter = 0

    def leads(self, now: float) -> bool:
        """Whether its term runs, so that no other member has one."""
        return now < self.lead_until

    def may_grant(self, now: float) -> bool:
        """Whether it may grant slots: no old state of the database can have hidden its claim."""
        return self.leads(now) and self._confirmed

    def is_blind(self, now: float) -> bool:
        """Whether it has not seen the row for a whole term."""
        return self.row is None or now - self._looked_at > self.term

    def _stands_still(self, now: float) -> float:
        """Seconds for which the row has been unchanged beyond a term; below 0: until that is so.

        The holder's term is another one while the settings are being changed.
        """
        held = 0.0 if self.row is None else parse_holder(self.row.holder)[1]
        return now - self._since - max(self.term, held)

    def knows_leader(self, now: float) -> bool:
        """Whether it leads, or sees that another one has the row and renews it."""
        row = self.row
        is_fresh = not self.is_blind(now) and self._stands_still(now) < 0
        return self.leads(now) or (is_fresh and bool(row and row.holder))

    def pause(self, now: float) -> float:
        """Seconds until its next step, if all goes well."""
        if self.leads(now):
            # The renewal that confirms a claim comes as soon as it can.
            return self.term / 4 if self._confirmed else max(0.0, self.won_at + self.gap - now)
        left = -self._stands_still(now) if self.stands else self.term
        return min(self.term / 8, max(0.0, left))

    def next_step(self, now: float) -> Change | None:
        """What to do now; None: look at the row. No two steps ever write the same."""
        step = self._next(now)
        if step is not None:
            self.highest, self._counter = step.wanted.epoch, step.wanted.counter
        return step

    def _next(self, now: float) -> Change | None:
        row = self.row
        if row is None or not self.stands:
            return None
        if self.leads(now):
            # Edges that know a later epoch obey no earlier one.
            epoch = row.epoch if row.epoch == self.highest else self.highest + 1
            return Change(row, LeaderRow(self.name, epoch, self._counter + 1), is_claim=False)
        if self._stands_still(now) < 0 or now - self._looked_at > self.gap:
            return None
        return Change(row, LeaderRow(self.name, self.highest + 1, 0), is_claim=True)

    def saw(self, row: LeaderRow, asked_at: float, now: float) -> None:
        """A look, sent at `asked_at`, has found this row."""
        if row != self.row or now - self._looked_at > self.gap:
            self._since = now
        self.row = row
        self.highest = max(self.highest, row.epoch)
        self._looked_at = asked_at

    def done(self, step: Change, asked_at: float, now: float) -> None:
        """The step, sent at `asked_at`, has succeeded: its term runs from then on."""
        if self.row is None:
            return  # It has given up meanwhile.
        if step.is_claim and now - self._looked_at > self.gap:
            # An old state of the database may have made the row what was seen long ago.
            self.saw(step.wanted, asked_at, now)
            return
        self.row, self._since, self._looked_at = step.wanted, now, asked_at
        self.lead_until = asked_at + self.term
        if step.wanted.epoch != step.old.epoch:
            self.won_at, self._confirmed = now, False
        elif asked_at >= self.won_at + self.gap:
            self._confirmed = True

    def refused(self) -> None:
        """The condition of the last step did not hold: somebody else has the row, or shall."""
        self.row = None
        self.lead_until = -math.inf

    def heard(self, epoch: int, now: float) -> None:
        """An edge knows a leader of this epoch: if the row has an earlier one, it is outdated."""
        self.highest = max(self.highest, epoch)
        if self.row is not None and epoch > self.row.epoch and not self.leads(now):
            self._since = now


async def contend(
    member: Member,
    leadership: Leadership,
    *,
    clock: Callable[[], float] = boot_clock,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Follow, claim and renew until cancelled; `on_step` is called after each step."""
    problem = None
    while True:
        asked_at = clock()
        step = member.next_step(asked_at)
        pause = member.term / 8
        try:
            if step is None:
                member.saw(await leadership.look(), asked_at, clock())
            elif await leadership.change(step):
                member.done(step, asked_at, clock())
            else:
                member.refused()
        except StoreError as error:
            if problem is None:
                log.warning("cluster: the leadership can't be reached", why=str(error))
            problem = error
        else:
            if problem is not None:
                log.info("cluster: the leadership can be reached again")
            problem = None
            pause = member.pause(asked_at)
        on_step()
        # A step that took its time is no reason to be late with the next one.
        await asyncio.sleep(max(0.01, asked_at + pause - clock()))
