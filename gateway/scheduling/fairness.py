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

from gateway.scheduling.placement_state import FairnessAccount

LEAST_TOKEN_WEIGHT, MOST_TOKEN_WEIGHT = 1.0, 32.0
"""What a written token may cost, in prompt tokens."""

COUNTER_SLACK = 2.0
"""Mean charges of one request by which a caller may be ahead of the least and still go."""

MOST_ACCOUNTS = 4096
"""Accounts of idle callers that are kept."""


CounterKey = tuple[float, int, FairnessAccount]


@dataclass(slots=True, eq=False)
class VirtualTokenCounters:
    """The accounts of one class."""

    accounts: dict[str, FairnessAccount] = field(default_factory=dict)
    by_counter: list[CounterKey] = field(default_factory=list)
    """Those with something in line, the least served first."""
    start_counter: float = 0.0
    """Where a caller starts while nobody waits: where the last one stood that was served."""
    mean_charge: float = 1.0
    """The mean charge of a request."""
    _numbers: int = 0

    def account(self, fairness_key: str) -> FairnessAccount:
        """The account of a caller, who has just sent a request."""
        account = self.accounts.get(fairness_key)
        if account is None:
            if len(self.accounts) >= MOST_ACCOUNTS:
                self._forget()
            self._numbers += 1
            account = self.accounts[fairness_key] = FairnessAccount(fairness_key, self._numbers)
        if not account.fifos:
            least = self.by_counter[0][0] if self.by_counter else self.start_counter
            if account.counter < least:  # noqa: PLR1730 - a call costs four times as much
                account.counter = least
        return account

    def add_waiting(self, account: FairnessAccount) -> None:
        """It has something in line now."""
        insort(self.by_counter, (account.counter, account.serial, account))

    def remove_waiting(self, account: FairnessAccount) -> None:
        """It has nothing in line any more."""
        del self.by_counter[bisect_left(self.by_counter, (account.counter, account.serial))]

    def started(self, account: FairnessAccount, charge: float) -> None:
        """Count work that was begun for it."""
        self.start_counter = self.by_counter[0][0] if self.by_counter else account.counter
        self.mean_charge += (charge - self.mean_charge) / 32
        account.running += 1
        if account.fifos:
            self._move(account, charge)
        else:
            account.counter += charge

    def settled(self, account: FairnessAccount, correction: float) -> None:
        """The work has ended, and was more than counted by `correction`, or less."""
        account.running -= 1
        if account.fifos:
            self._move(account, correction)
        else:
            account.counter += correction

    @property
    def counter_limit(self) -> float:
        """The highest counter with which a caller may go now."""
        return self.by_counter[0][0] + COUNTER_SLACK * self.mean_charge if self.by_counter else 0.0

    def _move(self, account: FairnessAccount, by: float) -> None:
        self.remove_waiting(account)
        account.counter += by
        self.add_waiting(account)

    def _forget(self) -> None:
        """Drop idle callers that would start at the level anyway; else half of the idle ones."""
        idle = [one for one in self.accounts.values() if not one.fifos and not one.running]
        idle.sort(key=lambda account: account.counter)
        for account in idle[: max(len(idle) // 2, 1)]:
            del self.accounts[account.fairness_key]
