"""Fairness between callers of one class: virtual token counters.

Each caller has a counter of the work it was served; who has the least goes first. A caller that
comes back from idle starts at the lowest counter of those who wait, so that nobody saves up turns
(Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Among callers within a small
slack of the least the one that suits the free node goes (Cao et al., "Locality-aware Fair
Scheduling in LLM Serving", 2025): the slack bounds what that costs the others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.scheduling.ask import Ask, Shape

LEAST_WEIGHT, MOST_WEIGHT = 1.0, 32.0
"""What a written token may cost, in prompt tokens."""
SLACK = 2.0
"""Mean charges of one request by which a caller may be ahead of the least and still go."""
MANY = 4096
"""Accounts of idle callers that are kept."""


@dataclass(slots=True, eq=False)
class Account:
    """What one caller of a class was served, and what it has in line."""

    caller: str
    number: int
    counter: float = 0.0
    """Prompt tokens' worth of work."""
    running: int = 0
    lanes: dict[Shape, list[Ask]] = field(default_factory=dict)
    """Its waiting requests by shape, the oldest first."""


Place = tuple[float, int, Account]


@dataclass(slots=True, eq=False)
class Shares:
    """The accounts of one class."""

    accounts: dict[str, Account] = field(default_factory=dict)
    order: list[Place] = field(default_factory=list)
    """Those with something in line, the least served first."""
    level: float = 0.0
    """Where a caller starts while nobody waits: where the last one stood that was served."""
    charge: float = 1.0
    """The mean charge of a request."""
    _numbers: int = 0

    def account(self, caller: str) -> Account:
        """The account of a caller, who has just sent a request."""
        account = self.accounts.get(caller)
        if account is None:
            if len(self.accounts) >= MANY:
                self._forget()
            self._numbers += 1
            account = self.accounts[caller] = Account(caller, self._numbers)
        if not account.lanes:
            least = self.order[0][0] if self.order else self.level
            if account.counter < least:  # noqa: PLR1730 - a call costs four times as much
                account.counter = least
        return account

    def joins(self, account: Account) -> None:
        """It has something in line now."""
        insort(self.order, (account.counter, account.number, account))

    def leaves(self, account: Account) -> None:
        """It has nothing in line any more."""
        del self.order[bisect_left(self.order, (account.counter, account.number))]

    def served(self, account: Account, charge: float) -> None:
        """Count work that was begun for it."""
        self.level = self.order[0][0] if self.order else account.counter
        self.charge += (charge - self.charge) / 32
        account.running += 1
        if account.lanes:
            self._move(account, charge)
        else:
            account.counter += charge

    def settled(self, account: Account, correction: float) -> None:
        """The work has ended, and was more than counted by `correction`, or less."""
        account.running -= 1
        if account.lanes:
            self._move(account, correction)
        else:
            account.counter += correction

    @property
    def reach(self) -> float:
        """The highest counter with which a caller may go now."""
        return self.order[0][0] + SLACK * self.charge if self.order else 0.0

    def _move(self, account: Account, by: float) -> None:
        self.leaves(account)
        account.counter += by
        self.joins(account)

    def _forget(self) -> None:
        """Drop idle callers that would start at the level anyway; else half of the idle ones."""
        idle = [one for one in self.accounts.values() if not one.lanes and not one.running]
        idle.sort(key=lambda account: account.counter)
        for account in idle[: max(len(idle) // 2, 1)]:
            del self.accounts[account.caller]
